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
mod tests;
