//! The eviction order of a tier: a queue of slot ids, the old end in front.
//!
//! A use appends the slot again and remembers the new place in the slot; places that the slot does not point to are
//! stale and skipped when they come up. So a use costs one sequential write, nothing is ever unlinked from the middle,
//! and the next victims are known ahead.
//!
//! The queue is made of segments. When stale places have made it too long, they are cleaned out from the old end on,
//! a few places for each use, so that nobody waits for it: valid places move from a segment to the one before it.

mod seen;

use super::slot::Slot;
use super::{MAX_SHARDS, NONE};
use crate::near;
use crate::sync::{Arc, Leaf};
use seen::Seen;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Most places of a segment; a place is the number of its segment, then its index there.
const LEN: usize = 1 << LEN_BITS;
const LEN_BITS: u32 = 10;
/// Where the shard's number stands in a place.
const TAG_SHIFT: u32 = 29;
const _: () = assert!(MAX_SHARDS <= 1 << (u32::BITS - TAG_SHIFT));

/// Heap of the queue for each slot of the tier, while cleaning keeps up; without stale places it is two thirds of that.
pub(crate) const BYTES_PER_SLOT: usize = size_of::<u32>() * 3 / 2;

/// Places cleaned for each use while that is under way.
const CLEANED_PER_USE: usize = 4;

/// A place that is cleaned asks for the slot of the place that is so much later.
const CLEANED_AHEAD: usize = 16;

/// Segments of a shard's part of a tier at least, where there are several shards: as old as its oldest is a segment, and what is young must
/// not seem old for lying behind it.
const SEGMENTS: usize = 16;

/// Places of a segment at least.
const SHORTEST: usize = 16;

/// As many as a segment has, or none where it is not in use.
type Places = Box<[u32]>;

fn new_places(len: usize) -> Places {
    vec![NONE; len].into_boxed_slice()
}

struct Segment {
    places: Places,
    /// Number of the first place, counted over the life of the queue: a cursor survives pops. Numbers rise along the
    /// queue, with gaps where it was cleaned.
    start: u64,
    /// The clock when it was begun.
    begun: u64,
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
        self.tail == self.places.len()
    }
}

/// What the orders of a tier share, those of all its shards.
pub(crate) struct Common {
    /// Segments that were begun: how old a segment is, is how many came after it.
    begun: AtomicU64,
    shards: usize,
    /// Places of a segment.
    len: usize,
    /// Places that no segment has, where there are several shards: the heap has as much as all need together, wherever the blocks are,
    /// and not as much as each ever needed.
    unused: Option<Leaf<Vec<Places>>>,
}

impl Common {
    /// For a tier of `capacity` slots.
    pub(crate) fn new(capacity: usize, shards: usize) -> Self {
        let len = if shards == 1 { LEN } else { (capacity / (SEGMENTS * shards)).clamp(SHORTEST, LEN) };
        let unused = (shards > 1 && capacity > 0).then(|| {
            // The first and the last segments of each shard are not full.
            let valid = capacity.div_ceil(len) + 3 * shards;
            let mut unused = Vec::with_capacity(2 * valid);
            unused.resize_with(valid, || new_places(len));
            Leaf::new(unused)
        });
        Self { begun: AtomicU64::new(0), shards, len, unused }
    }

    /// Segments begun so far.
    pub(crate) fn now(&self) -> u64 {
        self.begun.load(Relaxed)
    }

    /// Segments in use at which cleaning begins.
    fn long(&self, population: usize) -> usize {
        (population + population / 2).div_ceil(self.len) + 2
    }

    fn take(&self) -> Places {
        let unused = self.unused.as_ref().and_then(|unused| unused.lock().pop());
        unused.unwrap_or_else(|| new_places(self.len))
    }
}

