//! The eviction order of a tier: a queue of slot ids, the old end in front.
//!
//! A use appends the slot again and stores the new position in the slot. A position that its slot
//! does not point to is stale, and the queue skips it. So a use costs one sequential write, and no
//! use unlinks a position from the middle.
//!
//! The queue consists of segments. When stale positions have made it too long, each use cleans a
//! few positions, from the old end on: valid positions move from a segment to the one before it.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `tenant_scan` | how far the order was searched for each tenant | |

mod tenant_scan;

use crate::entry::NONE;
use crate::prefetch::prefetch;
use crate::slot::Slot;
use std::collections::VecDeque;
use std::ops::Range;
use tenant_scan::TenantScan;

/// Most positions of a segment; a position is the number of its segment, then its index there.
const LEN: usize = 1 << LEN_BITS;
const LEN_BITS: u32 = 10;
/// Heap of the queue for each slot of the tier, while cleaning keeps up; without stale positions it
/// is two thirds of that.
pub(crate) const BYTES_PER_SLOT: usize = size_of::<u32>() * 3 / 2;

/// Positions cleaned for each use while that is under way.
const CLEANED_PER_USE: usize = 4;

/// A position that is cleaned asks for the slot of the position that is so much later.
const CLEANED_AHEAD: usize = 16;

struct Segment {
    positions: Box<[u32]>,
    /// Number of the first position, counted over the life of the queue: a cursor survives pops.
    /// Numbers rise along the queue, with gaps where it was cleaned.
    start: u64,
    head: usize,
    tail: usize,
}

impl Segment {
    fn first(&self) -> u64 {
        self.start + self.head as u64
    }

    fn end(&self) -> u64 {
        self.start + self.tail as u64
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.tail == self.positions.len()
    }
}

/// Segments in use at which cleaning begins.
fn long(population: usize) -> usize {
    (population + population / 2).div_ceil(LEN) + 2
}

/// The eviction order of a tier.
pub(crate) struct EvictionOrder {
    segments: Vec<Segment>,
    /// Segments in use, oldest first, and those that are not in use.
    queue: VecDeque<u32>,
    unused: Vec<u32>,
    /// The segment at the young end; none where that has no room.
    young: u32,
    /// Index in the queue of the segment that valid positions move to; those of the next segment
    /// follow.
    cleaning: Option<usize>,
    /// Slots of the tier: cleaning begins when the queue is half again as long.
    population: usize,
    /// The search for blocks to offload has looked at the positions before this number.
    watched: u64,
    /// Prefetching for eviction has looked at the positions before this number.
    prefetched: u64,
    /// For each tenant that had to give blocks: the positions that hold none of its blocks.
    scans: Vec<TenantScan>,
}

/// Number of the first position: there is room before it.
const MIDDLE: u64 = 1 << 62;

impl EvictionOrder {
    /// For a tier of `capacity` slots: at most that many positions are valid.
    pub(crate) fn new(capacity: usize) -> Self {
        let most = long(capacity) + long(capacity) / 4;
        Self {
            segments: Vec::with_capacity(most),
            queue: VecDeque::with_capacity(most),
            unused: Vec::with_capacity(most),
            young: NONE,
            cleaning: None,
            population: capacity,
            watched: 0,
            prefetched: 0,
            scans: Vec::new(),
        }
    }

    /// A segment that is not in use, empty.
    fn take_segment(&mut self, start: u64, at: usize) -> u32 {
        let id = self.unused.pop().unwrap_or_else(|| {
            let positions = vec![NONE; LEN].into_boxed_slice();
            self.segments.push(Segment { positions, start, head: 0, tail: 0 });
            self.segments.len() as u32 - 1
        });
        let segment = &mut self.segments[id as usize];
        (segment.start, segment.head, segment.tail) = (start, at, at);
        id
    }

    /// Makes `slot` the youngest.
    #[inline]
    pub(crate) fn push_young(&mut self, slot: u32, slots: &[Slot]) {
        if self.segments.get(self.young as usize).is_none_or(Segment::is_full) {
            self.append();
        }
        self.put(self.young, slot, slots);
        if self.cleaning.is_some() {
            self.clean(CLEANED_PER_USE, slots);
        }
    }

