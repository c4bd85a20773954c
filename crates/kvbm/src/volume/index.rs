//! What is on the volume, as far as this leader knows: a hint that saves asking. Beside the pool,
//! whose entries have slots; here are only hashes, prefix-closed: a block goes only after what
//! continues it.

use super::history::{History, Moment};
use super::log::{Change, Log};
use super::writes::{Landing, Writes};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, VolumeId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

type Key = (GroupId, SequenceHash);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyState {
    /// Not there, but something that continues it is.
    Gone,
    /// On its way.
    Arriving,
    /// There, by what a probe of other blocks implies. No event was published.
    Assumed,
    /// There, and its event was published.
    Present,
}

impl CopyState {
    fn is_there(self) -> bool {
        matches!(self, Self::Assumed | Self::Present)
    }
}

struct Entry {
    identity: BlockIdentity,
    root: SequenceHash,
    state: CopyState,
    /// Entries that continue it and were made after it.
    children: u32,
    /// Whether it counts among the children of its parent.
    counted: bool,
    /// Place in the order of use.
    used: u64,
}

/// What a block that is to be written finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Write it; it counts as on its way.
    New,
    /// It is there or on its way.
    Known,
    /// The block before it is not.
    Orphan,
    /// It is being removed: what is written now may be what the removal finds.
    Leaving,
}

/// See the module.
pub(crate) struct Index {
    entries: HashMap<Key, Entry>,
    /// Blocks that are there and that nothing continues, least recently used first.
    leaves: BTreeMap<u64, Key>,
    clock: u64,
    present: usize,
    capacity: usize,
    volume: VolumeId,
    /// Of all volumes.
    log: Arc<Mutex<Log>>,
    /// Blocks whose removal from the store is not confirmed, and by how many orders.
    leaving: HashMap<Key, u32>,
    /// Namespaces, or everything, whose removal is not confirmed.
    purging: HashSet<Option<NamespaceId>>,
    /// What may land yet.
    writes: Writes,
    /// What came and went while somebody looked.
    history: History,
    /// The volume was unregistered: nothing is there any more.
    retired: bool,
}

impl Index {
    /// At most `capacity` blocks.
    pub(crate) fn new(volume: VolumeId, capacity: usize, log: Arc<Mutex<Log>>) -> Self {
        Self {
            entries: HashMap::new(),
            leaves: BTreeMap::new(),
            clock: 0,
            present: 0,
            capacity,
            volume,
            log,
            leaving: HashMap::new(),
            purging: HashSet::new(),
            writes: Writes::default(),
            history: History::default(),
            retired: false,
        }
    }

    /// Blocks that are there.
    pub(crate) fn len(&self) -> usize {
        self.present
    }

    pub(crate) fn contains(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.entries.get(&(group, hash)).is_some_and(|entry| entry.state.is_there())
    }

    /// Whether the block is there or on its way.
    pub(crate) fn awaits(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.entries.get(&(group, hash)).is_some_and(|entry| entry.state != CopyState::Gone)
    }

    /// How many of `hashes`, from the first on, are there.
    pub(crate) fn prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> usize {
        hashes.iter().take_while(|hash| self.contains(group, **hash)).count()
    }

