//! Events: what became visible, what is gone. Fixed-size records in a bounded ring.

use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventRecordKind {
    /// The block is on the tier.
    Store,
    /// The block is not on the tier any more, in no copy.
    Remove,
}

/// One event. Within a registry's life (its epoch) `seq` counts 0, 1, 2 ... without a gap; a
/// receiver that misses a number has lost an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// Number of the event.
    pub seq: u64,
    /// What happened.
    pub kind: EventRecordKind,
    /// On which tier.
    pub tier: Tier,
    /// Slot at that time. A duplicate may take over later without an event: the block stays on the
    /// tier.
    pub block: BlockId,
    /// To which block.
    pub identity: BlockIdentity,
}

const _: () = assert!(size_of::<EventRecord>() <= 64);

/// What [`Registry::drain_events`](crate::Registry::drain_events) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Records given.
    pub records: usize,
    /// Records that were overwritten since the last call, before the first one given: the receiver
    /// must resync from a [`snapshot`](crate::Registry::snapshot).
    pub lost: u64,
    /// `seq` of the next record that will be given.
    pub next_seq: u64,
    /// Records that still wait.
    pub waiting: usize,
}

/// How full the ring of events is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventBacklog {
    /// `seq` of the next event that happens.
    pub next_seq: u64,
    /// Events that wait to be drained.
    pub waiting: usize,
    /// Events that the ring holds; 0 where none are recorded.
    pub capacity: usize,
    /// Events that were overwritten before they were drained, in all.
    pub lost: u64,
}

/// A record as the ring keeps it: without its number, which its position tells.
#[derive(Clone, Copy)]
pub(crate) struct PackedRecord {
    hash: SequenceHash,
    parent: SequenceHash,
    namespace: NamespaceId,
    position: u32,
    block: BlockId,
    group: GroupId,
    kind: EventRecordKind,
    tier: u8,
}

/// In `PackedRecord::tier`: the block has a parent.
const HAS_PARENT: u8 = 0x80;

const _: () = assert!(size_of::<PackedRecord>() == 48);

impl PackedRecord {
    const UNWRITTEN: Self = Self {
        hash: SequenceHash::from_bytes([0; 16]),
        parent: SequenceHash::from_bytes([0; 16]),
        namespace: NamespaceId(0),
        position: 0,
        block: BlockId(0),
        group: GroupId(0),
        kind: EventRecordKind::Remove,
        tier: 0,
    };

    pub(crate) fn new(kind: EventRecordKind, tier: Tier, block: BlockId, identity: BlockIdentity) -> Self {
        let BlockIdentity { namespace, group, hash, parent, position } = identity;
        let has_parent = if parent.is_some() { HAS_PARENT } else { 0 };
        let parent = parent.unwrap_or(Self::UNWRITTEN.parent);
        Self { hash, parent, namespace, position, block, group, kind, tier: tier.index() as u8 | has_parent }
    }

    fn record(&self, seq: u64) -> EventRecord {
        let Self { hash, parent, namespace, position, block, group, kind, tier } = *self;
        let parent = (tier & HAS_PARENT != 0).then_some(parent);
        let identity = BlockIdentity { namespace, group, hash, parent, position };
        EventRecord { seq, kind, tier: Tier::SLOTTED[usize::from(tier & !HAS_PARENT)], block, identity }
    }
}

/// The ring. When it is full the oldest record is given up and counted: what remains always ends
/// with the truth. It is made of parts: some are there from the start, and there are more when more
/// records wait than ever before. They stay, so a ring asks for memory no more than once for each
/// part that its capacity has, and not at all while it is drained in time. What was emptied last is
/// filled next, while it is near.
pub(crate) struct EventRing {
    parts: VecDeque<Box<[PackedRecord]>>,
    /// Parts that are not in use.
    spare: Vec<Box<[PackedRecord]>>,
    /// `seq` of the first record of the first part, over the length of a part.
    base: u64,
    /// Records of a part, a power of two.
    part: u64,
    capacity: u64,
    /// `seq` of the next record to write.
    next: u64,
    /// `seq` of the oldest record kept.
    first: u64,
    /// Given up since the last drain.
    lost: u64,
    lost_total: u64,
    /// The record before this number says that a drain is due; 0 where none does.
    wake_at: u64,
    due: Arc<AtomicBool>,
}

/// Records of a part, at most.
const PART: u64 = 1024;

/// Parts from the start, at most: so many records (200 KB) wait where they are drained in time.
const FIRST_PARTS: u64 = 4;

fn unwritten(records: u64) -> Box<[PackedRecord]> {
    vec![PackedRecord::UNWRITTEN; records as usize].into_boxed_slice()
}

