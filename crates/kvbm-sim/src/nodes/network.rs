//! What passes between processes: messages, reads of memory, and the order of everything that
//! happens.

use super::agent::Transfer;
use crate::random::Random;
use kvbm_nixl::Notification;
use kvbm_plan::{clock, deadline_after, simulation};
use parking_lot::Mutex;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is going to happen. A life is one process of a node.
#[derive(Debug)]
pub(super) enum Event {
    /// A message reaches a process.
    Deliver { life: usize, from: String, message: Vec<u8> },
    /// A process looks after its leases.
    Turn { life: usize },
    /// One range of a transfer moves.
    Piece { transfer: u64 },
    /// A process looks for its peers.
    Refresh { life: usize },
    /// A process renews its announcement.
    Renew { life: usize },
    /// A node starts.
    Start { node: usize },
    /// A stopped process goes on.
    Resume { life: usize },
    /// Something goes wrong.
    Accident,
    /// The rules are looked at.
    Check,
    /// Nodes that could not reach each other can again.
    Heal,
    /// The discovery server is back; it has lost what it knew.
    ServerUp,
}

/// A process, as the network sees it.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) node: usize,
    pub(super) is_dead: bool,
    pub(super) stopped_until: Option<Instant>,
    /// When it went on last, and how often it was stopped during the call under way.
    pub(super) went_on: Instant,
    pub(super) stops: u32,
    /// Times that its messages take longer than those of others.
    pub(super) slowness: u32,
    pub(super) inbox: Vec<Notification>,
}

pub(super) struct NetworkState {
    events: BTreeMap<(Instant, u64), Event>,
    scheduled: u64,
    pub(super) random: Random,
    digest: DefaultHasher,
    pub(super) processes: Vec<Process>,
    /// By the name of the agent.
    names: HashMap<String, usize>,
    /// When the last message of a pair arrives: they keep their order.
    order: HashMap<(usize, usize), Instant>,
    pub(super) transfers: BTreeMap<u64, Transfer>,
    /// By node, which side of a cut it is on, and when the cut ends.
    pub(super) cut: Option<(Vec<bool>, Instant)>,
    /// Bits flip, messages get lost.
    pub(super) is_tame: bool,
    /// A transfer that was looked at since had wrong bits.
    pub(super) damage_seen: bool,
    pub(super) messages: u64,
    trace: bool,
    violation: Option<String>,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Network(Arc<Mutex<NetworkState>>);

/// How long a message takes at most, on a good day.
const LATENCY: Duration = Duration::from_millis(1);

impl Network {
    pub(super) fn new(seed: u64, trace: bool) -> Self {
        Self(Arc::new(Mutex::new(NetworkState {
            events: BTreeMap::new(),
            scheduled: 0,
            random: Random::new(seed),
            digest: DefaultHasher::new(),
            processes: Vec::new(),
            names: HashMap::new(),
            order: HashMap::new(),
            transfers: BTreeMap::new(),
            cut: None,
            is_tame: false,
            damage_seen: false,
            messages: 0,
            trace,
            violation: None,
        })))
    }

    /// Looks at the state. Calls of the product are not allowed meanwhile.
    pub(super) fn with<R>(&self, look: impl FnOnce(&mut NetworkState) -> R) -> R {
        look(&mut self.0.lock())
    }

    /// A rule is broken; the first one counts.
    pub(super) fn violate(&self, rule: impl FnOnce() -> String) {
        self.with(|state| {
            if state.violation.is_none() {
                let rule = rule();
                state.note(|| format!("VIOLATION {rule}"));
                state.violation = Some(rule);
            }
        });
    }

    pub(super) fn violation(&self) -> Option<String> {
        self.with(|state| state.violation.clone())
    }

    pub(super) fn digest(&self) -> u64 {
        self.with(|state| state.digest.finish())
    }

    /// Takes the next thing that happens until then, and moves the clock to it.
    pub(super) fn next(&self, until: Instant) -> Option<Event> {
        let (time, event) = self.with(|state| {
            let first = state.events.first_entry().filter(|first| first.key().0 <= until)?;
            let ((time, _), event) = first.remove_entry();
            state.note(|| format!("{event:?}"));
            Some((time, event))
        })?;
        simulation::advance_to(time);
        Some(event)
    }

    /// Ends a process, or the simulation: what is left of it is dropped outside the lock.
    pub(super) fn clear(&self) {
        let left =
            self.with(|state| (std::mem::take(&mut state.transfers), std::mem::take(&mut state.events)));
        drop(left);
    }

    /// A stopped process does nothing: this returns when it goes on.
    pub(super) fn wait_while_stopped(&self, life: usize) {
        loop {
            let until = self.with(|state| state.processes[life].stopped_until);
            match until.filter(|until| clock::now() < *until) {
                Some(until) => simulation::wait_until(until, || false),
                None => return,
            };
        }
    }
}

impl NetworkState {
    pub(super) fn note(&mut self, what: impl FnOnce() -> String) {
        self.scheduled.hash(&mut self.digest);
        if self.trace {
            eprintln!("{:?} {}", clock::now(), what());
        }
    }

    pub(super) fn schedule(&mut self, delay: Duration, event: Event) {
        self.schedule_at(deadline_after(clock::now(), delay), event);
    }

    pub(super) fn schedule_at(&mut self, time: Instant, event: Event) {
        self.scheduled += 1;
        self.events.insert((time.max(clock::now()), self.scheduled), event);
    }

    /// A new process of a node; its number.
    pub(super) fn join(&mut self, node: usize, name: &str) -> usize {
        let slowness = if self.random.once_in(50) { 400 } else { 1 };
        self.processes.push(Process {
            node,
            is_dead: false,
            stopped_until: None,
            went_on: clock::now(),
            stops: 0,
            slowness,
            inbox: Vec::new(),
        });
        let life = self.processes.len() - 1;
        self.names.insert(name.to_owned(), life);
        life
    }

    pub(super) fn life_of(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    /// When two processes reach each other again, where they do not now.
    pub(super) fn cut_between(&self, one: usize, other: usize) -> Option<Instant> {
        let (sides, until) = self.cut.as_ref()?;
        let side = |life: usize| sides[self.processes[life].node];
        (side(one) != side(other)).then_some(*until)
    }

    pub(super) fn latency(&mut self, one: usize, other: usize) -> Duration {
        let slowness = self.processes[one].slowness.max(self.processes[other].slowness);
        self.random.duration(LATENCY) * slowness
    }

    /// Sends a message, which may be lost.
    pub(super) fn send(&mut self, from: usize, name: &str, to: usize, message: &[u8]) {
        let is_lost = !self.is_tame && self.random.once_in(2000);
        if self.processes[from].is_dead || self.processes[to].is_dead || is_lost {
            return;
        }
        let mut time = deadline_after(clock::now(), self.latency(from, to));
        if let Some(healed) = self.cut_between(from, to) {
            if self.random.once_in(2) {
                return;
            }
            // It was on its way when the cut began.
            time = deadline_after(healed, self.latency(from, to));
        }
        let last = self.order.get(&(from, to)).copied().unwrap_or(time);
        let time = time.max(last);
        self.order.insert((from, to), time);
        self.messages += 1;
        let message = Event::Deliver { life: to, from: name.to_owned(), message: message.to_vec() };
        self.schedule_at(time, message);
    }
}
