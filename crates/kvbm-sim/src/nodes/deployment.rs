//! Nodes, their processes, and what happens to them.

use super::agent::{SimAgent, move_piece};
use super::memory::Memory;
use super::network::{Event, Network};
use super::requests::OpenRead;
use super::server::{Found, RENEWAL, Server};
use super::{Counts, GROUP, NAMESPACE};
use kvbm_nixl::{
    Export, InProcessNetwork, NodeAnnouncement, NodeOptions, OwnAnnouncement, PeerChange, PeerWatch,
    RemoteAgent, RemoteNode,
};
use kvbm_plan::{Epoch, NodeId, SequenceHash, clock, deadline_after, simulation};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a lease holds without a renewal, and at most.
pub(super) const LEASE: Duration = Duration::from_secs(2);
const LONGEST_LEASE: Duration = Duration::from_secs(10);
/// How often a process looks for its peers.
const REFRESH: Duration = Duration::from_secs(2);
/// How often the rules are looked at.
const CHECK: Duration = Duration::from_millis(250);
/// A process that cannot be announced starts again after this.
const START_AGAIN: Duration = Duration::from_secs(1);

/// One process of a node.
pub(super) struct Life {
    pub(super) node: usize,
    pub(super) epoch: Epoch,
    pub(super) memory: Rc<Memory>,
    /// None of a process that has ended.
    pub(super) running: Option<Running>,
}

pub(super) struct Running {
    pub(super) remote: RemoteNode,
    _export: Export,
    watch: PeerWatch,
    /// What it announces; whether it still renews that, and whether it has been there.
    announced: Arc<[u8]>,
    keeps: bool,
    was_there: bool,
    /// What the server said last.
    found: Found,
    next_turn: Option<Instant>,
    /// Of the peers that it knows.
    epochs: BTreeMap<NodeId, Epoch>,
}

pub(super) struct DeploymentState {
    pub(super) lives: Vec<Life>,
    /// The newest process of each node.
    pub(super) current: Vec<Option<usize>>,
    pub(super) reads: Vec<Rc<OpenRead>>,
    /// When a reader was last seen to count on its lease of a process' block.
    pub(super) seen: BTreeMap<(usize, SequenceHash), Instant>,
    pub(super) checks: u64,
    pub(super) server: Server,
    pub(super) counts: Counts,
    epoch: u64,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Deployment {
    pub(super) network: Network,
    pub(super) state: Rc<RefCell<DeploymentState>>,
    agents: InProcessNetwork,
    /// Nothing goes wrong any more.
    pub(super) is_calm: Rc<Cell<bool>>,
}

impl Deployment {
    pub(super) fn new(network: Network, nodes: usize) -> Self {
        let state = DeploymentState {
            lives: Vec::new(),
            current: vec![None; nodes],
            reads: Vec::new(),
            seen: BTreeMap::new(),
            checks: 0,
            server: Server::default(),
            counts: Counts::default(),
            epoch: 0,
        };
        let (state, is_calm) = (Rc::new(RefCell::new(state)), Rc::default());
        Self { network, state, agents: InProcessNetwork::new(), is_calm }
    }

    pub(super) fn nodes(&self) -> usize {
        self.state.borrow().current.len()
    }

    /// Does the next thing that is due by then, or moves the clock.
    pub(super) fn go_on(&self, until: Instant) {
        match self.network.next(until) {
            Some(event) => self.happen(event),
            None => simulation::advance_to(until),
        }
    }

    fn happen(&self, event: Event) {
        self.state.borrow_mut().counts.events += 1;
        match event {
            Event::Deliver { life, from, message } => {
                let (is_dead, is_stopped) = self.network.with(|state| {
                    let process = &mut state.processes[life];
                    process.inbox.push(kvbm_nixl::Notification { from, message });
                    (process.is_dead, process.stopped_until.is_some())
                });
                if !is_dead && !is_stopped {
                    self.turn(life);
                }
            }
            Event::Turn { life } => {
                if let Some(running) = self.state.borrow_mut().lives[life].running.as_mut() {
                    running.next_turn = None;
                }
                if !self.is_stopped(life) {
                    self.turn(life);
                }
            }
            Event::Piece { transfer } => move_piece(&self.network, transfer),
            Event::Refresh { life } => {
                if !self.put_off(life, || Event::Refresh { life }) && self.refresh(life) {
                    self.network.with(|state| {
                        let jitter = state.random.duration(REFRESH / 4);
                        state.schedule(REFRESH.saturating_add(jitter), Event::Refresh { life });
                    });
                }
            }
            Event::Renew { life } => {
                if !self.put_off(life, || Event::Renew { life }) && self.renew(life) {
                    self.network.with(|state| state.schedule(RENEWAL, Event::Renew { life }));
                }
            }
            Event::Start { node } => self.start(node),
            Event::Resume { life } => {
                self.network.with(|state| {
                    let process = &mut state.processes[life];
                    (process.stopped_until, process.went_on) = (None, clock::now());
                });
                self.turn(life);
            }
            Event::Accident => self.accident(),
            Event::Check => {
                self.check();
                self.network.with(|state| state.schedule(CHECK, Event::Check));
            }
            Event::Heal => self.network.with(|state| state.cut = None),
            Event::ServerUp => self.state.borrow_mut().server.restart(),
        }
    }

