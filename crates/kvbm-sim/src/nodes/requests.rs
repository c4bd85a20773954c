//! What nodes do: they compute blocks, look for those of others, and read them under leases.

use super::deployment::{Deployment, DeploymentState, LEASE, Life};
use super::memory::{CHAIN, Memory, SLOTS, hash};
use super::{GROUP, NAMESPACE};
use kvbm_nixl::{RemoteBlocks, RemoteError, RemoteNode};
use kvbm_plan::{NodeId, SequenceHash, clock, deadline_after, simulation};
use std::any::Any;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Peers that a look-up asks.
const ASKED: usize = 8;
const FIND: Duration = Duration::from_millis(50);
const ASK: Duration = Duration::from_millis(100);
const READ: Duration = Duration::from_millis(500);
/// The bytes of all blocks are looked at in every so many checks.
const BYTES_CHECK: u64 = 16;
/// What a call may take beyond its deadline.
const SLACK: Duration = Duration::from_millis(10);

/// Blocks that a process holds on a peer.
pub(super) struct OpenRead {
    /// The reader.
    pub(super) life: usize,
    owner: usize,
    blocks: RemoteBlocks,
    hashes: Vec<SequenceHash>,
}

/// A process that does something.
struct Actor {
    life: usize,
    remote: RemoteNode,
    memory: Rc<Memory>,
}

impl Deployment {
    /// One node does something.
    pub(super) fn act(&self) {
        let nodes = self.nodes();
        let (node, what) = self.network.with(|state| (state.random.below(nodes), state.random.below(20)));
        let Some(life) = self.state.borrow().current[node].filter(|life| !self.is_stopped(*life)) else {
            return;
        };
        let Some(remote) = self.remote(life) else { return };
        let memory = Rc::clone(&self.state.borrow().lives[life].memory);
        let actor = Actor { life, remote, memory };
        match what {
            0..6 => self.compute(&actor),
            6..13 => self.look_up(&actor),
            _ => self.read_some(),
        }
    }

    fn random(&self, end: usize) -> usize {
        self.network.with(|state| state.random.below(end))
    }

    /// Computes the first blocks of a chain, in place of what nobody uses.
    fn compute(&self, actor: &Actor) {
        let (chain, length) = (self.random(self.chains()) as u32, 1 + self.random(CHAIN as usize));
        let Some(reserved) = actor.memory.reserve(length, self.random(SLOTS as usize)) else { return };
        for (at, slot) in reserved.which.iter().enumerate() {
            actor.memory.fill(*slot, hash(chain, at as u32));
        }
        self.state.borrow_mut().counts.computed += length as u64;
    }

    fn chains(&self) -> usize {
        self.nodes() / 4 + 2
    }

    /// Asks peers for a chain, and has the best one hold it.
    fn look_up(&self, actor: &Actor) {
        let peers = actor.remote.peers();
        if peers.is_empty() || self.state.borrow().reads.len() > 2 * self.nodes() {
            return;
        }
        let asked: Vec<NodeId> = (0..ASKED).map(|_| peers[self.random(peers.len())].node).collect();
        let chain = self.chain_of(&asked);
        let hashes: Vec<_> = (0..CHAIN).map(|at| hash(chain, at)).collect();
        let find = deadline_after(clock::now(), FIND);
        let found = actor.remote.find(&asked, NAMESPACE, GROUP, &hashes, find);
        self.check_time(actor.life, find, "a look-up");
        let best =
            found.into_iter().filter_map(|(node, found)| Some((node, found.filter(|found| *found > 0)?)));
        let Some((owner, _)) = best.max_by_key(|(_, found)| *found) else { return };
        self.state.borrow_mut().counts.found += 1;
        if let Some(read) = self.hold(actor, owner, &hashes) {
            self.state.borrow_mut().reads.push(Rc::new(read));
        }
    }

    /// A chain that one of these nodes is likely to have.
    fn chain_of(&self, nodes: &[NodeId]) -> u32 {
        let (any, first) = (self.random(self.chains()) as u32, self.random(SLOTS as usize));
        let state = self.state.borrow();
        let lives = nodes.iter().filter_map(|node| state.current[node.0 as usize - 1]);
        lives.filter_map(|life| state.lives[life].memory.any_chain(first)).next().unwrap_or(any)
    }

