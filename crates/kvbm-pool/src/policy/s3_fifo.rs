//! S3-FIFO over leaves: a small queue for what is new, a main queue for what was used again, and a memory of what was
//! evicted from the small one (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! A block whose branch is said to have ended goes before all others, unless it is used again first. One that has a priority and
//! comes up is put into the main queue again as many times as that is, in the mean.
//!
//! A slot that is not evictable when it comes up leaves its queue; it comes back at the old end when it is evictable again.

use super::hazard::history::History;
use super::{BlockMemory, BlockUse, EvictionPolicy, Numbers, Random, Sets, SlotSet, spares};
use crate::tier::TIERS;
use std::collections::VecDeque;

/// Share of a tier that the small queue aims at, or of a tenant's evictable blocks there: one in so many.
const SMALL: usize = 10;
/// Uses that are counted; and how many make a block leave the small queue for the main one.
const MOST: u8 = 3;
const PROMOTE: u8 = 2;

/// Places looked at before an evictable slot is taken whatever its uses.
const MOST_STEPS: usize = 1024;

/// In a block's class: it was remembered when it came.
const REMEMBERED: u8 = 1;
/// In a block's class: its branch is said to have ended, and it was not used since.
const ENDED: u8 = 2;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Lane {
    #[default]
    None,
    Small,
    Main,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// Where it lies, or would lie.
    queue: Lane,
    /// Whether there is a place for it in that queue.
    queued: bool,
    evictable: bool,
    uses: u8,
    ending: Ending,
    priority: u8,
    /// In whose queues its places are.
    tenant: u8,
    /// How often the slot came to another tenant: places from before are not its any more.
    turn: u32,
}

/// A place in a queue.
#[derive(Clone, Copy)]
struct Place {
    slot: u32,
    turn: u32,
}

/// What is said of the block's branch.
#[derive(Clone, Copy, Default)]
struct Ending {
    /// It has ended, and was not used since.
    said: bool,
    /// There is a place for the slot in the queue of those.
    queued: bool,
}

impl State {
    /// For the next block of the slot: places stay where they are, for whatever is in the slot when they come up.
    fn left(self) -> Self {
        let queue = if self.queued { self.queue } else { Lane::None };
        let ending = Ending { said: false, ..self.ending };
        Self { queue, queued: self.queued, ending, tenant: self.tenant, turn: self.turn, ..Self::default() }
    }

    /// For a block of another tenant: places in the queues of the one before do not count.
    fn of_another(self, tenant: usize) -> Self {
        Self { uses: self.uses, tenant: tenant as u8, turn: self.turn.wrapping_add(1), ..Self::default() }
    }
}

/// A queue of slots.
#[derive(Default)]
struct Queue {
    places: VecDeque<Place>,
    /// So long it is cleaned of places that do not count any more. Only slots that change hands leave such places.
    long: usize,
}

/// The least length at which a queue is cleaned.
const LONG: usize = 1024;

impl Queue {
    fn len(&self) -> usize {
        self.places.len()
    }

    fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// At the young end. Where it has become twice as long as it was when it was clean, it is cleaned.
    fn push(&mut self, slot: u32, states: &[State]) {
        if self.places.len() >= self.long.max(LONG) {
            self.places.retain(|place| states[place.slot as usize].turn == place.turn);
            self.long = 2 * self.places.len();
        }
        self.places.push_back(Place { slot, turn: states[slot as usize].turn });
    }

    /// At the old end.
    fn push_old(&mut self, slot: u32, states: &[State]) {
        self.places.push_front(Place { slot, turn: states[slot as usize].turn });
    }

    /// The oldest slot that still has its place; `steps` counts the places that were looked at.
    fn pop(&mut self, states: &[State], steps: &mut usize) -> Option<u32> {
        while let Some(Place { slot, turn }) = self.places.pop_front() {
            *steps += 1;
            if states[slot as usize].turn == turn {
                return Some(slot);
            }
        }
        None
    }
}

/// The queues of a set.
#[derive(Default)]
struct Queues {
    small: Queue,
    main: Queue,
    ended: Queue,
    evictable: usize,
}

/// The policy "s3-fifo".
pub struct S3Fifo {
    states: [Box<[State]>; TIERS],
    sets: Sets<Queues>,
    history: History,
    evictions: u64,
    /// Decides which blocks of some priority are passed over.
    random: Random,
}

impl S3Fifo {
    /// For tiers of `capacity` slots. The seed decides which blocks of some priority stay.
    pub fn new(capacity: [usize; TIERS], seed: u64) -> Self {
        let largest = capacity.into_iter().max().unwrap_or(0);
        let mut sets = Sets::new(capacity, |_| Queues::default());
        for (queues, slots) in sets.each().zip(capacity) {
            queues.small.places.reserve(slots);
            queues.main.places.reserve(slots);
        }
        let states = capacity.map(|slots| vec![State::default(); slots].into_boxed_slice());
        Self { states, sets, history: History::new(largest), evictions: 0, random: Random::new(seed) }
    }
}

