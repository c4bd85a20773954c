//! The agent of a process: that of one process, with a network between.
//!
//! Registered memory, metadata and the check of every range are the product's. Messages take time,
//! and a transfer moves range by range while the world goes on.

use super::network::{Event, Network};
use kvbm_nixl::{
    AgentError, Descriptor, DescriptorList, InProcessAgent, Notification, Registration, RemoteAgent,
    RemoteRequest, RemoteTransfer, TransferDirection, TransferState,
};
use kvbm_storage::{Storage, StorageExt};
use parking_lot::Mutex;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A transfer with a process that does not answer is looked at again after this.
const AGAIN: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct SimAgent {
    network: Network,
    life: usize,
    memory: Arc<Memory>,
}

/// What a process has registered.
struct Memory {
    agent: InProcessAgent,
    storages: Mutex<Vec<Arc<dyn Storage>>>,
}

/// A transfer between two processes.
pub(super) struct Transfer {
    life: usize,
    peer: String,
    owner: Option<usize>,
    direction: TransferDirection,
    local: DescriptorList,
    remote: DescriptorList,
    next: usize,
    memory: Arc<Memory>,
    outcome: Option<Result<(), String>>,
    is_detached: bool,
    /// Bits of what it moved are wrong.
    pub(super) is_damaged: bool,
    keep: Option<Box<dyn Any + Send>>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} with {}, {:?})", self.direction, self.peer, self.outcome)
    }
}

impl fmt::Debug for SimAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimAgent({:?})", self.memory.agent)
    }
}

impl SimAgent {
    pub(super) fn new(network: Network, life: usize, agent: InProcessAgent) -> Self {
        Self { network, life, memory: Arc::new(Memory { agent, storages: Mutex::default() }) }
    }
}

impl RemoteAgent for SimAgent {
    fn name(&self) -> &str {
        self.memory.agent.name()
    }

    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError> {
        self.memory.storages.lock().extend_from_slice(storages);
        self.memory.agent.register(storages)
    }

    fn metadata(&self) -> Result<Vec<u8>, AgentError> {
        self.memory.agent.metadata()
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        self.memory.agent.add_peer(metadata)
    }

    fn forget_peer(&self, peer: &str) -> Result<(), AgentError> {
        self.memory.agent.forget_peer(peer)
    }

    unsafe fn start(&self, request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        let RemoteRequest { direction, peer, local, remote, keep, .. } = request;
        let (name, bytes) = (peer.clone(), local.bytes());
        let id = self.network.with(|state| {
            let id = state.transfers.last_key_value().map_or(1, |(last, _)| last + 1);
            let owner = state.life_of(&peer);
            state.transfers.insert(
                id,
                Transfer {
                    life: self.life,
                    peer,
                    owner,
                    direction,
                    local,
                    remote,
                    next: 0,
                    memory: Arc::clone(&self.memory),
                    outcome: None,
                    is_detached: false,
                    is_damaged: false,
                    keep: Some(keep),
                },
            );
            let delay = state.latency(self.life, owner.unwrap_or(self.life));
            state.schedule(delay, Event::Piece { transfer: id });
            id
        });
        let (network, life) = (self.network.clone(), self.life);
        Ok(Box::new(Handle { network, id, life, direction, peer: name, bytes }))
    }

    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError> {
        self.network.with(|state| {
            // A name that nobody has: who had it has ended.
            if let Some(to) = state.life_of(peer) {
                let name = self.memory.agent.name();
                state.send(self.life, name, to, message);
            }
        });
        Ok(())
    }

    fn notifications(&self) -> Result<Vec<Notification>, AgentError> {
        Ok(self.network.with(|state| std::mem::take(&mut state.processes[self.life].inbox)))
    }
}

/// What happens to a range of a transfer.
enum Step {
    Move(Arc<Memory>, RemoteRequest, bool),
    Later,
    Over(Option<Box<dyn Any + Send>>),
}