pub(crate) struct Order {
    common: Arc<Common>,
    /// The shard, in the upper bits of its places: a place names its order.
    tag: u32,
    segments: Vec<Segment>,
    /// Segments in use, oldest first, and those that are not in use.
    queue: VecDeque<u32>,
    spare: Vec<u32>,
    /// The segment at the young end; none where that has no room anyway.
    young: u32,
    /// Index in the queue of the segment that valid places move to; those of the next segment follow.
    cleaning: Option<usize>,
    /// Places that may be valid: cleaning begins when the queue is half again as long.
    population: usize,
    /// Places before this number were looked at by whoever copies victims before they go.
    watched: u64,
    /// Places before this number were looked at for what evicting them will read.
    looked_ahead: u64,
    /// For each tenant that had to give blocks: where there are none of its.
    seen: Vec<Seen>,
}

/// Number of the first place: there is room before it.
const MIDDLE: u64 = 1 << 62;

impl Order {
    /// Of one shard on a tier of `capacity` slots: at most that many places are valid.
    pub(crate) fn new(capacity: usize, shard: usize, common: Arc<Common>) -> Self {
        // Of several shards each has room for half again its part; one that comes to have more grows.
        let part = if common.shards > 1 { capacity / common.shards * 3 / 2 } else { capacity };
        let long = common.long(part);
        let most = long + long / 4;
        Self {
            common,
            tag: (shard as u32) << TAG_SHIFT,
            segments: Vec::with_capacity(most),
            queue: VecDeque::with_capacity(most),
            spare: Vec::with_capacity(most),
            young: NONE,
            cleaning: None,
            population: capacity,
            watched: 0,
            looked_ahead: 0,
            seen: Vec::new(),
        }
    }

    /// No more places than so many are valid.
    pub(crate) fn set_population(&mut self, population: usize) {
        self.population = population;
    }

    /// A segment that is not in use, empty.
    fn take_spare(&mut self, start: u64, begun: u64, at: usize) -> u32 {
        let id = self.spare.pop().unwrap_or_else(|| {
            self.segments.push(Segment { places: Places::default(), start, begun, head: 0, tail: 0 });
            self.segments.len() as u32 - 1
        });
        let segment = &mut self.segments[id as usize];
        if segment.places.is_empty() {
            segment.places = self.common.take();
        }
        (segment.start, segment.begun, segment.head, segment.tail) = (start, begun, at, at);
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
        segment.places[segment.tail] = slot;
        slots[slot as usize].place.set(self.tag | id << LEN_BITS | segment.tail as u32);
        segment.tail += 1;
    }

    /// A new segment at the young end.
    #[cold]
    fn append(&mut self) {
        let back = self.queue.back().map(|&id| self.segments[id as usize].start + self.common.len as u64);
        let start = back.unwrap_or_else(|| self.begin());
        let begun = self.common.begun.fetch_add(1, Relaxed) + 1;
        let id = self.take_spare(start, begun, 0);
        self.queue.push_back(id);
        self.young = id;
        if self.cleaning.is_none() && self.queue.len() > self.common.long(self.population) {
            let Segment { start, begun, .. } = self.segments[self.queue[0] as usize];
            let first = self.take_spare(start, begun, 0);
            self.queue.push_front(first);
            self.cleaning = Some(0);
        }
    }

    /// Number of the first place of a queue that is empty: behind all that was looked at.
    fn begin(&self) -> u64 {
        MIDDLE.max(self.watched).max(self.looked_ahead)
    }

    /// Makes `slot` the oldest.
    pub(crate) fn push_old(&mut self, slot: u32, slots: &[Slot]) {
        let room = self.queue.front().copied().filter(|&id| self.segments[id as usize].head > 0);
        let first = room.unwrap_or_else(|| {
            let front = self.queue.front().map(|&id| &self.segments[id as usize]);
            let before = front.map(|segment| (segment.start - self.common.len as u64, segment.begun));
            let (start, begun) = before.unwrap_or_else(|| (self.begin(), 0));
            let id = self.take_spare(start, begun, self.common.len);
            self.queue.push_front(id);
            self.cleaning = self.cleaning.map(|at| at + 1);
            id
        });
        let segment = &mut self.segments[first as usize];
        segment.head -= 1;
        segment.places[segment.head] = slot;
        slots[slot as usize].place.set(self.tag | first << LEN_BITS | segment.head as u32);
        let number = segment.first();
        self.seen.iter_mut().for_each(|seen| seen.pushed_old(number));
    }

