//! What the parts of the policy share, one for each shard: what is remembered of blocks that are gone, what blocks are worth, the clock, and
//! the trials. Nobody waits for anybody here: there are numbers that are read and written as a whole, each a guess or a count, and leaf
//! locks for what is rare.

use super::history::History;
use super::leaves::Spare;
use super::model::{self, Seen, Worth};
use super::trial::{Rate, Trial};
use super::{HISTORY, LONG_HISTORY, OLDEST, UNITS, USES_PER_LOOK, class_of};
use crate::core::homes::Homes;
use crate::policy::{BlockMemory, RequestPart};
use crate::sync::Leaf;
use crate::tier::TIERS;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Threads whose requests are told apart, where there are several parts; further ones share.
const REQUESTS: usize = 16;

pub(super) struct Common {
    pub capacity: [usize; TIERS],
    pub seed: u64,
    /// Slots of the largest tier.
    pub largest: usize,
    /// How many blocks used make a unit of time, as a power of two.
    pub unit_shift: u32,
    pub history: History,
    pub worth: Worth,
    pub trials: [Option<Trial>; TIERS],
    /// What the parts saw; where there is one, it has that itself.
    pub seen: Option<Leaf<Seen>>,
    /// Room for leaves that no part needs now.
    pub spare: Spare,
    requests: Box<[Request]>,
    clock: Clock,
}

/// Blocks used so far, and when something is due.
#[derive(Default)]
#[repr(align(128))]
struct Clock {
    uses: AtomicU64,
    next_look: AtomicU64,
    next_fade: AtomicU64,
    next_fit: AtomicU64,
}

/// The request of a thread that is under way.
#[derive(Default)]
#[repr(align(128))]
struct Request {
    /// Its blocks so far: they count as used when it is over.
    pending: AtomicU64,
    /// Whether its blocks are those that are there, so far.
    in_use: AtomicBool,
    drawn: Leaf<Drawn>,
}

/// Blocks of a request that are in the sample of some trial: those that were not played yet, and whether there was any.
#[derive(Default)]
struct Drawn {
    blocks: Vec<(u64, BlockMemory)>,
    any: bool,
}

/// So many of them are played in one hold: what another thread has changed of a trial is far.
const AT_ONCE: usize = 32;

impl Common {
    /// For tiers of `capacity` slots, in so many parts.
    pub(super) fn new(capacity: [usize; TIERS], seed: u64, parts: usize) -> Self {
        let largest = capacity.into_iter().max().unwrap_or(0);
        let requests = if parts == 1 { 1 } else { REQUESTS };
        let clock = Clock::default();
        clock.next_fade.store(fade_every(largest), Relaxed);
        Self {
            capacity,
            seed,
            largest,
            unit_shift: (largest / UNITS).max(1).ilog2(),
            history: History::new((HISTORY * largest).min(LONG_HISTORY).max(largest / 2)),
            worth: Worth::new(),
            trials: capacity.map(|slots| (slots > 0).then(|| Trial::new(slots, seed, requests))),
            seen: (parts > 1).then(|| Leaf::new(Seen::new())),
            spare: Spare::default(),
            requests: (0..requests).map(|_| Request::default()).collect(),
            clock,
        }
    }

    #[inline]
    pub(super) fn uses(&self) -> u64 {
        self.clock.uses.load(Relaxed)
    }

    /// The time, in units. It wraps.
    #[inline]
    pub(super) fn now(&self) -> u16 {
        (self.uses() >> self.unit_shift) as u16
    }

    /// Uses of blocks, in units of time.
    #[inline]
    pub(super) fn time(&self, uses: u64) -> f32 {
        uses as f32 / (1_u64 << self.unit_shift) as f32
    }

    /// Number of the calling thread's request.
    #[inline]
    fn request(&self) -> usize {
        if self.requests.len() == 1 { 0 } else { Homes::thread(self.requests.len()) }
    }

    /// So many blocks of a request come. What was used and then registered behind that is one request.
    pub(super) fn begin(&self, continues: bool, part: RequestPart, blocks: usize) {
        let number = self.request();
        let request = &self.requests[number];
        if part == RequestPart::Used || !request.in_use.load(Relaxed) || !continues {
            // A request's blocks count as used when it is over: until then the blocks of others have rested only as long as they
            // were seen to rest.
            self.clock.uses.fetch_add(request.pending.swap(0, Relaxed), Relaxed);
            self.end(number);
        }
        request.pending.fetch_add(blocks as u64, Relaxed);
        request.in_use.store(part == RequestPart::Used, Relaxed);
    }