/// Moves the next range of a transfer.
pub(super) fn move_piece(network: &Network, id: u64) {
    let step = network.with(|state| {
        let Some(transfer) = state.transfers.get(&id) else { return Step::Over(None) };
        let (life, owner) = (transfer.life, transfer.owner);
        let is_alone = |state: &super::network::NetworkState| {
            owner.is_none_or(|owner| state.processes[owner].is_dead) || state.processes[life].is_dead
        };
        if is_alone(state) {
            // Some networks say so, others say nothing.
            let failed = state.random.once_in(2) || state.transfers[&id].is_detached;
            if failed {
                return Step::Over(end(state, id, Err("the connection broke".to_owned())));
            }
            return Step::Later;
        }
        let owner = owner.unwrap_or(life);
        if state.cut_between(life, owner).is_some() {
            return Step::Later;
        }
        // A stopped process may be read all the same, where the network reads its memory alone.
        if state.processes[owner].stopped_until.is_some() && state.random.once_in(2) {
            return Step::Later;
        }
        let is_flipped = !state.is_tame && state.random.once_in(3000);
        let Some(transfer) = state.transfers.get_mut(&id) else { return Step::Over(None) };
        let at = transfer.next;
        let part =
            |list: &DescriptorList| DescriptorList { kind: list.kind, entries: vec![list.entries[at]] };
        transfer.is_damaged |= is_flipped;
        let request = RemoteRequest {
            direction: transfer.direction,
            peer: transfer.peer.clone(),
            local: part(&transfer.local),
            remote: part(&transfer.remote),
            notification: None,
            keep: Box::new(()),
        };
        Step::Move(Arc::clone(&transfer.memory), request, is_flipped)
    });
    match step {
        Step::Move(memory, request, is_flipped) => {
            let range = request.local.entries[0];
            // SAFETY: one thread runs the simulation: nobody else touches any memory meanwhile.
            let moved = unsafe { memory.agent.start(request) };
            if is_flipped {
                flip(&memory, &range);
            }
            let kept = network.with(|state| went_on(state, id, moved.map(drop)));
            drop(kept);
        }
        Step::Later => network.with(|state| state.schedule(AGAIN, Event::Piece { transfer: id })),
        Step::Over(kept) => drop(kept),
    }
}

/// A range has moved: the next one, or the end.
fn went_on(
    state: &mut super::network::NetworkState,
    id: u64,
    moved: Result<(), AgentError>,
) -> Option<Box<dyn Any + Send>> {
    let transfer = state.transfers.get_mut(&id)?;
    transfer.next += 1;
    let is_last = transfer.next == transfer.local.entries.len();
    match moved {
        Ok(()) if !is_last => {
            let (life, owner) = (transfer.life, transfer.owner.unwrap_or(transfer.life));
            let delay = state.latency(life, owner);
            state.schedule(delay, Event::Piece { transfer: id });
            None
        }
        Ok(()) => end(state, id, Ok(())),
        Err(error) => end(state, id, Err(error.to_string())),
    }
}

/// A transfer is over: what it kept, to be dropped outside the lock.
fn end(
    state: &mut super::network::NetworkState,
    id: u64,
    outcome: Result<(), String>,
) -> Option<Box<dyn Any + Send>> {
    let transfer = state.transfers.get_mut(&id)?;
    if transfer.is_detached {
        return state.transfers.remove(&id).and_then(|transfer| transfer.keep);
    }
    transfer.outcome = Some(outcome);
    transfer.keep.take()
}

/// Flips a bit of a range of ours.
fn flip(memory: &Memory, range: &Descriptor) {
    for storage in &*memory.storages.lock() {
        let Some(offset) = range.address.checked_sub(storage.address()) else { continue };
        if offset >= storage.len() {
            continue;
        }
        let mut byte = [0];
        // SAFETY: one thread runs the simulation: nobody else touches any memory meanwhile.
        let read = unsafe { storage.read_at(offset, &mut byte) };
        byte[0] ^= 1;
        // SAFETY: as above.
        let written = unsafe { storage.write_at(offset, &byte) };
        assert!(read.is_ok() && written.is_ok(), "host memory is there");
        return;
    }
}

/// A started transfer in the hands of its reader.
struct Handle {
    network: Network,
    id: u64,
    life: usize,
    direction: TransferDirection,
    peer: String,
    bytes: u64,
}

impl RemoteTransfer for Handle {
    fn poll(&mut self) -> Result<TransferState, AgentError> {
        self.network.wait_while_stopped(self.life);
        let outcome = self.network.with(|state| state.transfers.get(&self.id)?.outcome.clone());
        match outcome {
            None => Ok(TransferState::Running),
            Some(Ok(())) => Ok(TransferState::Done),
            Some(Err(reason)) => {
                let (direction, bytes, peer) = (self.direction, self.bytes, self.peer.clone());
                Err(AgentError::Failed { direction, bytes, peer, reason })
            }
        }
    }

    fn late(&self) -> AgentError {
        AgentError::Deadline { direction: self.direction, bytes: self.bytes, peer: self.peer.clone() }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let over = self.network.with(|state| {
            let transfer = state.transfers.get_mut(&self.id)?;
            transfer.is_detached = true;
            let is_damaged = transfer.is_damaged;
            state.damage_seen |= is_damaged;
            state.transfers.get(&self.id)?.outcome.as_ref()?;
            state.transfers.remove(&self.id)
        });
        drop(over);
    }
}