    pub(super) fn is_stopped(&self, life: usize) -> bool {
        self.network.with(|state| state.processes[life].stopped_until.is_some())
    }

    /// What a stopped process would do, it does when it goes on.
    fn put_off(&self, life: usize, event: impl FnOnce() -> Event) -> bool {
        self.network.with(|state| match state.processes[life].stopped_until {
            Some(until) => {
                state.schedule_at(until, event());
                true
            }
            None => false,
        })
    }

    pub(super) fn remote(&self, life: usize) -> Option<RemoteNode> {
        self.state.borrow().lives[life].running.as_ref().map(|running| running.remote.clone())
    }

    pub(super) fn turn(&self, life: usize) {
        let Some(remote) = self.remote(life) else { return };
        let expired = remote.counts().leases_expired;
        let due = remote.turn();
        if remote.counts().leases_expired > expired {
            self.check_readers(life);
        }
        let Some(due) = due else { return };
        let mut state = self.state.borrow_mut();
        let Some(running) = state.lives[life].running.as_mut() else { return };
        if running.next_turn.is_none_or(|next| due < next) {
            running.next_turn = Some(due);
            self.network.with(|state| state.schedule_at(due, Event::Turn { life }));
        }
    }

    /// Whether a process reaches the discovery server.
    fn reaches_server(&self, node: usize) -> bool {
        !self.state.borrow().server.is_down
            && self.network.with(|state| state.cut.as_ref().is_none_or(|(sides, _)| !sides[node]))
    }

    /// Starts a process of a node.
    fn start(&self, node: usize) {
        if !self.reaches_server(node) {
            self.network.with(|state| state.schedule(START_AGAIN, Event::Start { node }));
            return;
        }
        let epoch = {
            let mut state = self.state.borrow_mut();
            state.epoch += 1;
            Epoch(state.epoch)
        };
        let name = format!("node-{}-{epoch}", node + 1);
        let life = self.network.with(|state| state.join(node, &name));
        let agent = self.agents.agent(&name).expect("a name that nobody has");
        let agent: Arc<dyn RemoteAgent> = Arc::new(SimAgent::new(self.network.clone(), life, agent));
        let mut options = NodeOptions::new(NodeId(node as u32 + 1), epoch);
        (options.lease, options.longest_lease, options.leases_per_peer) = (LEASE, LONGEST_LEASE, 16);
        let remote = RemoteNode::start(agent, options).expect("sound options");
        let memory = Rc::new(Memory::new(life % 3 == 0));
        let ranks = vec![memory.rank.clone()];
        // SAFETY: a slot that is held is not written: `Memory::reserve` takes no such slot.
        let export = unsafe { remote.export_source(NAMESPACE, GROUP, ranks, memory.source()) };
        let announcement = remote.announcement().expect("host memory");
        let announced: Arc<[u8]> = announcement.encode(None).expect("a sound announcement").into();
        let mut watch = PeerWatch::default();
        watch.publish(Arc::clone(&announced));
        let running = Running {
            remote,
            _export: export.expect("host memory"),
            watch,
            announced: Arc::clone(&announced),
            keeps: true,
            was_there: false,
            found: Found::default(),
            next_turn: None,
            epochs: BTreeMap::new(),
        };
        let mut state = self.state.borrow_mut();
        state.lives.push(Life { node, epoch, memory, running: Some(running) });
        state.current[node] = Some(life);
        state.counts.starts += 1;
        state.server.put(name_of(node), announced);
        self.network.with(|state| {
            let soon = state.random.duration(REFRESH);
            state.schedule(soon, Event::Refresh { life });
            state.schedule(RENEWAL, Event::Renew { life });
        });
    }

    /// Looks for peers, as `kvbm` does it. False of a process that has ended.
    fn refresh(&self, life: usize) -> bool {
        let node = self.state.borrow().lives[life].node;
        let is_reached = self.reaches_server(node);
        let mut state = self.state.borrow_mut();
        let DeploymentState { lives, server, .. } = &mut *state;
        let Some(running) = lives[life].running.as_mut() else { return false };
        if is_reached {
            running.found = server.values();
        }
        let found = Arc::clone(&running.found);
        match running.watch.own(&running.remote, &found) {
            OwnAnnouncement::Stands => {}
            OwnAnnouncement::Missing => {
                running.watch.publish(Arc::clone(&running.announced));
                (running.keeps, running.was_there) = (true, false);
                if is_reached {
                    server.put(name_of(node), Arc::clone(&running.announced));
                }
            }
            OwnAnnouncement::Taken => return true,
        }
        let changes = running.watch.look(&running.remote, &found);
        if changes.is_empty() {
            return true;
        }
        let is_gone = |peer: &NodeId| changes.contains(&PeerChange::Gone { peer: *peer });
        let epochs: BTreeMap<_, _> =
            running.remote.peers().iter().map(|peer| (peer.node, peer.epoch)).collect();
        for (peer, epoch) in &epochs {
            if running.epochs.get(peer).is_some_and(|known| known > epoch) && !is_gone(peer) {
                let known = running.epochs[peer];
                self.network.violate(|| {
                    format!("process {life} knew epoch {known} of node {peer} and went back to {epoch}")
                });
            }
        }
        running.epochs = epochs;
        true
    }