    /// A block of the calling thread's request is used: both ways of choosing victims show whether they would have had it. With one part that
    /// is now, else before the next request of the thread begins.
    #[inline]
    pub(super) fn try_both(&self, tag: u64, memory: BlockMemory) {
        if !self.trials.iter().flatten().any(|trial| trial.draws(tag)) {
            return;
        }
        if self.seen.is_none() {
            return self.play(0, &[(tag, memory)], false);
        }
        let number = self.request();
        let mut drawn = self.requests[number].drawn.lock();
        drawn.any = true;
        drawn.blocks.push((tag, memory));
        if drawn.blocks.len() >= AT_ONCE {
            let mut blocks = std::mem::take(&mut drawn.blocks);
            drop(drawn);
            self.play(number, &blocks, false);
            blocks.clear();
            self.requests[number].drawn.lock().blocks = blocks;
        }
    }

    /// The request with this number is over.
    fn end(&self, number: usize) {
        // With one part requests without a block in a sample count as well: they cost no other thread anything.
        if self.seen.is_none() {
            return self.play(0, &[], true);
        }
        let mut drawn = std::mem::take(&mut *self.requests[number].drawn.lock());
        if drawn.any {
            self.play(number, &drawn.blocks, true);
            drawn.blocks.clear();
        }
        self.requests[number].drawn.lock().blocks = drawn.blocks;
    }

    /// Plays the next blocks of a request; then it is over, perhaps.
    fn play(&self, number: usize, blocks: &[(u64, BlockMemory)], is_over: bool) {
        let now = self.now();
        let rate = |memory: BlockMemory| {
            let age = now.wrapping_sub(memory.time).min(OLDEST);
            Rate { worth: self.worth.of(class_of(memory), age), age }
        };
        for trial in self.trials.iter().flatten() {
            let mut drawn = blocks.iter().copied().filter(|&(tag, _)| trial.draws(tag)).peekable();
            if is_over || drawn.peek().is_some() {
                trial.play(number, drawn, is_over, rate);
            }
        }
    }

    /// What is kept of a block has changed.
    pub(super) fn changed(&self, tag: u64, memory: BlockMemory) {
        for trial in self.trials.iter().flatten().filter(|trial| trial.draws(tag)) {
            trial.changed(tag, memory);
        }
    }

    /// Sets of the history that are to be looked at: each of them once in [`every`](Self::every) uses.
    pub(super) fn due_sets(&self) -> impl Iterator<Item = usize> {
        let sets = self.history.sets();
        due(&self.clock.next_look, self.uses(), USES_PER_LOOK).map(move |look| (look as usize + 1) % sets)
    }

    /// Uses between two looks at a set of the history.
    pub(super) fn every(&self) -> u64 {
        self.history.sets() as u64 * USES_PER_LOOK
    }

    /// Whether it is time for old observations to fade.
    pub(super) fn is_time_to_fade(&self) -> bool {
        let (uses, next) = (self.uses(), self.clock.next_fade.load(Relaxed));
        let then = uses + fade_every(self.largest);
        next < uses && self.clock.next_fade.compare_exchange(next, then, Relaxed, Relaxed).is_ok()
    }

    /// Uses between two steps of fitting.
    pub(super) fn fit_every(&self) -> u64 {
        (fade_every(self.largest) / model::CLASSES as u64).max(16)
    }

    /// Classes whose worth is to be brought up to date.
    pub(super) fn due_classes(&self) -> impl Iterator<Item = usize> {
        let fits = due(&self.clock.next_fit, self.uses(), self.fit_every());
        fits.map(|fit| fit as usize % model::CLASSES)
    }
}

fn fade_every(largest: usize) -> u64 {
    (largest as u64).max(4096)
}

/// Numbers of what is due each `every` uses, for the caller alone to do.
fn due(next: &AtomicU64, uses: u64, every: u64) -> std::ops::Range<u64> {
    let from = next.load(Relaxed);
    if from >= uses {
        return 0..0;
    }
    let count = (uses - from).div_ceil(every);
    match next.compare_exchange(from, from + count * every, Relaxed, Relaxed) {
        Ok(_) => from / every..from / every + count,
        // Another thread does it.
        Err(_) => 0..0,
    }
}
