//! The pool's ring as a source of events.

use super::BlockFacts;
use super::hashing::Keyed;
use super::notes::Notes;
use super::publish_lag::Marks;
use crate::config::CacheGroups;
use kvbm_events::{EventKind, EventSource, KvEvent, PublisherWaker};
use kvbm_plan::{BlockIdentity, GroupId, SequenceHash, Tier};
use kvbm_pool::{EventRecord, Registry};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How far the ring was read, for whoever watches.
#[derive(Default)]
pub(super) struct Progress {
    gaps: AtomicU64,
    marks: Mutex<Marks>,
}

impl Progress {
    pub(super) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// All events below `next` have happened.
    pub(super) fn note(&self, next: u64) {
        self.marks.lock().note(next, kvbm_plan::clock::now());
    }

    /// How long the oldest event that is not below `told` has waited.
    pub(super) fn lag(&self, announced: u64) -> Duration {
        self.marks.lock().lag(announced, kvbm_plan::clock::now())
    }
}

/// Events for which the notes are held at a time: a few microseconds that a commit may have to
/// wait.
const AT_A_TIME: usize = 64;

/// Drained by the publisher's thread.
pub(super) struct Ring {
    registry: Registry,
    facts: BlockFacts,
    notes: Arc<Notes>,
    roots: Roots,
    records: Vec<EventRecord>,
    progress: Arc<Progress>,
}

impl Ring {
    pub(super) fn new(
        registry: Registry,
        facts: BlockFacts,
        notes: Arc<Notes>,
        progress: Arc<Progress>,
    ) -> Self {
        Self { registry, facts, notes, roots: Roots::default(), records: Vec::new(), progress }
    }
}

impl EventSource for Ring {
    fn attach(&mut self, waker: PublisherWaker) -> bool {
        self.registry.on_events_due(move || waker.wake())
    }

    fn wake_when(&mut self, waiting: usize) {
        self.registry.wake_when(waiting);
    }

    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        self.records.clear();
        let drained = self.registry.drain_events(&mut self.records, max);
        self.progress.gaps.fetch_add(u64::from(drained.lost > 0), Ordering::Relaxed);
        for records in self.records.chunks(AT_A_TIME) {
            let known = self.notes.read();
            for record in records {
                let root = self.roots.follow(record);
                let local_hash = known.local_hash(&record.identity.hash);
                let block = self.facts.block(record.tier, record.identity, root, local_hash);
                let kind = match record.kind {
                    kvbm_pool::EventRecordKind::Store => EventKind::Store(block),
                    kvbm_pool::EventRecordKind::Remove => EventKind::Remove(block),
                };
                out.push(KvEvent::new(record.seq, kind));
            }
        }
        let registry = &self.registry;
        let slots: usize = Tier::SLOTTED.into_iter().map(|tier| registry.capacity(tier) as usize).sum();
        let groups = self.facts.block_bytes.len() as u16;
        let there = |hash| (0..groups).any(|group| !registry.tiers_of(GroupId(group), hash).is_empty());
        self.roots.prune(2 * slots, there);
        drained.next_seq
    }
}

/// The first block of the chain of every block that is on some tier. As large as the registry, at
/// most twice that where events were lost, and kept off its locks.
#[derive(Default)]
struct Roots {
    known: HashMap<SequenceHash, Root, Keyed>,
    /// The block that was stored last and the first one of its chain: most often its child comes
    /// next.
    last: Option<(SequenceHash, SequenceHash)>,
}

#[derive(Clone, Copy)]
struct Root {
    hash: SequenceHash,
    /// A bit for each cache group and tier that has the block.
    copies: u128,
}

impl Roots {
    /// Lost events leave blocks behind that are gone: beyond `limit` blocks, only those that are
    /// `there` are kept.
    fn prune(&mut self, limit: usize, there: impl Fn(SequenceHash) -> bool) {
        if self.known.len() > limit {
            self.known.retain(|hash, _| there(*hash));
        }
    }

    /// The chain's first block. After lost events it may be unknown: then the earliest block that
    /// is known.
    fn follow(&mut self, record: &EventRecord) -> SequenceHash {
        let BlockIdentity { hash, parent, group, .. } = record.identity;
        let bit = 1 << (4 * (usize::from(group.0) % CacheGroups::MAX) + record.tier.index() % 4);
        match record.kind {
            kvbm_pool::EventRecordKind::Store => {
                let of_parent = match (parent, self.last) {
                    (Some(parent), Some((last, root))) if parent == last => Some(root),
                    (parent, _) => parent.map(|parent| self.of(parent)),
                };
                let root = Root { hash: of_parent.unwrap_or(hash), copies: 0 };
                let root = self.known.entry(hash).or_insert(root);
                root.copies |= bit;
                self.last = Some((hash, root.hash));
                root.hash
            }
            kvbm_pool::EventRecordKind::Remove => {
                let Entry::Occupied(mut root) = self.known.entry(hash) else {
                    return parent.map_or(hash, |parent| self.of(parent));
                };
                let chain = root.get().hash;
                root.get_mut().copies &= !bit;
                if root.get().copies == 0 {
                    root.remove();
                }
                chain
            }
        }
    }

    /// The first block of the chain of `block`, or itself where that is not known.
    fn of(&self, block: SequenceHash) -> SequenceHash {
        self.known.get(&block).map_or(block, |root| root.hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockId, GroupId, NamespaceId};
    use kvbm_pool::EventRecordKind;

    fn record(seq: u64, kind: EventRecordKind, hash: u8, parent: Option<u8>) -> EventRecord {
        let hash_of = |byte| SequenceHash::from_bytes([byte; 16]);
        let identity = BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: hash_of(hash),
            parent: parent.map(hash_of),
            position: u32::from(parent.is_some()),
        };
        EventRecord { seq, kind, tier: Tier::G1, block: BlockId(0), identity }
    }

    #[test]
    fn blocks_whose_removal_was_lost_are_not_kept_for_good() {
        let mut roots = Roots::default();
        let root = roots.follow(&record(0, EventRecordKind::Store, 1, None));
        assert_eq!(roots.follow(&record(1, EventRecordKind::Store, 2, Some(1))), root);
        for lost in 3..9 {
            roots.follow(&record(u64::from(lost), EventRecordKind::Store, lost, None));
        }
        roots.prune(8, |_| panic!("there is room"));
        roots.prune(7, |hash| hash.as_bytes()[0] < 3);
        assert_eq!(roots.known.len(), 2);
        assert_eq!(
            roots.follow(&record(9, EventRecordKind::Store, 9, Some(2))),
            root,
            "the others know their chain"
        );
        assert_eq!(roots.follow(&record(10, EventRecordKind::Remove, 2, Some(1))), root);
        assert_eq!(roots.known.len(), 2);
    }
}