    /// Has a peer hold blocks.
    fn hold(&self, actor: &Actor, owner: NodeId, hashes: &[SequenceHash]) -> Option<OpenRead> {
        let ranks = std::slice::from_ref(&actor.memory.rank);
        let plans = actor.remote.plan_reads(owner, NAMESPACE, GROUP, ranks).ok()?;
        let agent = actor.remote.peers().iter().find(|peer| peer.node == owner)?.agent.clone();
        let until = deadline_after(clock::now(), ASK);
        let held = actor.remote.get_remote_blocks_immutable(&plans, hashes, until);
        self.check_time(actor.life, until, "a question for blocks");
        // Whoever was killed meanwhile has nothing any more.
        let is_alive = self.remote(actor.life).is_some();
        match held {
            Ok(blocks) if is_alive && !blocks.is_empty() => {
                self.state.borrow_mut().counts.leases += 1;
                let owner = self.network.with(|state| state.life_of(&agent))?;
                // It renews the lease.
                self.turn(actor.life);
                let hashes = hashes[..blocks.len()].to_vec();
                Some(OpenRead { life: actor.life, owner, blocks, hashes })
            }
            _ => None,
        }
    }

    /// Reads some blocks that are held, by any node.
    fn read_some(&self) {
        let count = self.state.borrow().reads.len();
        if count == 0 {
            return;
        }
        let read = Rc::clone(&self.state.borrow().reads[self.random(count)]);
        if self.is_stopped(read.life) {
            return;
        }
        self.read(&read);
        if self.random(3) == 0 {
            let is_it = |other: &mut Rc<OpenRead>| Rc::ptr_eq(other, &read);
            let given_back: Vec<_> = self.state.borrow_mut().reads.extract_if(.., is_it).collect();
            drop(given_back);
        }
    }

    /// Reads blocks that are held, where there is room for them.
    fn read(&self, read: &OpenRead) {
        let memory = Rc::clone(&self.state.borrow().lives[read.life].memory);
        let Some(reserved) = memory.reserve(read.hashes.len(), self.random(SLOTS as usize)) else {
            return;
        };
        let slots = reserved.which.clone();
        let claim: Arc<dyn Any + Send + Sync> = Arc::new(reserved);
        let until = deadline_after(clock::now(), READ);
        self.network.with(|state| state.damage_seen = false);
        // SAFETY: the slots are reserved until `claim` is dropped.
        let arrived = unsafe { read.blocks.read_into(&slots, &claim, until) }.expect("as many slots");
        self.check_time(read.life, until, "a read");
        if self.remote(read.life).is_none() {
            return;
        }
        let counts = &mut self.state.borrow_mut().counts;
        for (slot, hash) in slots.iter().zip(&read.hashes).take(arrived.blocks) {
            if !memory.is_right(*slot, hash) {
                self.network.violate(|| {
                    format!("process {} serves wrong bytes of {hash} from process {}", read.life, read.owner)
                });
            }
            memory.register(*slot, *hash);
            counts.blocks += 1;
        }
        match &arrived.failure {
            None => {}
            Some(RemoteError::Corrupt { hash, .. }) => {
                counts.damaged += 1;
                if !self.network.with(|state| state.damage_seen) {
                    self.network.violate(|| {
                        let (life, owner) = (read.life, read.owner);
                        format!("block {hash} of process {owner} changed under the lease of process {life}")
                    });
                }
            }
            Some(RemoteError::LeaseEnded { .. }) => counts.lapsed += 1,
            Some(_) => counts.failed += 1,
        }
    }

    /// A call has to be over by its deadline, unless its process was stopped.
    fn check_time(&self, life: usize, until: Instant, what: &str) {
        let late = clock::now().saturating_duration_since(until);
        let was_stopped = self.network.with(|state| state.processes[life].stops > 0);
        if late > SLACK && !was_stopped {
            self.network.violate(|| format!("{what} of process {life} ends {late:?} after its deadline"));
        }
        self.network.wait_while_stopped(life);
        self.network.with(|state| {
            let process = &mut state.processes[life];
            process.stops = u32::from(process.stopped_until.is_some());
        });
    }

    /// An owner has ended leases: no reader counts on them.
    pub(super) fn check_readers(&self, owner: usize) {
        let state = self.state.borrow();
        let is_theirs = |read: &&Rc<OpenRead>| read.owner == owner && read.blocks.is_held();
        for read in state.reads.iter().filter(is_theirs) {
            self.check_lease(read, &state.lives[owner]);
        }
    }

    /// While a reader counts on its lease, the owner keeps the blocks in place.
    fn check_lease(&self, read: &OpenRead, owner: &Life) {
        let is_ended = |hash: &&SequenceHash| !owner.memory.is_pinned(hash);
        if let Some(hash) = read.hashes.iter().find(is_ended).filter(|_| owner.running.is_some()) {
            self.network.violate(|| {
                let (life, owner) = (read.life, read.owner);
                format!("process {life} counts on its lease of {hash}, and process {owner} has ended it")
            });
        }
    }

