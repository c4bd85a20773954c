//! Many nodes that read from each other, under one seed.
//!
//! Announcements, their import, epochs, look-ups, leases, plans, digests and verified reads are the
//! product's. The clock, the network, the memory of a node and the server on which nodes find each
//! other are models. One request of the whole deployment waits at a time; leases overlap.

mod agent;
mod deployment;
mod memory;
mod network;
mod requests;
mod server;

use crate::run::{Outcome, beginning, take_panic};
use deployment::Deployment;
use kvbm_plan::simulation::{self, Hooks, Planted};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, clock};
use network::{Event, Network};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
const GROUP: GroupId = GroupId(0);

/// Pause between two things that nodes do, on the average half of it.
const PAUSE: Duration = Duration::from_millis(4);

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct NodesRun {
    /// Decides everything.
    pub seed: u64,
    /// How many nodes.
    pub nodes: usize,
    /// Simulated seconds.
    pub seconds: u64,
    /// A bug that the run must find.
    pub planted: Option<Planted>,
    /// Prints everything that happens.
    pub trace: bool,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Everything.
    pub events: u64,
    /// Messages between nodes.
    pub messages: u64,
    /// Blocks that nodes computed.
    pub computed: u64,
    /// Look-ups that found a block at a peer.
    pub found: u64,
    /// Leases that readers got.
    pub leases: u64,
    /// Blocks that were read, verified and served.
    pub blocks: u64,
    /// Reads that ended with a lease.
    pub lapsed: u64,
    /// Reads that found wrong bits.
    pub damaged: u64,
    /// Reads that failed or were late.
    pub failed: u64,
    /// Processes that started.
    pub starts: u64,
    /// Processes that were killed.
    pub kills: u64,
    /// Processes that were stopped for a while.
    pub stops: u64,
    /// Those that another one replaced meanwhile.
    pub replaced: u64,
    /// Times that some nodes were cut off from the others.
    pub cuts: u64,
    /// Times that the discovery server was away and lost what it knew.
    pub server_losses: u64,
}

impl NodesRun {
    /// Runs it on this thread, which should be a new one.
    pub fn run(self) -> (Outcome, Counts) {
        let deployment: Rc<RefCell<Option<Deployment>>> = Rc::default();
        let played = Rc::clone(&deployment);
        let go_on = move |until| {
            let deployment = played.borrow().clone();
            match deployment {
                Some(deployment) => deployment.go_on(until),
                None => simulation::advance_to(until),
            }
        };
        let planted = self.planted;
        simulation::begin(Hooks { now: beginning(), epoch: Epoch(1000), planted, world: Rc::new(go_on) });
        let network = Network::new(self.seed, self.trace);
        let of_run = Deployment::new(network.clone(), self.nodes);
        deployment.replace(Some(of_run.clone()));
        let ended = catch_unwind(AssertUnwindSafe(|| self.drive(&of_run)));
        if ended.is_err() {
            network.violate(|| format!("panic: {}", take_panic().unwrap_or_default()));
        }
        let messages = network.with(|state| state.messages);
        let counts = Counts { messages, ..of_run.state.borrow().counts };
        // What ends now ends without a world.
        deployment.replace(None);
        let lives = of_run.state.borrow().lives.len();
        (0..lives).for_each(|life| of_run.kill(life));
        network.clear();
        simulation::end();
        let outcome = Outcome {
            seed: self.seed,
            steps: counts.events,
            violation: network.violation(),
            digest: network.digest(),
        };
        (outcome, counts)
    }

    fn drive(self, deployment: &Deployment) {
        let network = &deployment.network;
        network.with(|state| {
            for node in 0..self.nodes {
                let soon = state.random.duration(Duration::from_secs(3));
                state.schedule(soon, Event::Start { node });
            }
            state.schedule(Duration::from_secs(8), Event::Accident);
            state.schedule(Duration::ZERO, Event::Check);
        });
        let begun = clock::now();
        while clock::now().saturating_duration_since(begun) < Duration::from_secs(self.seconds) {
            deployment.wait(network.with(|state| state.random.duration(PAUSE)));
            deployment.act();
            if network.violation().is_some() {
                return;
            }
        }
        deployment.is_calm.set(true);
        network.with(|state| state.is_tame = true);
        // Longer than anything that has gone wrong.
        deployment.wait(Duration::from_secs(40));
        deployment.check_end();
    }
}