impl EventRing {
    /// `due` becomes true when so many records wait as [`wake_when`](Self::wake_when) asked for.
    pub(crate) fn new(capacity: u32, due: Arc<AtomicBool>) -> Self {
        // A power of two, so that a mask gives a record's position.
        let capacity = if capacity == 0 { 0 } else { u64::from(capacity).next_power_of_two() };
        let part = capacity.clamp(1, PART);
        // The first and the last part in use are not full.
        let most = if capacity == 0 { 0 } else { capacity / part + 1 };
        let mut spare = Vec::with_capacity(most as usize);
        spare.extend((0..most.min(FIRST_PARTS)).map(|_| unwritten(part)));
        let parts = VecDeque::with_capacity(most as usize);
        let (base, next, first, lost, lost_total, wake_at) = (0, 0, 0, 0, 0, 0);
        Self { parts, spare, base, part, capacity, next, first, lost, lost_total, wake_at, due }
    }

    /// Whether events are recorded.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Writes a record, which gets the next number.
    #[inline]
    pub(crate) fn push(&mut self, record: PackedRecord) {
        let is_full = self.next - self.first == self.capacity;
        if !self.is_on() || is_full && planted(Planted::HideGap) {
            return;
        }
        if self.next & (self.part - 1) == 0 {
            self.add_part();
        }
        let (part, at) = self.place(self.next);
        self.parts[part][at] = record;
        self.next += 1;
        if self.next == self.wake_at {
            self.is_due();
        }
        if self.next - self.first > self.capacity {
            self.lost += 1;
            self.lost_total += 1;
            self.let_go(1);
        }
    }

    /// Says once that a drain is due, when `waiting` records wait or the ring is half full: now or
    /// later.
    pub(crate) fn wake_when(&mut self, waiting: usize) {
        let most = (self.capacity / 2).max(1);
        self.wake_at = self.first + u64::try_from(waiting).unwrap_or(u64::MAX).clamp(1, most);
        if self.next >= self.wake_at {
            self.is_due();
        }
    }

    #[cold]
    fn is_due(&mut self) {
        self.wake_at = 0;
        self.due.store(true, Ordering::Relaxed);
    }

    #[cold]
    fn add_part(&mut self) {
        let part = self.spare.pop().unwrap_or_else(|| unwritten(self.part));
        self.parts.push_back(part);
    }

    /// Part and index there of a record.
    #[inline]
    fn place(&self, seq: u64) -> (usize, usize) {
        ((seq / self.part - self.base) as usize, (seq & (self.part - 1)) as usize)
    }

    /// The oldest records are not needed any more.
    fn let_go(&mut self, records: u64) {
        self.first += records;
        while self.base < self.first / self.part {
            self.base += 1;
            self.spare.extend(self.parts.pop_front());
        }
    }

    /// Moves up to `max` records, but no more than `out` has room for without allocating.
    pub(crate) fn drain(&mut self, out: &mut Vec<EventRecord>, max: usize) -> Drained {
        let room = out.capacity() - out.len();
        let take = max.min(room).min((self.next - self.first) as usize);
        let lost = std::mem::take(&mut self.lost);
        let (end, mut seq) = (self.first + take as u64, self.first);
        while seq < end {
            let (part, at) = self.place(seq);
            let records = &self.parts[part][at..];
            let count = (records.len() as u64).min(end - seq);
            out.extend(records.iter().zip(seq..seq + count).map(|(record, seq)| record.record(seq)));
            seq += count;
        }
        self.let_go(take as u64);
        Drained { records: take, lost, next_seq: self.first, waiting: (self.next - self.first) as usize }
    }

    pub(crate) fn waiting(&self) -> usize {
        (self.next - self.first) as usize
    }

    pub(crate) fn next_seq(&self) -> u64 {
        self.next
    }