    /// Rules that hold at any time.
    pub(super) fn check(&self) {
        let now = clock::now();
        let mut state = self.state.borrow_mut();
        let DeploymentState { lives, reads, seen, checks, .. } = &mut *state;
        *checks += 1;
        let looks_at_bytes = checks.is_multiple_of(BYTES_CHECK);
        for read in reads.iter().filter(|read| read.blocks.is_held()) {
            seen.extend(read.hashes.iter().map(|hash| ((read.owner, *hash), now)));
            self.check_lease(read, &lives[read.owner]);
        }
        // A renewal may be under way for as long as a lease holds.
        let longest = LEASE * 2 + Duration::from_secs(1);
        for (life, of) in lives.iter().enumerate().filter(|(_, of)| of.running.is_some()) {
            if let Some(hash) = looks_at_bytes.then(|| of.memory.find_wrong()).flatten() {
                self.network.violate(|| format!("process {life} has wrong bytes of {hash} among its blocks"));
            }
            let went_on = self.network.with(|state| state.processes[life].went_on);
            for (hash, since) in of.memory.pins() {
                let last = seen.get(&(life, hash)).copied().unwrap_or(since).max(since).max(went_on);
                if now.saturating_duration_since(last) > longest && !self.is_stopped(life) {
                    self.network.violate(|| {
                        let time = now.saturating_duration_since(last);
                        format!("process {life} keeps {hash} in place {time:?} after anybody had a lease")
                    });
                }
            }
        }
        seen.retain(|_, last| now.saturating_duration_since(*last) < longest * 2);
    }

    /// Nothing goes wrong any more: nodes find each other, every block can be read, and nothing is
    /// left behind.
    pub(super) fn check_end(&self) {
        let reads = std::mem::take(&mut self.state.borrow_mut().reads);
        drop(reads);
        self.wait(Duration::from_secs(60));
        let state = self.state.borrow();
        let lives: Vec<(usize, NodeId)> = {
            let current = state.current.iter().flatten();
            current.map(|life| (*life, NodeId(state.lives[*life].node as u32 + 1))).collect()
        };
        let all: BTreeMap<_, _> =
            lives.iter().map(|(life, node)| (*node, state.lives[*life].epoch)).collect();
        drop(state);
        for (life, node) in &lives {
            let Some(remote) = self.remote(*life) else { continue };
            let mut known: BTreeMap<_, _> =
                remote.peers().iter().map(|peer| (peer.node, peer.epoch)).collect();
            known.insert(*node, remote.epoch());
            if let Some((wrong, _)) = all.iter().find(|(node, epoch)| known.get(*node) != Some(*epoch)) {
                self.network.violate(|| {
                    format!(
                        "process {life} knows {:?} of node {wrong}, which is {:?}",
                        known.get(wrong),
                        all[wrong]
                    )
                });
            }
            if known.len() > all.len() {
                self.network
                    .violate(|| format!("process {life} knows {} nodes of {}", known.len(), all.len()));
            }
        }
        self.read_at_end(&lives);
        self.wait(LEASE * 3);
        for (life, _) in &lives {
            let held = self.remote(*life).map_or(0, |remote| remote.counts().leases_held);
            let pins = self.state.borrow().lives[*life].memory.pins().len();
            if (held, pins) != (0, 0) {
                self.network.violate(|| format!("process {life} ends with {held} leases and {pins} pins"));
            }
        }
    }

    /// What an owner has can be read.
    fn read_at_end(&self, lives: &[(usize, NodeId)]) {
        for _ in 0..lives.len().min(50) {
            let [(reader, _), (owner, node)] = [0, 1].map(|_| lives[self.random(lives.len())]);
            let memory = Rc::clone(&self.state.borrow().lives[owner].memory);
            let chain = memory.any_chain(0).filter(|_| owner != reader);
            let (Some(chain), Some(remote)) = (chain, self.remote(reader)) else { continue };
            let memory = Rc::clone(&self.state.borrow().lives[reader].memory);
            let actor = Actor { life: reader, remote, memory };
            let before = self.state.borrow().counts.blocks;
            // Slow processes take longer than a request waits.
            let is_slow = self
                .network
                .with(|state| [reader, owner].iter().any(|life| state.processes[*life].slowness > 1));
            let held = self.hold(&actor, node, &[hash(chain, 0)]);
            if let Some(held) = &held {
                self.read(held);
            }
            if !is_slow && self.state.borrow().counts.blocks == before {
                self.network.violate(|| format!("process {reader} cannot read what process {owner} has"));
            }
        }
    }

    /// Lets the world go on.
    pub(super) fn wait(&self, duration: Duration) {
        simulation::wait_until(deadline_after(clock::now(), duration), || false);
    }
}