    /// Writes `slot` at the end of a segment that has room.
    #[inline]
    fn put(&mut self, id: u32, slot: u32, slots: &[Slot]) {
        let segment = &mut self.segments[id as usize];
        segment.positions[segment.tail] = slot;
        slots[slot as usize].order_position.set(id << LEN_BITS | segment.tail as u32);
        segment.tail += 1;
    }

    /// A new segment at the young end.
    #[cold]
    fn append(&mut self) {
        let back = self.queue.back().map(|&id| self.segments[id as usize].start + LEN as u64);
        let start = back.unwrap_or_else(|| self.begin());
        let id = self.take_segment(start, 0);
        self.queue.push_back(id);
        self.young = id;
        if self.cleaning.is_none() && self.queue.len() > long(self.population) {
            let start = self.segments[self.queue[0] as usize].start;
            let first = self.take_segment(start, 0);
            self.queue.push_front(first);
            self.cleaning = Some(0);
        }
    }

    /// Number of the first position of a queue that is empty: behind all that was looked at.
    fn begin(&self) -> u64 {
        MIDDLE.max(self.watched).max(self.prefetched)
    }

    /// Makes `slot` the oldest.
    pub(crate) fn push_old(&mut self, slot: u32, slots: &[Slot]) {
        let room = self.queue.front().copied().filter(|&id| self.segments[id as usize].head > 0);
        let first = room.unwrap_or_else(|| {
            let front = self.queue.front().map(|&id| &self.segments[id as usize]);
            let start = front.map_or_else(|| self.begin(), |segment| segment.start - LEN as u64);
            let id = self.take_segment(start, LEN);
            self.queue.push_front(id);
            self.cleaning = self.cleaning.map(|at| at + 1);
            id
        });
        let segment = &mut self.segments[first as usize];
        segment.head -= 1;
        segment.positions[segment.head] = slot;
        slots[slot as usize].order_position.set(first << LEN_BITS | segment.head as u32);
        let number = segment.first();
        self.scans.iter_mut().for_each(|scan| scan.pushed_old(number));
    }

    /// Takes the oldest slot out; `None` when none is left. `budget` counts down for every position
    /// looked at, and 0 ends the search.
    #[inline]
    pub(crate) fn pop_old(&mut self, slots: &[Slot], budget: &mut usize) -> Option<u32> {
        while *budget > 0
            && let Some(&id) = self.queue.front()
        {
            let segment = &mut self.segments[id as usize];
            if segment.head == segment.tail {
                self.remove(0);
                continue;
            }
            *budget -= 1;
            let slot = segment.positions[segment.head];
            let position = id << LEN_BITS | segment.head as u32;
            segment.head += 1;
            if slots[slot as usize].order_position.get() == position {
                slots[slot as usize].order_position.set(NONE);
                return Some(slot);
            }
        }
        None
    }

    /// Takes a segment without positions out of the queue.
    fn remove(&mut self, at: usize) {
        if let Some(id) = self.queue.remove(at) {
            self.unused.push(id);
            if id == self.young {
                self.young = self.queue.back().copied().unwrap_or(NONE);
            }
        }
        self.cleaning = match self.cleaning {
            // What valid positions move to is gone: the rest is cleaned when the queue is long
            // again.
            Some(to) if at == to => None,
            Some(to) if at < to => Some(to - 1),
            other => other,
        };
    }

    /// Moves the valid ones of the next `positions` towards the old end.
    fn clean(&mut self, positions: usize, slots: &[Slot]) {
        for _ in 0..positions {
            let Some(to) = self.cleaning else { return };
            // The youngest segment is still written.
            if to + 2 >= self.queue.len() {
                self.cleaning = None;
                return;
            }
            let from = self.queue[to + 1];
            let segment = &mut self.segments[from as usize];
            if segment.head == segment.tail {
                self.remove(to + 1);
                continue;
            }
            let number = segment.first();
            let position = from << LEN_BITS | segment.head as u32;
            let slot = segment.positions[segment.head];
            let soon = segment.positions.get(segment.head + CLEANED_AHEAD);
            if let Some(soon) = soon.and_then(|&soon| slots.get(soon as usize)) {
                prefetch(soon);
            }
            segment.head += 1;
            if slots[slot as usize].order_position.get() == position {
                self.move_to(to, number, slot, slots);
            }
        }
    }

