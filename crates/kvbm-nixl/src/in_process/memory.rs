//! Registered memory of an agent, and copies between the memory of two.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvbm_storage::{Backing, Storage, StorageExt};
use parking_lot::Mutex;

use super::wire::Range;
use crate::agent::{AgentError, Descriptor, RemoteRequest, SegmentKind, TransferDirection, device_of};

/// Bytes that are copied at a time where a file is involved.
const CHUNK: u64 = 1 << 20;

/// What an agent has registered.
#[derive(Default)]
pub(super) struct Memory {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    batches: BTreeMap<u64, Vec<Arc<dyn Storage>>>,
}

impl Memory {
    /// Registers a batch; gives its key.
    pub(super) fn add(&self, storages: &[Arc<dyn Storage>]) -> Result<u64, AgentError> {
        for storage in storages {
            if SegmentKind::of(&**storage)? == SegmentKind::Vram {
                return Err(AgentError::Unsupported {
                    what: format!("{} storage of {} bytes", storage.kind(), storage.len()),
                    way_out: "the in-process agent moves host memory and files; use NIXL for device memory",
                });
            }
        }
        let mut state = self.state.lock();
        let key = state.next;
        state.next += 1;
        state.batches.insert(key, storages.to_vec());
        Ok(key)
    }

    pub(super) fn remove(&self, key: u64) {
        let batch = self.state.lock().batches.remove(&key);
        // Memory is freed outside the lock.
        drop(batch);
    }

    pub(super) fn ranges(&self) -> BTreeSet<Range> {
        let state = self.state.lock();
        state.batches.values().flatten().filter_map(|storage| Range::of(&**storage)).collect()
    }

    /// The storage that holds a range, and where in it.
    fn find(
        &self,
        agent: &str,
        kind: SegmentKind,
        range: &Descriptor,
    ) -> Result<(Arc<dyn Storage>, u64), AgentError> {
        let holds = |storage: &&Arc<dyn Storage>| {
            SegmentKind::of(&***storage).is_ok_and(|found| found == kind)
                && device_of(&***storage) == range.device_id
                && range.address >= storage.address()
                && range.end() <= storage.address().saturating_add(storage.len())
        };
        let state = self.state.lock();
        match state.batches.values().flatten().find(holds) {
            Some(storage) => Ok((Arc::clone(storage), range.address - storage.address())),
            None => Err(AgentError::NotRegistered {
                agent: agent.to_owned(),
                kind,
                address: range.address,
                bytes: range.bytes,
            }),
        }
    }
}

/// Copies all ranges of a request. All are looked up before the first byte moves.
///
/// # Safety
/// Nobody else touches the destination, and nobody writes the source.
pub(super) unsafe fn move_bytes(
    agent: &str,
    ours: &Memory,
    theirs: &Memory,
    request: &RemoteRequest,
) -> Result<(), AgentError> {
    let ranges = request.local.entries.iter().zip(&request.remote.entries);
    let mut copies = Vec::with_capacity(request.local.entries.len());
    for (local, remote) in ranges {
        let local_place = ours.find(agent, request.local.kind, local)?;
        let remote_place = theirs.find(&request.peer, request.remote.kind, remote)?;
        copies.push(match request.direction {
            TransferDirection::Read => (remote_place, local_place, local.bytes),
            TransferDirection::Write => (local_place, remote_place, local.bytes),
        });
    }
    for ((source, from), (destination, to), bytes) in copies {
        // SAFETY: the caller excludes everybody else from both ranges.
        let copied = unsafe { copy(&*source, from, &*destination, to, bytes) };
        copied.map_err(|error| AgentError::Failed {
            direction: request.direction,
            bytes: request.local.bytes(),
            peer: request.peer.clone(),
            reason: error.to_string(),
        })?;
    }
    Ok(())
}

/// # Safety
/// Nobody else touches the destination, and nobody writes the source.
unsafe fn copy(
    source: &dyn Storage,
    from: u64,
    destination: &dyn Storage,
    to: u64,
    bytes: u64,
) -> Result<(), kvbm_storage::StorageError> {
    if let (Backing::Host(source), Backing::Host(destination)) = (source.backing(), destination.backing()) {
        // SAFETY: the caller excludes everybody else from both ranges.
        return Ok(unsafe { destination.copy_from(to, source, from, bytes) }?);
    }
    let mut buffer = vec![0; bytes.min(CHUNK) as usize];
    let mut done = 0;
    while done < bytes {
        let part = &mut buffer[..(bytes - done).min(CHUNK) as usize];
        // SAFETY: the caller excludes writers from the source.
        unsafe { source.read_at(from + done, part) }?;
        // SAFETY: the caller excludes everybody else from the destination.
        unsafe { destination.write_at(to + done, part) }?;
        done += part.len() as u64;
    }
    Ok(())
}
