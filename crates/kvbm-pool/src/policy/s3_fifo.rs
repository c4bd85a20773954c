//! S3-FIFO over leaves: a small queue for what is new, a main queue for what was used again, and a memory of what was
//! evicted from the small one (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! A slot that is not evictable when it comes up leaves its queue; it comes back at the old end when it is evictable again.

use super::hazard::history::History;
use super::{BlockMemory, BlockUse, EvictionPolicy, Numbers, RequestPart};
use crate::tier::TIERS;
use std::collections::VecDeque;

/// Share of a tier that the small queue aims at: one in so many.
const SMALL: usize = 10;
/// Uses that are counted; and how many make a block leave the small queue for the main one.
const MOST: u8 = 3;
const PROMOTE: u8 = 2;

/// Places looked at before an evictable slot is taken whatever its uses.
const MOST_STEPS: usize = 1024;

/// In a block's class: it was remembered when it came.
const REMEMBERED: u8 = 1;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Queue {
    #[default]
    None,
    Small,
    Main,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// Where it lies, or would lie.
    queue: Queue,
    /// Whether there is a place for it in that queue.
    queued: bool,
    evictable: bool,
    uses: u8,
}

struct TierQueues {
    states: Box<[State]>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    evictable: usize,
}

/// The policy "s3-fifo".
pub struct S3Fifo {
    tiers: [TierQueues; TIERS],
    history: History,
    evictions: u64,
}

impl S3Fifo {
    /// For tiers of `capacity` slots.
    pub fn new(capacity: [usize; TIERS]) -> Self {
        let largest = capacity.into_iter().max().unwrap_or(0);
        let tiers = capacity.map(|slots| TierQueues {
            states: vec![State::default(); slots].into_boxed_slice(),
            small: VecDeque::with_capacity(slots),
            main: VecDeque::with_capacity(slots),
            evictable: 0,
        });
        Self { tiers, history: History::new(largest), evictions: 0 }
    }
}

impl EvictionPolicy for S3Fifo {
    fn begin(&mut self, _before: Option<BlockMemory>, _part: RequestPart, _blocks: usize) {}

    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        let remembered = self.history.take(block.tag).is_some();
        BlockMemory { time: 0, class: if remembered { REMEMBERED } else { 0 } }
    }

    fn used(&mut self, _block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        memory
    }

    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        // The age of an entry is the number of evictions since; it need not be exact.
        self.evictions += 1;
        let now = (self.evictions / 64) as u16;
        self.history.put(tag, BlockMemory { time: now, class: memory.class }, |time| now.wrapping_sub(time));
    }

    fn evictable(
        &mut self,
        tier: usize,
        slot: u32,
        memory: BlockMemory,
        _priority: u8,
        _numbers: &mut Numbers<'_>,
    ) {
        let tier = &mut self.tiers[tier];
        let state = &mut tier.states[slot as usize];
        if !std::mem::replace(&mut state.evictable, true) {
            tier.evictable += 1;
        }
        if state.queued {
            return;
        }
        state.queued = true;
        match (state.queue, memory.class & REMEMBERED != 0) {
            (Queue::Small, _) => tier.small.push_front(slot),
            (Queue::Main, _) => tier.main.push_front(slot),
            (Queue::None, false) => {
                state.queue = Queue::Small;
                tier.small.push_back(slot);
            }
            (Queue::None, true) => {
                state.queue = Queue::Main;
                tier.main.push_back(slot);
            }
        }
    }

    fn kept(&mut self, tier: usize, slot: u32, _numbers: &mut Numbers<'_>) {
        let tier = &mut self.tiers[tier];
        if std::mem::replace(&mut tier.states[slot as usize].evictable, false) {
            tier.evictable -= 1;
        }
    }

    fn emptied(&mut self, tier: usize, slot: u32, numbers: &mut Numbers<'_>) {
        self.kept(tier, slot, numbers);
        let state = &mut self.tiers[tier].states[slot as usize];
        // Its place stays in the queue, for whatever block is in the slot when it comes up.
        let queue = if state.queued { state.queue } else { Queue::None };
        *state = State { queued: state.queued, queue, ..State::default() };
    }

    fn touched(&mut self, tier: usize, slot: u32) {
        let state = &mut self.tiers[tier].states[slot as usize];
        state.uses = (state.uses + 1).min(MOST);
    }

    fn victims(&mut self, tier: usize, _want: usize, out: &mut Vec<u32>, _numbers: &mut Numbers<'_>) {
        let tier = &mut self.tiers[tier];
        let mut steps = 0;
        while tier.evictable > 0 {
            steps += 1;
            let small = tier.small.len();
            let from_small = small > 0 && (tier.main.is_empty() || small >= tier.states.len() / SMALL);
            let next = if from_small { tier.small.pop_front() } else { tier.main.pop_front() };
            let Some(slot) = next else { return };
            let state = &mut tier.states[slot as usize];
            if !state.evictable {
                state.queued = false;
            } else if from_small && state.uses >= PROMOTE && steps < MOST_STEPS {
                *state = State { queue: Queue::Main, uses: 0, ..*state };
                tier.main.push_back(slot);
            } else if !from_small && state.uses > 0 && steps < MOST_STEPS {
                state.uses -= 1;
                tier.main.push_back(slot);
            } else {
                *state = State::default();
                tier.evictable -= 1;
                out.push(slot);
                return;
            }
        }
    }

    fn has_victim(&self, tier: usize) -> bool {
        self.tiers[tier].evictable > 0
    }
}