    /// Renews an announcement, as `kvbm-events` does it. False of a process that has ended.
    fn renew(&self, life: usize) -> bool {
        let node = self.state.borrow().lives[life].node;
        let is_reached = self.reaches_server(node);
        // Its renewal may be under way when it hears of another one.
        let is_blind = !self.is_calm.get() && self.network.with(|state| state.random.once_in(4));
        let mut state = self.state.borrow_mut();
        let DeploymentState { lives, server, .. } = &mut *state;
        let Some(running) = lives[life].running.as_mut() else { return false };
        if !is_reached || !running.keeps {
            return true;
        }
        let is_ours = server.get(&name_of(node)).is_none_or(|value| *value == running.announced);
        if is_ours || !running.was_there || is_blind {
            running.was_there = true;
            server.put(name_of(node), Arc::clone(&running.announced));
        } else {
            running.keeps = false;
        }
        true
    }

    /// Ends a process: it says nothing more.
    pub(super) fn kill(&self, life: usize) {
        self.network.with(|state| {
            state.processes[life].is_dead = true;
            state.processes[life].inbox.clear();
        });
        let (running, reads) = {
            let mut state = self.state.borrow_mut();
            let reads: Vec<_> = state.reads.extract_if(.., |read| read.life == life).collect();
            (state.lives[life].running.take(), reads)
        };
        drop((reads, running));
    }

    /// Something goes wrong somewhere, and later again.
    fn accident(&self) {
        if self.is_calm.get() {
            return;
        }
        let nodes = self.nodes();
        let (kind, node, time) = self.network.with(|state| {
            let often = Duration::from_secs(300) / nodes as u32;
            let next = state.random.duration(often.min(Duration::from_secs(2)) * 2);
            state.schedule(next, Event::Accident);
            (
                state.random.below(20),
                state.random.below(nodes),
                state.random.duration(Duration::from_secs(30)),
            )
        });
        match kind {
            0..8 => self.kill_node(node, time / 2),
            8..16 => self.stop_node(node, time),
            16..18 => self.cut_network(time),
            _ => self.lose_server(time),
        }
    }

    /// Ends the process of a node, and starts another one after `pause`.
    fn kill_node(&self, node: usize, pause: Duration) {
        let life = {
            let mut state = self.state.borrow_mut();
            state.counts.kills += 1;
            state.current[node].take()
        };
        if let Some(life) = life {
            self.kill(life);
            self.network.with(|network| network.schedule(pause, Event::Start { node }));
        }
    }

    /// Stops the process of a node for a time.
    fn stop_node(&self, node: usize, time: Duration) {
        let life = self.state.borrow().current[node];
        let Some(life) = life.filter(|life| !self.is_stopped(*life)) else { return };
        let counts = &mut self.state.borrow_mut().counts;
        counts.stops += 1;
        let until = deadline_after(clock::now(), time);
        self.network.with(|network| {
            network.processes[life].stopped_until = Some(until);
            network.processes[life].stops += 1;
            network.schedule_at(until, Event::Resume { life });
            // Somebody takes it for dead, and starts another one.
            if network.random.once_in(3) {
                counts.replaced += 1;
                network.schedule(time / 4, Event::Start { node });
            }
        });
    }

    /// Cuts the network in two for a time, unless it is cut already.
    fn cut_network(&self, time: Duration) {
        let nodes = self.nodes();
        let counts = &mut self.state.borrow_mut().counts;
        self.network.with(|network| {
            if network.cut.is_none() {
                counts.cuts += 1;
                let one_in = 3 + network.random.below(20);
                let sides = (0..nodes).map(|_| network.random.once_in(one_in)).collect();
                network.cut = Some((sides, deadline_after(clock::now(), time)));
                network.schedule(time, Event::Heal);
            }
        });
    }

    /// Takes the server away for a time, unless it is gone already.
    fn lose_server(&self, time: Duration) {
        let mut state = self.state.borrow_mut();
        if !state.server.is_down {
            state.counts.server_losses += 1;
            state.server.is_down = true;
            self.network.with(|network| network.schedule(time, Event::ServerUp));
        }
    }
}

fn name_of(node: usize) -> String {
    NodeAnnouncement::name_of(NodeId(node as u32 + 1))
}
