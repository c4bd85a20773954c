//! One seed from the first step to the last.

use crate::bench::{Engine, Living};
use crate::named::NamedBlocks;
use crate::owned::OwnedBlocks;
use crate::plan::Setup;
use crate::world::{World, WorldState};
use kvbm_plan::Epoch;
use kvbm_plan::simulation::{self, Hooks, Planted};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct SeedRun {
    /// Decides everything.
    pub seed: u64,
    /// Steps at most.
    pub steps: u64,
    /// A bug that the run must find.
    pub planted: Option<Planted>,
    /// Prints every step.
    pub trace: bool,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Steps that were done.
    pub steps: u64,
    /// The first broken rule.
    pub violation: Option<String>,
    /// Of everything that was said and done: equal for equal runs.
    pub digest: u64,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Notes panics of simulating threads: the leader catches those of its parts and goes on.
pub fn note_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANIC.with_borrow_mut(|panic| {
            panic.get_or_insert_with(|| info.to_string());
        });
    }));
}

/// Simulated clocks begin in the past, so that no real wait lasts until a simulated deadline.
pub(crate) fn beginning() -> Instant {
    static BEGINNING: OnceLock<Instant> = OnceLock::new();
    let long_ago = Duration::from_secs(10 * 365 * 24 * 3600);
    *BEGINNING.get_or_init(|| Instant::now().checked_sub(long_ago).unwrap_or_else(Instant::now))
}

impl SeedRun {
    /// Runs it on this thread, which should be a new one: what the standard library draws at random
    /// depends on what the thread has drawn before.
    pub fn run(self) -> Outcome {
        let setup = Setup::of(self.seed);
        let living = Living::default();
        let (planted, threads) = (self.planted, living.clone());
        let world: Rc<RefCell<Option<World>>> = Rc::default();
        let played = Rc::clone(&world);
        let go_on = move |until: Instant| {
            let world = played.borrow().clone();
            match world {
                Some(world) => world.go_on(until, Some(&threads)),
                None => simulation::advance_to(until),
            }
        };
        simulation::begin(Hooks { now: beginning(), epoch: Epoch(1000), planted, world: Rc::new(go_on) });
        let disk = (setup.blocks[2], setup.disk_slack);
        let of_run = World::new(self.seed, setup.ranks, disk, setup.volume, setup.faults, self.trace);
        world.replace(Some(of_run.clone()));
        of_run.note(|| format!("seed {}: {setup:?}", self.seed));
        let ended = catch_unwind(AssertUnwindSafe(|| self.drive(&of_run, setup, living.clone())));
        if ended.is_err() {
            of_run.violate(format!("panic: {}", take_panic().unwrap_or_default()));
        }
        living.end();
        world.replace(None);
        simulation::end();
        let steps = of_run.with(|state| state.step);
        let (violation, digest) = (of_run.violation(), of_run.digest_value());
        // Lines hold what holds the world.
        of_run.with(WorldState::disconnect);
        Outcome { seed: self.seed, steps, violation, digest }
    }

    fn drive(self, world: &World, setup: Setup, living: Living) {
        let world_of_engine = world.clone();
        let mut engine: Box<dyn Engine> = if setup.names_blocks {
            Box::new(NamedBlocks::new(world_of_engine, setup, self.seed, living))
        } else {
            Box::new(OwnedBlocks::new(world_of_engine, setup, self.seed, living))
        };
        for step in 1..=self.steps {
            world.with(|state| state.step = step);
            engine.step();
            engine.check();
            if let Some(panic) = take_panic() {
                world.violate(format!("panic: {panic}"));
            }
            if world.violation().is_some() {
                engine.drop_all();
                return;
            }
        }
        engine.check_end();
        if let Some(panic) = take_panic() {
            world.violate(format!("panic: {panic}"));
        }
    }
}

pub(crate) fn take_panic() -> Option<String> {
    PANIC.take()
}
