//! Where a thread puts new blocks, and where it looks for victims first.
//!
//! A thread stays in a shard for some time, so that the shard's lock and the ends of its queues stay in its core's cache, and
//! then goes on to the next one, so that no shard has the oldest blocks alone: two threads that evict have two to evict from.

use crate::tier::TIERS;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Times that a thread goes through all shards while it registers as many blocks as the highest tier has.
const ROUNDS: usize = 4;

/// Times that a thread goes on to another shard for victims that are drawn, while one would stay in a shard to register as many blocks of
/// the tier.
const STAYS: usize = 8;

/// A shard is left after one of so many of the blocks that it could give, so that its best do not go before the worst of others...
const PART: u64 = 16;

/// ... but not before so many.
const LEAST: usize = 4;

#[cfg_attr(
    any(kvbm_loom, kvbm_shuttle),
    allow(dead_code, reason = "a model's threads are one thread to the system")
)]
struct Habits {
    number: usize,
    home: Cell<usize>,
    /// Blocks that came there.
    stayed: Cell<usize>,
    /// For each tier, where the thread found victims last, and how many it may take there before a shard is drawn again.
    victims: [Cell<usize>; TIERS],
    left: [Cell<usize>; TIERS],
}

/// Number of the next thread that asks.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HABITS: Habits = {
        let number = THREADS.fetch_add(1, Relaxed);
        let victims = std::array::from_fn(|_| Cell::new(number));
        Habits { number, home: Cell::new(number), stayed: Cell::new(0), victims, left: Default::default() }
    };
}

pub(crate) struct Homes {
    /// Blocks after which a thread goes on: it registers into the highest tier, and a block keeps its shard on all.
    stay: usize,
    /// Victims of a tier after which a shard is drawn again.
    most_drawn: [usize; TIERS],
    shards: usize,
    /// Under a model checker everybody goes on each time, in turn.
    turn: AtomicUsize,
}

const CHECKED: bool = cfg!(any(kvbm_loom, kvbm_shuttle));

impl Homes {
    /// For tiers of `capacity` slots.
    pub(super) fn new(capacity: [usize; TIERS], shards: usize) -> Self {
        let shards = shards.max(1);
        let highest = capacity.into_iter().find(|&slots| slots > 0).unwrap_or(0);
        let most_drawn = capacity.map(|slots| (slots / (ROUNDS * shards * STAYS)).max(LEAST));
        Self { stay: highest / (ROUNDS * shards), most_drawn, shards, turn: AtomicUsize::new(0) }
    }

    /// The shard for the next `blocks` new blocks.
    pub(super) fn home(&self, blocks: usize) -> usize {
        if CHECKED {
            return self.turn.fetch_add(1, Relaxed) % self.shards;
        }
        HABITS.with(|habits| {
            let stayed = habits.stayed.get() + blocks;
            habits.stayed.set(stayed);
            if stayed > self.stay {
                habits.stayed.set(0);
                habits.home.set(habits.home.get().wrapping_add(1));
            }
            habits.home.get() % self.shards
        })
    }

    /// The thread's home was taken: it has another now.
    pub(super) fn move_by(shards: usize) {
        if !CHECKED && shards > 0 {
            HABITS.with(|habits| habits.home.set(habits.home.get().wrapping_add(shards)));
        }
    }

    /// A number for the calling thread, below `end`: threads that began one after the other have different ones.
    pub(crate) fn thread(end: usize) -> usize {
        if CHECKED { 0 } else { HABITS.with(|habits| habits.number % end) }
    }

    /// Where the thread found victims of a tier last.
    pub(super) fn victims(&self, tier: usize) -> usize {
        if CHECKED { 0 } else { HABITS.with(|habits| habits.victims[tier].get() % self.shards) }
    }

    pub(super) fn found_victims(tier: usize, shard: usize) {
        if !CHECKED {
            HABITS.with(|habits| habits.victims[tier].set(shard));
        }
    }

    /// Where the thread takes the next victims of a tier as well, where they are drawn, and how many: it stays for a while, so that not
    /// everything about a shard is far away each time.
    pub(super) fn stays_for_victims(&self, tier: usize) -> Option<(usize, usize)> {
        if CHECKED {
            return None;
        }
        let left = HABITS.with(|habits| habits.left[tier].get()).min(self.most_drawn[tier]);
        (left > 0).then(|| (self.victims(tier), left))
    }

    /// How many victims of a tier the thread takes from a shard that it drew, which has so many blocks without users.
    pub(super) fn most_drawn(&self, tier: usize, inactive: u64) -> usize {
        Self::most_victims(inactive).min(self.most_drawn[tier])
    }

    /// So many more it may take there.
    pub(super) fn may_take(tier: usize, left: usize) {
        if !CHECKED {
            HABITS.with(|habits| habits.left[tier].set(left));
        }
    }

    /// Most victims from a shard that has so many blocks without users, before it is asked again which shard it should be.
    pub(super) fn most_victims(inactive: u64) -> usize {
        ((inactive / PART) as usize).max(LEAST)
    }
}