    /// Takes the oldest slot out; `None` when none is left. `budget` counts down for every place looked at, and 0
    /// ends the search.
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
            let slot = segment.places[segment.head];
            let place = self.tag | id << LEN_BITS | segment.head as u32;
            segment.head += 1;
            if slots[slot as usize].place.get() == place {
                slots[slot as usize].place.set(NONE);
                return Some(slot);
            }
        }
        None
    }

    /// Takes a segment without places out of the queue.
    fn remove(&mut self, at: usize) {
        if let Some(id) = self.queue.remove(at) {
            if let Some(unused) = &self.common.unused {
                unused.lock().push(std::mem::take(&mut self.segments[id as usize].places));
            }
            self.spare.push(id);
            if id == self.young {
                self.young = self.queue.back().copied().unwrap_or(NONE);
            }
        }
        self.cleaning = match self.cleaning {
            // What valid places move to is gone: the rest is cleaned when the queue is long again.
            Some(to) if at == to => None,
            Some(to) if at < to => Some(to - 1),
            other => other,
        };
    }

    /// Moves the valid ones of the next `places` towards the old end.
    fn clean(&mut self, places: usize, slots: &[Slot]) {
        for _ in 0..places {
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
            let place = self.tag | from << LEN_BITS | segment.head as u32;
            let slot = segment.places[segment.head];
            let soon = segment.places.get(segment.head + CLEANED_AHEAD);
            if let Some(soon) = soon.and_then(|&soon| slots.get(soon as usize)) {
                near::prefetch(soon);
            }
            segment.head += 1;
            if slots[slot as usize].place.get() == place {
                self.move_to(to, number, slot, slots);
            }
        }
    }

    /// Moves the place with `number` to the segment at index `to` of the queue.
    fn move_to(&mut self, mut to: usize, number: u64, slot: u32, slots: &[Slot]) {
        if self.segments[self.queue[to] as usize].is_full() {
            let Segment { start, begun, .. } = self.segments[self.queue[to + 1] as usize];
            let id = self.take_spare(start, begun, 0);
            to += 1;
            self.queue.insert(to, id);
            self.cleaning = Some(to);
        }
        let id = self.queue[to];
        let moved = self.segments[id as usize].end();
        if number >= self.watched && moved < self.watched {
            self.watched = moved;
        }
        if number >= self.looked_ahead && moved < self.looked_ahead {
            self.looked_ahead = moved;
        }
        self.seen.iter_mut().for_each(|seen| seen.moved(number, moved));
        self.put(id, slot, slots);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.iter().all(|&id| {
            let segment = &self.segments[id as usize];
            segment.head == segment.tail
        })
    }

    /// When the oldest places were written, by the clock; the end of time where there is none.
    pub(crate) fn oldest(&self) -> u64 {
        let filled = |segment: &&Segment| segment.head < segment.tail;
        let mut segments = self.queue.iter().map(|&id| &self.segments[id as usize]);
        segments.find(filled).map_or(u64::MAX, |segment| segment.begun)
    }

    /// Number of the oldest place.
    pub(crate) fn first(&self) -> u64 {
        self.queue.front().map_or(MIDDLE, |&id| self.segments[id as usize].first())
    }

    /// Number after the youngest place.
    pub(crate) fn end(&self) -> u64 {
        self.queue.back().map_or(MIDDLE, |&id| self.segments[id as usize].end())
    }

    /// Calls `next` with the slots of the oldest `count` places (fewer before a gap in their numbers), as far as they were not looked at so before.
    #[inline]
    pub(crate) fn look_ahead(&mut self, count: usize, slots: &[Slot], mut next: impl FnMut(u32)) {
        let first = self.first();
        let from = first.max(self.looked_ahead);
        let end = first + count as u64;
        let mut looked_ahead = from;
        self.places(from..end, slots).for_each(|(number, slot)| {
            looked_ahead = number + 1;
            slot.into_iter().for_each(&mut next);
        });
        self.looked_ahead = looked_ahead;
    }

    /// Places before this number were looked at.
    pub(crate) fn watched(&self) -> u64 {
        self.watched
    }

    /// Places before `number` have been looked at.
    pub(crate) fn watch(&mut self, number: u64) {
        self.watched = number;
    }

    /// Places with numbers of a range, oldest first: number, and slot unless the place is stale.
    pub(crate) fn places(
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
                let slot = segment.places[index];
                let valid = slots[slot as usize].place.get() == self.tag | id << LEN_BITS | index as u32;
                (segment.start + index as u64, valid.then_some(slot))
            })
        };
        self.queue.range(first..).take_while(is_among).flat_map(from_segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(capacity: usize) -> Order {
        Order::new(capacity, 5, Arc::new(Common::new(capacity, 1)))
    }

    fn valid(order: &Order, slots: &[Slot]) -> Vec<u32> {
        order.places(0..u64::MAX, slots).filter_map(|(_, slot)| slot).collect()
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
                // A slot that leaves for another reason only forgets its place.
                oracle.retain(|&other| other != slot);
                slots[slot as usize].place.set(NONE);
            } else {
                oracle.retain(|&other| other != slot);
                oracle.push_back(slot);
                order.push_young(slot, &slots);
            }
            if step % 97 == 0 {
                assert_eq!(valid(&order, &slots), oracle.iter().copied().collect::<Vec<_>>(), "step {step}");
                let numbers: Vec<u64> = order.places(0..u64::MAX, &slots).map(|(number, _)| number).collect();
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

    /// More uses than evictions, so that stale places have to be cleaned out again and again.
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
        let push = |order: &mut Order, slots: &[Slot], slot: u32| order.push_young(slot, slots);
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
        let after: Vec<u32> = order.places(numbers, &slots).filter_map(|(_, slot)| slot).collect();
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
        let unseen: Vec<u64> = order.places(order.watched()..u64::MAX, &slots).map(|(at, _)| at).collect();
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
        let unseen = order.places(order.watched()..u64::MAX, &slots).filter_map(|(_, slot)| slot);
        assert_eq!(unseen.collect::<Vec<_>>(), [6, 7, 8]);
        assert_eq!(popped_unseen(&mut order, &slots, &mut seen, 3), []);
    }

    /// Looks ahead before every 32 pops, as evicting does, and pops up to `count` slots. What of them was not looked at before.
    fn popped_unseen(order: &mut Order, slots: &[Slot], seen: &mut [bool], count: usize) -> Vec<u32> {
        let mut unseen = Vec::new();
        for turn in 0..count {
            if turn % 32 == 0 {
                order.look_ahead(32, slots, |slot| seen[slot as usize] = true);
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
            order.look_ahead(32, &slots, |slot| looked_at.push(slot));
        }
        (0..10).for_each(|slot| assert_eq!(order.pop_old(&slots, &mut 1), Some(slot)));
        order.look_ahead(32, &slots, |slot| looked_at.push(slot));
        assert_eq!(looked_at, (0..42).collect::<Vec<_>>());
    }

    /// Cleaning moves what was not looked at to places that were: it is looked at there.
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

    #[test]
    fn the_places_of_one_shard_are_the_next_ones_of_another() {
        let capacity = 4 * LEN;
        let common = Arc::new(Common::new(capacity, 2));
        let unused = || common.unused.as_ref().unwrap().lock().len();
        let all = unused();
        let slots = Slot::many(capacity);
        let mut orders = [0, 1].map(|shard| Order::new(capacity, shard, Arc::clone(&common)));
        // All blocks of the tier are in one shard, then in the other.
        for turn in 0..6 {
            let order = &mut orders[turn % 2];
            (0..capacity as u32).for_each(|slot| order.push_young(slot, &slots));
            assert_eq!(unused(), all - capacity / common.len, "places come from those that are there");
            let mut budget = usize::MAX;
            while order.pop_old(&slots, &mut budget).is_some() {}
            assert_eq!(unused(), all, "all come back");
        }
    }
}