    /// Given up since the last drain.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    pub(crate) fn lost_total(&self) -> u64 {
        self.lost_total
    }

    pub(crate) fn backlog(&self) -> EventBacklog {
        let (waiting, capacity) = (self.waiting(), self.capacity as usize);
        EventBacklog { next_seq: self.next, waiting, capacity, lost: self.lost_total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring_of(capacity: u32) -> EventRing {
        EventRing::new(capacity, Arc::default())
    }

    fn store(
        ring: &mut EventRing,
        kind: EventRecordKind,
        tier: Tier,
        block: BlockId,
        identity: BlockIdentity,
    ) {
        ring.push(PackedRecord::new(kind, tier, block, identity));
    }

    fn push(ring: &mut EventRing, block: u32) {
        store(ring, EventRecordKind::Store, Tier::G1, BlockId(block), identity(None));
    }

    fn identity(parent: Option<u8>) -> BlockIdentity {
        let hash = |byte| SequenceHash::from_bytes([byte; 16]);
        BlockIdentity {
            namespace: NamespaceId(3),
            group: GroupId(200),
            hash: hash(7),
            parent: parent.map(hash),
            position: 1 << 30,
        }
    }

    #[test]
    fn a_drain_is_due_once_and_when_it_was_asked_for() {
        let due = Arc::<AtomicBool>::default();
        let mut ring = EventRing::new(8, Arc::clone(&due));
        let was_due = || due.swap(false, Ordering::Relaxed);
        push(&mut ring, 0);
        assert!(!was_due(), "nobody asked");
        ring.wake_when(1);
        assert!(was_due(), "one waits already");
        push(&mut ring, 1);
        assert!(!was_due(), "said once");
        ring.wake_when(3);
        assert!(!was_due());
        push(&mut ring, 2);
        assert!(was_due());
        ring.drain(&mut Vec::with_capacity(8), 8);
        // Half full at the latest.
        ring.wake_when(usize::MAX);
        (3..6).for_each(|block| push(&mut ring, block));
        assert!(!was_due());
        push(&mut ring, 6);
        assert!(was_due());
    }

    #[test]
    fn a_record_comes_out_as_it_went_in() {
        let mut ring = ring_of(8);
        let (block, mut out) = (BlockId(9), Vec::with_capacity(8));
        for tier in Tier::SLOTTED {
            store(&mut ring, EventRecordKind::Store, tier, block, identity(Some(0)));
            store(&mut ring, EventRecordKind::Remove, tier, block, identity(None));
            out.clear();
            ring.drain(&mut out, 8);
            let seq = 2 * tier.index() as u64;
            let store =
                EventRecord { seq, kind: EventRecordKind::Store, tier, block, identity: identity(Some(0)) };
            let remove = EventRecord {
                seq: seq + 1,
                kind: EventRecordKind::Remove,
                tier,
                block,
                identity: identity(None),
            };
            assert_eq!(out, [store, remove]);
        }
    }

    #[test]
    fn a_full_ring_keeps_the_newest_and_counts_the_rest() {
        let mut ring = ring_of(4);
        for block in 0..10 {
            push(&mut ring, block);
        }
        let mut out = Vec::with_capacity(16);
        let drained = ring.drain(&mut out, 3);
        assert_eq!(drained, Drained { records: 3, lost: 6, next_seq: 9, waiting: 1 });
        assert_eq!(out.iter().map(|record| record.seq).collect::<Vec<_>>(), [6, 7, 8]);
        assert!(out.iter().all(|record| u64::from(record.block.0) == record.seq));
        push(&mut ring, 10);
        let drained = ring.drain(&mut out, 100);
        assert_eq!(drained, Drained { records: 2, lost: 0, next_seq: 11, waiting: 0 });
        assert_eq!(ring.backlog(), EventBacklog { next_seq: 11, waiting: 0, capacity: 4, lost: 6 });
    }

    #[test]
    fn records_of_many_parts_keep_their_order() {
        let mut ring = ring_of(4 * PART as u32);
        let (mut out, mut pushed, mut seen, mut lost) = (Vec::with_capacity(3000), 0, 0, 0);
        for round in 0..200_u32 {
            for _ in 0..round * 37 % 2500 {
                push(&mut ring, pushed);
                pushed += 1;
            }
            out.clear();
            let drained = ring.drain(&mut out, (round * 91 % 2900) as usize);
            lost += drained.lost;
            for record in &out {
                assert!(record.seq >= seen && u64::from(record.block.0) == record.seq, "{record:?}");
                seen = record.seq + 1;
            }
            assert_eq!(drained.next_seq + drained.waiting as u64, u64::from(pushed));
            assert!(ring.parts.len() <= 5);
        }
        assert!(lost > 0 && ring.lost_total() == lost);
    }

    /// Parts stay, those from the start and those that a backlog needed; never more than the
    /// capacity has.
    #[test]
    fn the_ring_grows_only_where_more_waits_than_ever_before() {
        let mut ring = ring_of(16 * PART as u32);
        let mut out = Vec::with_capacity(20 * PART as usize);
        let mut wait = |ring: &mut EventRing, records: u64| {
            (0..records).for_each(|_| push(ring, 0));
            out.clear();
            ring.drain(&mut out, usize::MAX);
            (ring.parts.len() + ring.spare.len()) as u64
        };
        for records in [1, 700, (FIRST_PARTS - 1) * PART, 90, 3 * PART, 5] {
            assert_eq!(wait(&mut ring, records), FIRST_PARTS, "{records} fit into what was there");
        }
        let grown = wait(&mut ring, 8 * PART);
        assert!((8..=9).contains(&grown), "{grown}");
        for records in [8 * PART - 1, 17, 7 * PART] {
            assert_eq!(wait(&mut ring, records), grown);
        }
        assert_eq!(wait(&mut ring, 100 * PART), 17);
        assert!(ring.lost_total() > 0 && ring.spare.capacity() == 17);
        assert_eq!([0, 4].map(|capacity| ring_of(capacity).spare.len()), [0, 2]);
    }

    #[test]
    fn events_that_are_off_take_no_numbers() {
        let mut ring = ring_of(0);
        push(&mut ring, 0);
        assert_eq!(ring.drain(&mut Vec::with_capacity(4), 4), Drained::default());
    }
}