    /// A use of these blocks, the last one first: the head of a chain is the last to go.
    pub(crate) fn touch(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        for &hash in hashes.iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            let Some(entry) = self.entries.get_mut(&(group, hash)) else { continue };
            if entry.state.is_there() && entry.children == 0 {
                self.leaves.remove(&entry.used);
                self.leaves.insert(clock, (group, hash));
            }
            entry.used = clock;
        }
    }

    /// When a look at the volume that begins now begins.
    pub(crate) fn now(&self) -> Moment {
        self.history.now()
    }

    /// The volume is unregistered: whatever was there leaves, and nothing comes any more. How many
    /// were there.
    pub(crate) fn retire(&mut self) -> u64 {
        self.retired = true;
        self.remove_all(|_| true)
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// These blocks are about to be removed from the store: until [`left`](Self::left) they are
    /// neither written nor learned of.
    pub(crate) fn leave(&mut self, blocks: &[BlockIdentity]) {
        for block in blocks {
            *self.leaving.entry((block.group, block.hash)).or_default() += 1;
        }
    }

    /// The removal is over, whatever came of it.
    pub(crate) fn left(&mut self, blocks: &[Key]) {
        for key in blocks {
            self.history.went(key.1);
            if let Some(orders) = self.leaving.get_mut(key) {
                *orders -= 1;
                if *orders == 0 {
                    self.leaving.remove(key);
                }
            }
        }
    }

    /// Whether the removal of the block is not confirmed.
    pub(crate) fn is_leaving(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.leaving.contains_key(&(group, hash))
    }

    /// A namespace, or everything, is about to be removed from the store: its blocks are gone, and
    /// until [`purged`](Self::purged) they are neither written nor learned of. How many were there.
    pub(crate) fn purge(&mut self, namespace: Option<NamespaceId>) -> u64 {
        self.purging.insert(namespace);
        self.remove_all(|found| namespace.is_none_or(|wanted| found == wanted))
    }

    /// What of a namespace, or of everything, may land yet. While it is being [purged](Self::purge)
    /// nothing is added to that.
    pub(super) fn landing(&self, namespace: Option<NamespaceId>, now: Instant) -> Landing {
        self.writes.landing(namespace, now)
    }

    /// That removal is confirmed, and nothing lands any more.
    pub(crate) fn purged(&mut self, namespace: Option<NamespaceId>) {
        self.purging.remove(&namespace);
        self.history.purged();
    }

    /// Whether a removal that is not confirmed may find what is written under this name now.
    fn is_on_its_way_out(&self, identity: &BlockIdentity) -> bool {
        self.is_leaving(identity.group, identity.hash)
            || self.purging.contains(&None)
            || self.purging.contains(&Some(identity.namespace))
    }

    /// Whether what a look that began at `since` found may have been removed.
    fn may_have_gone(&self, identity: &BlockIdentity, since: Moment) -> bool {
        self.is_on_its_way_out(identity) || self.history.has_gone(identity.hash, since)
    }

    /// How many of these blocks, from the first on, are there if a look that began at `since` found
    /// them: no removal is or was about them.
    pub(crate) fn staying(&self, blocks: &[BlockIdentity], since: Moment) -> usize {
        let stays = |block: &&BlockIdentity| {
            self.contains(block.group, block.hash) || !self.may_have_gone(block, since)
        };
        blocks.iter().take_while(stays).count()
    }

    /// Begins to write a block.
    pub(crate) fn begin(&mut self, identity: &BlockIdentity) -> Admission {
        if self.awaits(identity.group, identity.hash) {
            return Admission::Known;
        }
        if self.is_on_its_way_out(identity) {
            return Admission::Leaving;
        }
        if self.retired || identity.parent.is_some_and(|parent| !self.awaits(identity.group, parent)) {
            return Admission::Orphan;
        }
        self.enter(identity, CopyState::Arriving);
        self.writes.begin(identity.namespace);
        Admission::New
    }

    /// A block that was on its way is there. Not, where it was removed meanwhile. Once for each
    /// that [began](Self::begin).
    pub(crate) fn complete(&mut self, identity: &BlockIdentity) -> bool {
        let key = (identity.group, identity.hash);
        self.writes.end(identity.namespace, None);
        self.history.came(identity.hash);
        let arriving = self.entries.get(&key).is_some_and(|entry| entry.state == CopyState::Arriving);
        if arriving {
            self.set(key, CopyState::Present);
        }
        arriving
    }

    /// A block that was on its way did not arrive, as far as is known. Where that is not certain,
    /// it may land until then. Once for each that [began](Self::begin).
    pub(crate) fn fail(&mut self, identity: &BlockIdentity, doubtful_until: Option<Instant>) {
        let key = (identity.group, identity.hash);
        self.writes.end(identity.namespace, doubtful_until);
        if self.entries.get(&key).is_some_and(|entry| entry.state == CopyState::Arriving) {
            self.set(key, CopyState::Gone);
        }
    }

    /// A block was found to be there by a look that began at `since`. `certain` where it was looked
    /// at itself.
    pub(crate) fn learn(&mut self, identity: &BlockIdentity, certain: bool, since: Moment) {
        let key = (identity.group, identity.hash);
        if self.retired || self.may_have_gone(identity, since) {
            return;
        }
        match self.entries.get(&key).map(|entry| entry.state) {
            Some(CopyState::Present | CopyState::Arriving) => {}
            Some(CopyState::Assumed) if !certain => {}
            Some(_) => self.set(key, if certain { CopyState::Present } else { CopyState::Assumed }),
            None => self.enter(identity, if certain { CopyState::Present } else { CopyState::Assumed }),
        }
    }

    /// A block is not there, or is damaged, by a look that began at `since`. Whether it was thought
    /// to be there: once for each time that it was. One that is on its way, or came since, is
    /// another object than the one that was looked at.
    pub(crate) fn remove(&mut self, group: GroupId, hash: SequenceHash, since: Moment) -> bool {
        let there = self.contains(group, hash) && !self.history.has_come(hash, since);
        if there {
            self.set((group, hash), CopyState::Gone);
        }
        there
    }

    /// Removes what `select` picks. How many were there.
    pub(crate) fn remove_all(&mut self, select: impl Fn(NamespaceId) -> bool) -> u64 {
        let awaited = |entry: &&Entry| entry.state != CopyState::Gone && select(entry.identity.namespace);
        let mut picked: Vec<_> = self.entries.values().filter(awaited).map(|entry| entry.identity).collect();
        // Children first, so that nothing is kept for their sake.
        picked.sort_unstable_by_key(|identity| std::cmp::Reverse(identity.position));
        let mut removed = 0;
        for identity in picked {
            removed += u64::from(self.contains(identity.group, identity.hash));
            self.set((identity.group, identity.hash), CopyState::Gone);
        }
        removed
    }

    /// What can land yet of an earlier registration of the same place, which is over; at the latest
    /// then.
    pub(super) fn inherit(&mut self, earlier: &Self, until: Instant) {
        self.writes.inherit(&earlier.writes, until);
    }

    /// Forgets what cannot land any more.
    pub(super) fn tidy_writes(&mut self, now: Instant) {
        self.writes.tidy(now);
    }

    /// Lets go of the least recently used blocks that nothing continues: what would be beyond the
    /// capacity with `more`.
    pub(crate) fn evict(&mut self, more: usize) -> Vec<BlockIdentity> {
        let wanted = (self.present + more).saturating_sub(self.capacity).min(self.present);
        self.let_go(wanted)
    }

    /// The store is full although this one is not: lets go of as many as it refused, and of a part
    /// of all so that this is not so at once again.
    pub(crate) fn yield_room(&mut self, refused: usize) -> Vec<BlockIdentity> {
        if refused == 0 { Vec::new() } else { self.let_go(refused + self.present / 16) }
    }

    fn let_go(&mut self, wanted: usize) -> Vec<BlockIdentity> {
        let mut evicted = Vec::new();
        while evicted.len() < wanted
            && let Some((_, &key)) = self.leaves.first_key_value()
        {
            evicted.extend(self.entries.get(&key).map(|entry| entry.identity));
            self.set(key, CopyState::Gone);
        }
        evicted
    }

    fn enter(&mut self, identity: &BlockIdentity, state: CopyState) {
        let (key, parent) = ((identity.group, identity.hash), identity.parent);
        let (mut root, mut counted) = (identity.hash, false);
        if !self.entries.contains_key(&key)
            && let Some(parent) = parent
        {
            root = parent;
            if let Some(before) = self.entries.get_mut(&(identity.group, parent)) {
                (root, counted) = (before.root, true);
                before.children += 1;
                if before.children == 1 && before.state.is_there() {
                    self.leaves.remove(&before.used);
                }
            }
        }
        self.clock += 1;
        let fresh = Entry {
            identity: *identity,
            root,
            state: CopyState::Gone,
            children: 0,
            counted,
            used: self.clock,
        };
        self.entries.entry(key).or_insert(fresh);
        self.set(key, state);
    }

    /// Every change of state, with what follows from it for the order, the count and whoever is
    /// published.
    fn set(&mut self, key: Key, state: CopyState) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let before = std::mem::replace(&mut entry.state, state);
        if entry.children == 0 {
            match (before.is_there(), state.is_there()) {
                (false, true) => drop(self.leaves.insert(entry.used, key)),
                (true, false) => drop(self.leaves.remove(&entry.used)),
                _ => {}
            }
        }
        self.present = self.present + usize::from(state.is_there()) - usize::from(before.is_there());
        let (stored, published) = (state == CopyState::Present, before == CopyState::Present);
        if stored != published {
            let change = Change { volume: self.volume, stored, identity: entry.identity, root: entry.root };
            self.log.lock().push(change);
        }
        self.forget_if_idle(key);
    }

    /// Entries that are gone and that nothing continues are not kept, nor is what was kept for
    /// their sake.
    fn forget_if_idle(&mut self, mut key: Key) {
        while self
            .entries
            .get(&key)
            .is_some_and(|entry| entry.state == CopyState::Gone && entry.children == 0)
        {
            let Some(entry) = self.entries.remove(&key) else { return };
            let Some(parent) = entry.identity.parent.filter(|_| entry.counted) else { return };
            key = (key.0, parent);
            let Some(before) = self.entries.get_mut(&key) else { return };
            before.children -= 1;
            if before.children == 0 && before.state.is_there() {
                self.leaves.insert(before.used, key);
            }
        }
    }

    /// The blocks whose events were published, parents first.
    pub(crate) fn published(&self) -> Vec<(BlockIdentity, SequenceHash)> {
        let published = self.entries.values().filter(|entry| entry.state == CopyState::Present);
        let mut held: Vec<_> = published.map(|entry| (entry.identity, entry.root)).collect();
        held.sort_unstable_by_key(|(identity, _)| identity.position);
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::time::Duration;

    const GROUP: GroupId = GroupId(0);

    /// Block `number` of a tree: its parent is half of it.
    fn block(number: u32) -> BlockIdentity {
        let hash = |number: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        };
        let position = number.ilog2();
        let parent = (position > 0).then(|| hash(number / 2));
        BlockIdentity {
            namespace: NamespaceId(number % 3),
            group: GROUP,
            hash: hash(number),
            parent,
            position,
        }
    }

    fn index(capacity: usize, most_changes: usize) -> (Index, Arc<Mutex<Log>>) {
        let log = Arc::new(Mutex::new(Log::new(most_changes)));
        (Index::new(VolumeId(4), capacity, Arc::clone(&log)), log)
    }

    #[test]
    fn a_chain_is_written_parents_first_and_evicted_children_first() {
        let (mut index, _) = index(2, 100);
        assert_eq!(index.begin(&block(2)), Admission::Orphan);
        for number in [1, 2, 4] {
            assert_eq!(index.begin(&block(number)), Admission::New);
            assert_eq!(index.begin(&block(number)), Admission::Known);
        }
        assert_eq!(index.prefix(GROUP, &[block(1).hash]), 0, "not there yet");
        for number in [1, 2, 4] {
            assert!(index.complete(&block(number)));
        }
        let chain = [1, 2, 4].map(|number| block(number).hash);
        assert_eq!(index.prefix(GROUP, &chain), 3);
        index.touch(GROUP, &chain);
        assert_eq!(index.evict(0), [block(4)], "one too many");
        assert_eq!(index.evict(1), [block(2)], "room for one");
        assert!(index.evict(1).is_empty() && index.yield_room(0).is_empty());
        assert_eq!(index.yield_room(3), [block(1)]);
        assert!(index.entries.is_empty() && index.leaves.is_empty());
    }

    #[test]
    fn what_was_removed_meanwhile_does_not_come_back() {
        let (mut index, _) = index(10, 100);
        let (now, number) = (Instant::now(), block(1).namespace);
        let later = now + Duration::from_secs(1);
        assert_eq!(index.begin(&block(1)), Admission::New);
        assert_eq!(index.purge(Some(number)), 0, "it was not there");
        assert_eq!(index.landing(Some(number), now), Landing::UnderWay, "its removal is not over");
        index.learn(&block(1), true, index.now());
        assert_eq!((index.len(), index.begin(&block(1))), (0, Admission::Leaving));
        assert!(!index.complete(&block(1)) && index.entries.is_empty());
        assert_eq!(index.landing(Some(number), now), Landing::Over);
        index.purged(Some(number));
        assert_eq!(index.begin(&block(1)), Admission::New);
        index.fail(&block(1), Some(later));
        assert_eq!((index.purge(None), index.landing(None, now)), (0, Landing::Doubtful));
        assert_eq!(index.landing(None, later), Landing::Over);
        assert!(index.entries.is_empty());
    }

    /// Mutations that make it fail: `learn`, `staying` or `remove` do not ask what happened since
    /// the look began.
    #[test]
    fn what_was_seen_before_it_came_or_went_counts_for_nothing() {
        let (mut index, _) = index(10, 100);
        let key = (GROUP, block(1).hash);
        let early = index.now();
        index.learn(&block(1), true, early);
        // Read, let go and removed, and only then is it reported that it was read.
        assert_eq!(index.yield_room(1), [block(1)]);
        index.leave(&[block(1)]);
        index.left(&[key]);
        index.learn(&block(1), true, early);
        assert_eq!((index.len(), index.staying(&[block(2), block(1)], early)), (0, 1));
        index.learn(&block(1), true, index.now());
        assert_eq!((index.len(), index.staying(&[block(2), block(1)], early)), (1, 2), "looked at again");
        // A whole namespace went.
        let early = index.now();
        assert_eq!(index.purge(None), 1);
        index.purged(None);
        index.learn(&block(1), true, early);
        assert_eq!((index.len(), index.staying(&[block(1)], early)), (0, 0));
        // Not found, written, and only then is it reported that it was not found.
        let early = index.now();
        index.begin(&block(1));
        assert!(index.complete(&block(1)) && !index.remove(GROUP, block(1).hash, early));
        assert!(index.contains(GROUP, block(1).hash) && index.remove(GROUP, block(1).hash, index.now()));
    }

    #[test]
    fn what_is_on_its_way_out_neither_comes_nor_is_learned_of() {
        let (mut index, _) = index(10, 100);
        let key = (GROUP, block(1).hash);
        let now = index.now();
        index.learn(&block(1), true, now);
        assert!(index.remove(GROUP, block(1).hash, now) && !index.remove(GROUP, block(1).hash, now), "once");
        index.leave(&[block(1)]);
        index.leave(&[block(1)]);
        index.left(&[key]);
        assert_eq!(index.begin(&block(1)), Admission::Leaving, "another order is under way");
        index.learn(&block(1), true, index.now());
        assert_eq!(index.len(), 0);
        index.left(&[key]);
        assert_eq!(index.begin(&block(1)), Admission::New);
        assert!(
            !index.remove(GROUP, block(1).hash, index.now()),
            "another object than the one that was read"
        );
        assert_eq!((index.purge(None), index.begin(&block(1))), (0, Admission::Leaving));
        assert_eq!(index.purge(Some(block(2).namespace)), 0);
        index.purged(None);
        assert_eq!(index.begin(&block(2)), Admission::Leaving);
        assert_eq!(index.staying(&[block(3), block(2)], index.now()), 1);
        assert_eq!(index.begin(&block(1)), Admission::New);
    }

    #[test]
    fn nothing_comes_to_a_volume_that_was_unregistered() {
        let (mut index, log) = index(10, 100);
        for number in [1, 2] {
            index.begin(&block(number));
        }
        assert!(index.complete(&block(1)));
        assert_eq!(index.retire(), 1);
        assert!(!index.complete(&block(2)), "it arrived too late");
        index.learn(&block(1), true, index.now());
        assert_eq!(index.begin(&block(1)), Admission::Orphan);
        let mut published = Vec::new();
        log.lock().drain(9, |_, change| published.push((change.volume, change.stored, change.identity)));
        assert_eq!(published, [(VolumeId(4), true, block(1)), (VolumeId(4), false, block(1))]);
        assert!(index.entries.is_empty());
    }

    #[test]
    fn assumptions_are_told_when_they_proved_true() {
        let (mut index, log) = index(10, 2);
        let published = || {
            let mut published = Vec::new();
            let mut log = log.lock();
            let next =
                log.drain(9, |number, change| published.push((number, change.stored, change.identity)));
            (published, next)
        };
        let now = index.now();
        index.learn(&block(1), false, now);
        assert!(index.contains(GROUP, block(1).hash));
        assert_eq!(published(), (Vec::new(), 0));
        index.learn(&block(1), true, now);
        index.learn(&block(1), true, now);
        assert_eq!(published(), (vec![(0, true, block(1))], 1));
        index.learn(&block(2), false, now);
        assert!(index.remove(GROUP, block(2).hash, now), "an assumption that proved false");
        assert_eq!(published(), (Vec::new(), 1));
        for number in [3, 6, 7] {
            index.learn(&block(number), true, now);
        }
        assert_eq!(published(), (vec![(2, true, block(6)), (3, true, block(7))], 4), "a gap of one");
    }

    proptest! {
        /// Whatever happens: the count is right, leaves are what nothing continues, and the changes
        /// published lead to what is there.
        #[test]
        fn the_books_are_right(steps in prop::collection::vec((0..6_u8, 1..16_u32), 0..200)) {
            let (mut index, log) = index(8, 10_000);
            for (step, number) in steps {
                let identity = block(number);
                match step {
                    0 => drop(index.begin(&identity)),
                    1 => drop(index.complete(&identity)),
                    2 => index.fail(&identity, Some(Instant::now())),
                    3 => index.learn(&identity, number.is_multiple_of(2), index.now()),
                    4 => drop(index.remove(GROUP, identity.hash, index.now())),
                    _ => drop(index.evict(0)),
                }
                let there = index.entries.values().filter(|entry| entry.state.is_there());
                prop_assert_eq!(there.clone().count(), index.len());
                let leaves: HashSet<Key> =
                    there.filter(|entry| entry.children == 0).map(|entry| (GROUP, entry.identity.hash)).collect();
                prop_assert_eq!(&leaves, &index.leaves.values().copied().collect());
                for entry in index.entries.values() {
                    let of = |other: &&Entry| other.identity.parent == Some(entry.identity.hash);
                    prop_assert!(entry.children as usize <= index.entries.values().filter(of).count());
                    prop_assert!(entry.children > 0 || entry.state != CopyState::Gone);
                }
            }
            let present: HashSet<SequenceHash> = index
                .entries
                .values()
                .filter(|entry| entry.state == CopyState::Present)
                .map(|entry| entry.identity.hash)
                .collect();
            let mut published = HashSet::new();
            log.lock().drain(usize::MAX, |_, change| {
                if change.stored { published.insert(change.identity.hash) } else { published.remove(&change.identity.hash) };
            });
            prop_assert_eq!(published, present);
        }
    }
}