    /// Moves the position with `number` to the segment at index `to` of the queue.
    fn move_to(&mut self, mut to: usize, number: u64, slot: u32, slots: &[Slot]) {
        if self.segments[self.queue[to] as usize].is_full() {
            let start = self.segments[self.queue[to + 1] as usize].start;
            let id = self.take_segment(start, 0);
            to += 1;
            self.queue.insert(to, id);
            self.cleaning = Some(to);
        }
        let id = self.queue[to];
        let moved = self.segments[id as usize].end();
        if number >= self.watched && moved < self.watched {
            self.watched = moved;
        }
        if number >= self.prefetched && moved < self.prefetched {
            self.prefetched = moved;
        }
        self.scans.iter_mut().for_each(|scan| scan.moved(number, moved));
        self.put(id, slot, slots);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.iter().all(|&id| {
            let segment = &self.segments[id as usize];
            segment.head == segment.tail
        })
    }

    /// Number of the oldest position.
    pub(crate) fn first(&self) -> u64 {
        self.queue.front().map_or(MIDDLE, |&id| self.segments[id as usize].first())
    }

    /// Number after the youngest position.
    pub(crate) fn end(&self) -> u64 {
        self.queue.back().map_or(MIDDLE, |&id| self.segments[id as usize].end())
    }

    /// Calls `next` with the slots of the oldest `count` positions (fewer before a gap in their
    /// numbers), as far as they were not looked at so before.
    #[inline]
    pub(crate) fn prefetch_next(&mut self, count: usize, slots: &[Slot], mut next: impl FnMut(u32)) {
        let first = self.first();
        let from = first.max(self.prefetched);
        let end = first + count as u64;
        let mut prefetched = from;
        self.positions(from..end, slots).for_each(|(number, slot)| {
            prefetched = number + 1;
            slot.into_iter().for_each(&mut next);
        });
        self.prefetched = prefetched;
    }

    /// Positions before this number were looked at.
    pub(crate) fn watched(&self) -> u64 {
        self.watched
    }

    /// Positions before `number` have been looked at.
    pub(crate) fn watch(&mut self, number: u64) {
        self.watched = number;
    }

    /// Positions with numbers of a range, oldest first: number, and slot unless the position is
    /// stale.
    pub(crate) fn positions(
        &self,
        numbers: Range<u64>,
        slots: &[Slot],
    ) -> impl Iterator<Item = (u64, Option<u32>)> {
        let Range { start, end } = numbers;
        let first = self.queue.partition_point(|&id| self.segments[id as usize].end() <= start);
        let is_among = move |id: &&u32| self.segments[**id as usize].first() < end;
        let from_segment = move |&id: &u32| {
            let segment = &self.segments[id as usize];
            let [from, to] =
                [start, end].map(|number| number.clamp(segment.first(), segment.end()) - segment.start);
            (from as usize..to as usize).map(move |index| {
                let slot = segment.positions[index];
                let valid = slots[slot as usize].order_position.get() == id << LEN_BITS | index as u32;
                (segment.start + index as u64, valid.then_some(slot))
            })
        };
        self.queue.range(first..).take_while(is_among).flat_map(from_segment)
    }
}

impl EvictionOrder {
    /// Blocks changed hands: what was looked at says nothing any more.
    pub(crate) fn look_again(&mut self) {
        self.scans.clear();
    }

    /// Takes the oldest slot of a tenant's out; `None` when none is left. What was put at the old
    /// end since the last look comes first. `is_theirs` is asked of the entry of a slot; `budget`
    /// counts down for every position looked at, and 0 ends the search.
    pub(crate) fn pop_old_of(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let (slot, after) = self.find(tenant, slots, budget, is_theirs)?;
        self.scans[tenant] = after;
        slots[slot as usize].order_position.set(NONE);
        Some(slot)
    }

    /// The same, but leaves it where it is.
    pub(crate) fn look_for(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        self.find(tenant, slots, budget, is_theirs).map(|(slot, _)| slot)
    }