impl EvictionPolicy for S3Fifo {
    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        let remembered = self.history.take(block.tag).is_some();
        BlockMemory { time: 0, class: if remembered { REMEMBERED } else { 0 } }
    }

    fn used(&mut self, _block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        BlockMemory { class: memory.class & !ENDED, ..memory }
    }

    fn ended(&mut self, _tag: u64, memory: BlockMemory) -> BlockMemory {
        BlockMemory { class: memory.class | ENDED, ..memory }
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        // The age of an entry is the number of evictions since; it need not be exact.
        self.evictions += 1;
        let now = (self.evictions / 64) as u16;
        self.history.put(tag, BlockMemory { time: now, class: memory.class }, |time| now.wrapping_sub(time));
    }

    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        _numbers: &mut Numbers<'_>,
    ) {
        let states = &mut self.states[set.tier];
        let mut state = states[slot as usize];
        if usize::from(state.tenant) != set.tenant {
            state = state.of_another(set.tenant);
        }
        let queues = self.sets.at(set);
        queues.evictable += usize::from(!state.evictable);
        let ended = memory.class & ENDED != 0;
        let (was_queued, ended_queued) = (state.queued, state.ending.queued);
        let lane = match (state.queue, memory.class & REMEMBERED != 0) {
            (Lane::None, false) => Lane::Small,
            (Lane::None, true) => Lane::Main,
            (lane, _) => lane,
        };
        let is_new = state.queue == Lane::None;
        let ending = Ending { said: ended, queued: ended_queued || ended };
        states[slot as usize] =
            State { queue: lane, queued: true, evictable: true, ending, priority, ..state };
        if ended && !ended_queued {
            queues.ended.push(slot, states);
        }
        let queue = if lane == Lane::Small { &mut queues.small } else { &mut queues.main };
        if !was_queued && is_new {
            queue.push(slot, states);
        } else if !was_queued {
            queue.push_old(slot, states);
        }
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut Numbers<'_>) {
        if std::mem::replace(&mut self.states[set.tier][slot as usize].evictable, false) {
            self.sets.at(set).evictable -= 1;
        }
    }

    fn emptied(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.kept(set, slot, numbers);
        let state = &mut self.states[set.tier][slot as usize];
        *state = state.left();
    }

    fn touched(&mut self, tier: usize, slot: u32) {
        let state = &mut self.states[tier][slot as usize];
        state.ending.said = false;
        state.uses = (state.uses + 1).min(MOST);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, _numbers: &mut Numbers<'_>) {
        let states = &mut self.states[set.tier];
        let alone = self.sets.is_one_for_each_tier();
        let queues = self.sets.at(set);
        let all = if alone { states.len() } else { queues.small.len() + queues.main.len() };
        let victim =
            queues.of_an_ended_branch(states).or_else(|| queues.next(states, all / SMALL, &mut self.random));
        if let Some(slot) = victim {
            let state = &mut states[slot as usize];
            *state = state.left();
            queues.evictable -= 1;
            out.push(slot);
        }
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        self.sets.get(set).is_some_and(|queues| queues.evictable > 0)
    }
}

impl Queues {
    fn of_an_ended_branch(&mut self, states: &mut [State]) -> Option<u32> {
        let mut steps = 0;
        while steps < MOST_STEPS {
            let slot = self.ended.pop(states, &mut steps)?;
            let state = &mut states[slot as usize];
            state.ending.queued = false;
            if state.evictable && state.ending.said {
                return Some(slot);
            }
        }
        None
    }

    /// The next of the small queue, where that is larger than it aims at, or of the main one.
    fn next(&mut self, states: &mut [State], aim: usize, random: &mut Random) -> Option<u32> {
        let mut steps = 0;
        while self.evictable > 0 {
            let small = self.small.len();
            let from_small = small > 0 && (self.main.is_empty() || small >= aim);
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let Some(slot) = queue.pop(states, &mut steps) else {
                if self.small.is_empty() && self.main.is_empty() {
                    return None;
                }
                continue;
            };
            let state = &mut states[slot as usize];
            if !state.evictable {
                state.queued = false;
            } else if from_small && state.uses >= PROMOTE && steps < MOST_STEPS {
                *state = State { queue: Lane::Main, uses: 0, ..*state };
                self.main.push(slot, states);
            } else if !from_small && state.uses > 0 && steps < MOST_STEPS {
                state.uses -= 1;
                self.main.push(slot, states);
            } else if steps < MOST_STEPS && spares(state.priority, random) {
                state.queue = Lane::Main;
                self.main.push(slot, states);
            } else {
                state.queued = false;
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::slot::Slot;

    /// Slots that change hands leave places behind in the queues of the tenant before.
    #[test]
    fn queues_stay_short_where_slots_change_hands() {
        let mut policy = S3Fifo::new([16, 0, 0], 1);
        let slots = Slot::many(16);
        let numbers = &mut Numbers::of(&slots);
        for turn in 0..100_000 {
            let set = SlotSet { tier: 0, tenant: 1 + turn / 16 % 3 };
            let (slot, class) = (turn as u32 % 16, if turn % 5 == 0 { ENDED } else { 0 });
            policy.evictable(set, slot, BlockMemory { time: 0, class }, 0, numbers);
            policy.emptied(set, slot, numbers);
        }
        for tenant in 1..4 {
            let set = SlotSet { tier: 0, tenant };
            let Queues { small, main, ended, evictable } = policy.sets.at(set);
            let places = [small.len(), main.len(), ended.len()];
            assert!(places.into_iter().all(|places| places <= LONG), "{places:?}");
            assert_eq!(*evictable, 0);
            policy.evictable(set, tenant as u32, BlockMemory::default(), 0, numbers);
            let mut victims = Vec::new();
            policy.victims(set, 1, &mut victims, numbers);
            assert_eq!(victims, [tenant as u32], "behind places that do not count");
        }
    }
}
