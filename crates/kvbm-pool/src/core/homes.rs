//! Where a thread puts new blocks, and where it looks for victims first.
//!
//! A thread stays in a shard for some time, so that the shard's lock and the ends of its queues stay in its core's cache, and
//! then goes on to the next one, so that no shard has the oldest blocks alone: two threads that evict have two to evict from.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Times that a thread goes through all shards while it registers as many blocks as the largest tier has.
const ROUNDS: usize = 4;

/// Times that a thread goes on to another shard for victims that are drawn, while it stays in one to register.
const STAYS: usize = 8;

#[cfg_attr(
    any(kvbm_loom, kvbm_shuttle),
    allow(dead_code, reason = "a model's threads are one thread to the system")
)]
struct Habits {
    number: usize,
    home: Cell<usize>,
    /// Blocks that came there.
    stayed: Cell<usize>,
    victims: Cell<usize>,
    /// Blocks that were evicted there.
    evicted: Cell<usize>,
}

/// Number of the next thread that asks.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HABITS: Habits = {
        let number = THREADS.fetch_add(1, Relaxed);
        Habits { number, home: Cell::new(number), stayed: Cell::new(0), victims: Cell::new(number), evicted: Cell::new(0) }
    };
}

pub(crate) struct Homes {
    /// Blocks after which a thread goes on.
    stay: usize,
    shards: usize,
    /// Under a model checker everybody goes on each time, in turn.
    turn: AtomicUsize,
}

const CHECKED: bool = cfg!(any(kvbm_loom, kvbm_shuttle));

impl Homes {
    pub(super) fn new(largest: usize, shards: usize) -> Self {
        Self { stay: largest / (ROUNDS * shards.max(1)), shards: shards.max(1), turn: AtomicUsize::new(0) }
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

    /// Where the thread found victims last.
    pub(super) fn victims(&self) -> usize {
        if CHECKED { 0 } else { HABITS.with(|habits| habits.victims.get() % self.shards) }
    }

    pub(super) fn found_victims(shard: usize) {
        if !CHECKED {
            HABITS.with(|habits| habits.victims.set(shard));
        }
    }

    /// Where the thread takes the next `want` victims as well, where they are drawn: it stays for a while, so that not everything about a
    /// shard is far away each time.
    pub(super) fn stays_for_victims(&self, want: usize) -> Option<usize> {
        if CHECKED {
            return None;
        }
        HABITS.with(|habits| {
            let evicted = habits.evicted.get() + want;
            let stays = evicted <= self.stay / STAYS;
            habits.evicted.set(if stays { evicted } else { 0 });
            stays.then(|| habits.victims.get() % self.shards)
        })
    }
}