    /// The oldest slot of a tenant's, and what was seen when that has been looked at.
    fn find(
        &mut self,
        tenant: usize,
        slots: &[Slot],
        budget: &mut usize,
        is_theirs: impl Fn(u32) -> bool,
    ) -> Option<(u32, TenantScan)> {
        let first = self.first();
        if self.scans.len() <= tenant {
            self.scans.resize(tenant + 1, TenantScan { from: first, to: first });
        }
        while *budget > 0 {
            let TenantScan { from, to } = self.scans[tenant];
            let (after, (id, index)) = if let Some((number, at)) = self.last_before(from) {
                (TenantScan { from: number, to }, at)
            } else {
                let (number, at) = self.next_from(to)?;
                (TenantScan { from, to: number + 1 }, at)
            };
            *budget -= 1;
            let slot = self.segments[id as usize].positions[index];
            let state = &slots[slot as usize];
            let position = id << LEN_BITS | index as u32;
            if state.order_position.get() == position && is_theirs(state.entry.get()) {
                return Some((slot, after));
            }
            self.scans[tenant] = after;
        }
        None
    }

    /// Positions with numbers of a range that were not looked at for a tenant, whosever they are:
    /// number, and slot unless the position is stale.
    pub(crate) fn unseen(
        &self,
        tenant: usize,
        Range { start, end }: Range<u64>,
        slots: &[Slot],
    ) -> impl Iterator<Item = (u64, Option<u32>)> {
        let first = self.first();
        let TenantScan { from, to } =
            self.scans.get(tenant).copied().unwrap_or(TenantScan { from: first, to: first });
        let old = (start < from).then(|| self.positions(start..from.min(end), slots)).into_iter().flatten();
        let positions = old.chain(self.positions(start.max(to)..end, slots));
        positions.inspect(|_| {
            #[cfg(test)]
            crate::probe::position_is_counted();
        })
    }

    /// The youngest position before `number`: its number, segment and index there.
    fn last_before(&self, number: u64) -> Option<(u64, (u32, usize))> {
        let end = self.queue.partition_point(|&id| self.segments[id as usize].first() < number);
        let within = self.queue.range(..end).rev().find_map(|&id| {
            let segment = &self.segments[id as usize];
            let below = (number - segment.start).min(segment.tail as u64) as usize;
            (below > segment.head).then(|| (segment, id, below - 1))
        });
        within.map(|(segment, id, index)| (segment.start + index as u64, (id, index)))
    }

    /// The oldest position from `number` on.
    fn next_from(&self, number: u64) -> Option<(u64, (u32, usize))> {
        let first = self.queue.partition_point(|&id| self.segments[id as usize].end() <= number);
        let within = self.queue.range(first..).find_map(|&id| {
            let segment = &self.segments[id as usize];
            let from = number.max(segment.first()) - segment.start;
            ((from as usize) < segment.tail).then_some((segment, id, from as usize))
        });
        within.map(|(segment, id, index)| (segment.start + index as u64, (id, index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(capacity: usize) -> EvictionOrder {
        EvictionOrder::new(capacity)
    }

    fn valid(order: &EvictionOrder, slots: &[Slot]) -> Vec<u32> {
        order.positions(0..u64::MAX, slots).filter_map(|(_, slot)| slot).collect()
    }

    fn agrees_with_a_list(count: u32, steps: usize, pop_one_in: u64) -> usize {
        let slots = Slot::many(count as usize);
        let mut order = order_of(slots.len());
        let mut oracle: VecDeque<u32> = VecDeque::new();
        let mut random = 99_u64;
        let mut longest = 0;
        for step in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (random >> 33) as u32 % count;
            let choice = random >> 48;
            if choice.is_multiple_of(pop_one_in) {
                let expected = oracle.pop_front();
                assert_eq!(order.pop_old(&slots, &mut 100_000), expected);
            } else if choice % 16 == 1 {
                oracle.retain(|&other| other != slot);
                oracle.push_front(slot);
                order.push_old(slot, &slots);
            } else if choice % 16 == 2 {
                // A slot that leaves for another reason only forgets its position.
                oracle.retain(|&other| other != slot);
                slots[slot as usize].order_position.set(NONE);
            } else {
                oracle.retain(|&other| other != slot);
                oracle.push_back(slot);
                order.push_young(slot, &slots);
            }
            if step % 97 == 0 {
                assert_eq!(valid(&order, &slots), oracle.iter().copied().collect::<Vec<_>>(), "step {step}");
                let numbers: Vec<u64> =
                    order.positions(0..u64::MAX, &slots).map(|(number, _)| number).collect();
                assert!(numbers.is_sorted_by(|a, b| a < b), "numbers rise along the queue");
            }
            longest = longest.max(order.queue.len());
        }
        longest
    }

    #[test]
    fn agrees_with_a_list_over_random_uses() {
        agrees_with_a_list(9, 40_000, 7);
    }

    /// More uses than evictions, so that stale positions have to be cleaned out again and again.
    #[test]
    fn stale_places_are_cleaned_out_on_the_way() {
        let longest = agrees_with_a_list(3000, 120_000, 1009);
        // A queue of one and a half times the slots, what comes while it is cleaned, and the ends.
        assert!(longest <= 3000 * 2 / LEN + 6, "{longest} segments");
    }

    #[test]
    fn a_mark_that_cleaning_passes_misses_nothing() {
        let slots = Slot::many(2048);
        let mut order = order_of(slots.len());
        let push = |order: &mut EvictionOrder, slots: &[Slot], slot: u32| order.push_young(slot, slots);
        for slot in 0..2048 {
            push(&mut order, &slots, slot);
        }
        order.watch(order.end());
        // Slots below 1000 are used over and over; those from 1500 on once more, behind the mark.
        for round in 0..8 {
            for slot in 0..1000 {
                push(&mut order, &slots, slot);
            }
            if round == 0 {
                (1500..2048).for_each(|slot| push(&mut order, &slots, slot));
            }
        }
        let numbers = order.watched()..u64::MAX;
        let after: Vec<u32> = order.positions(numbers, &slots).filter_map(|(_, slot)| slot).collect();
        for slot in (0..1000).chain(1500..2048) {
            assert!(after.contains(&slot), "{slot} was used after the mark");
        }
    }

    #[test]
    fn what_comes_after_the_queue_was_empty_was_not_looked_at() {
        let slots = Slot::many(3000);
        let mut order = order_of(3000);
        (0..3000).for_each(|slot| order.push_young(slot, &slots));
        order.watch(order.end());
        while order.pop_old(&slots, &mut 1000).is_some() {}
        order.push_young(7, &slots);
        let unseen: Vec<u64> = order.positions(order.watched()..u64::MAX, &slots).map(|(at, _)| at).collect();
        assert_eq!(unseen.len(), 1);
    }

    /// Also where something that was passed over comes back first.
    #[test]
    fn what_comes_back_after_the_queue_was_empty_and_what_comes_then_was_not_looked_at() {
        let slots = Slot::many(3000);
        let (mut order, mut seen) = (order_of(3000), vec![false; 3000]);
        (0..3000).for_each(|slot| order.push_young(slot, &slots));
        order.watch(order.end());
        assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 4000), []);
        order.push_old(7, &slots);
        order.push_young(8, &slots);
        order.push_old(6, &slots);
        let unseen = order.positions(order.watched()..u64::MAX, &slots).filter_map(|(_, slot)| slot);
        assert_eq!(unseen.collect::<Vec<_>>(), [6, 7, 8]);
        assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 3), []);
    }

    /// Looks ahead before every 32 pops, as evicting does, and pops up to `count` slots. What of
    /// them was not looked at before.
    fn popped_unseen(order: &mut EvictionOrder, slots: &[Slot], seen: &mut [bool], count: usize) -> Vec<u32> {
        let mut unseen = Vec::new();
        for turn in 0..count {
            if turn % 32 == 0 {
                order.prefetch_next(32, slots, |slot| seen[slot as usize] = true);
            }
            let Some(slot) = order.pop_old(slots, &mut 100_000) else { break };
            unseen.extend((!std::mem::take(&mut seen[slot as usize])).then_some(slot));
        }
        unseen
    }

    #[test]
    fn what_is_looked_at_ahead_is_what_comes_up_also_after_the_queue_was_empty() {
        let slots = Slot::many(3000);
        let (mut order, mut seen) = (order_of(3000), vec![false; 3000]);
        for _ in 0..3 {
            (0..3000).for_each(|slot| order.push_young(slot, &slots));
            assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 4000), []);
        }
    }

    #[test]
    fn what_was_looked_at_ahead_is_not_looked_at_again() {
        let slots = Slot::many(100);
        let mut order = order_of(100);
        (0..100).for_each(|slot| order.push_young(slot, &slots));
        let mut looked_at = Vec::new();
        for _ in 0..2 {
            order.prefetch_next(32, &slots, |slot| looked_at.push(slot));
        }
        (0..10).for_each(|slot| assert_eq!(order.pop_old(&slots, &mut 1), Some(slot)));
        order.prefetch_next(32, &slots, |slot| looked_at.push(slot));
        assert_eq!(looked_at, (0..42).collect::<Vec<_>>());
    }

    /// Cleaning moves what was not looked at to positions that were: it is looked at there.
    #[test]
    fn what_cleaning_moves_is_looked_at_ahead() {
        let slots = Slot::many(2048);
        let (mut order, mut seen) = (order_of(2048), vec![false; 2048]);
        (0..2048).for_each(|slot| order.push_young(slot, &slots));
        assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 512), []);
        for round in 0..8 {
            for slot in 1100..2048 {
                order.push_young(slot, &slots);
            }
            assert!(round < 7 || order.first() < MIDDLE + 512, "it was cleaned");
        }
        let unseen = popped_unseen(&mut order, &slots, &mut seen, 2048);
        // Numbers have a gap where cleaning ended.
        assert!(unseen.len() <= 32, "{} were not looked at", unseen.len());
    }

    #[test]
    fn budget_bounds_the_search() {
        let slots = Slot::many(4);
        let mut order = order_of(4);
        for _ in 0..5 {
            order.push_young(0, &slots);
        }
        let mut budget = 3;
        assert_eq!(order.pop_old(&slots, &mut budget), None);
        assert_eq!(budget, 0);
        assert!(!order.is_empty());
        assert_eq!(order.pop_old(&slots, &mut 1000), Some(0));
    }

    fn slots_with_entries(count: usize) -> Box<[Slot]> {
        let slots = Slot::many(count);
        for (number, slot) in slots.iter().enumerate() {
            slot.entry.set(number as u32);
        }
        slots
    }

    /// Three tenants, each slot always of the same: against a list for each.
    #[test]
    fn agrees_with_a_list_for_each_tenant() {
        let count = 1500_u32;
        let slots = slots_with_entries(count as usize);
        let tenant_of = |entry: u32| (entry * 7 % 31 % 3) as usize;
        let mut order = EvictionOrder::new(slots.len());
        let mut lists = [const { VecDeque::<u32>::new() }; 3];
        let mut random = 5_u64;
        for step in 0..60_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (random >> 33) as u32 % count;
            let list = &mut lists[tenant_of(slot)];
            match random >> 48 {
                choice if choice % 64 == 0 => {
                    // The tenants come up unevenly; what is found is put at the old end again, or
                    // is gone.
                    let tenant = [0, 0, 0, 0, 1, 1, 2][slot as usize % 7];
                    let theirs = |entry| tenant_of(entry) == tenant;
                    let found = order.pop_old_of(tenant, &slots, &mut 1_000_000, theirs);
                    assert_eq!(found, lists[tenant].pop_front(), "step {step}");
                }
                choice if choice % 64 < 3 => {
                    list.retain(|&other| other != slot);
                    slots[slot as usize].order_position.set(NONE);
                }
                _ => {
                    list.retain(|&other| other != slot);
                    list.push_back(slot);
                    order.push_young(slot, &slots);
                }
            }
        }
        assert!(order.queue.len() <= 2 * 1500 / 1024 + 6, "{} segments", order.queue.len());
    }

    #[test]
    fn what_is_put_at_the_old_end_is_found_and_the_budget_bounds_the_search() {
        let slots = slots_with_entries(3000);
        let mut order = EvictionOrder::new(3000);
        (0..3000).for_each(|slot| order.push_young(slot, &slots));
        let pop = |order: &mut EvictionOrder, slots: &[Slot], tenant: usize, budget: usize| {
            let mut left = budget;
            (
                order.pop_old_of(tenant, slots, &mut left, |entry| (entry >= 2000) == (tenant == 1)),
                budget - left,
            )
        };
        assert_eq!(pop(&mut order, &slots, 1, 1500), (None, 1500));
        assert_eq!(pop(&mut order, &slots, 1, 1500), (Some(2000), 501), "it went on from there");
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2001), 1));
        for slot in [7, 2000, 2900] {
            order.push_old(slot, &slots);
        }
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2000), 2), "7 is none of theirs");
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2900), 1));
        assert_eq!(pop(&mut order, &slots, 1, 9), (Some(2002), 1));
        assert_eq!(pop(&mut order, &slots, 0, 9), (Some(7), 1), "the others have an order of their own");
        assert_eq!(pop(&mut order, &slots, 0, 9), (Some(0), 3), "behind two positions that are empty now");
    }
}
