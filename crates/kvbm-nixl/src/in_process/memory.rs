//! Registered memory of an agent, and copies between the memory of two.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvbm_device::Owner;
use kvbm_storage::{Backing, Storage, StorageError, StorageExt};
use parking_lot::Mutex;

use super::wire::Range;
use crate::DeviceAccess;
use crate::agent::{AgentError, Descriptor, RemoteRequest, SegmentKind, TransferDirection, device_of};

/// Bytes that are copied at a time where not both sides are host memory.
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
    devices: BTreeMap<u64, Arc<DeviceAccess>>,
}

/// A place in registered memory.
struct Place {
    storage: Arc<dyn Storage>,
    offset: u64,
    /// How it is reached, where it is device memory.
    device: Option<Arc<DeviceAccess>>,
}

impl Memory {
    /// Moves memory of this device, too.
    pub(super) fn reach(&self, access: &Arc<DeviceAccess>) {
        self.state.lock().devices.insert(u64::from(access.device().0), Arc::clone(access));
    }

    /// Registers a batch; gives its key.
    pub(super) fn add(&self, storages: &[Arc<dyn Storage>]) -> Result<u64, AgentError> {
        let mut state = self.state.lock();
        for storage in storages {
            let is_on_device = SegmentKind::of(&**storage)? == SegmentKind::Vram;
            if is_on_device && !state.devices.contains_key(&device_of(&**storage)) {
                return Err(AgentError::Unsupported {
                    what: format!("{} storage of {} bytes", storage.kind(), storage.len()),
                    way_out: "give the agent its device (InProcessAgent::reach_device), or use NIXL",
                });
            }
        }
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
    fn find(&self, agent: &str, kind: SegmentKind, range: &Descriptor) -> Result<Place, AgentError> {
        let holds = |storage: &&Arc<dyn Storage>| {
            SegmentKind::of(&***storage).is_ok_and(|found| found == kind)
                && device_of(&***storage) == range.device_id
                && range.address >= storage.address()
                && range.end() <= storage.address().saturating_add(storage.len())
        };
        let state = self.state.lock();
        match state.batches.values().flatten().find(holds) {
            Some(storage) => Ok(Place {
                offset: range.address - storage.address(),
                device: state.devices.get(&range.device_id).filter(|_| kind == SegmentKind::Vram).cloned(),
                storage: Arc::clone(storage),
            }),
            None => Err(AgentError::NotRegistered {
                agent: agent.to_owned(),
                kind,
                address: range.address,
                bytes: range.bytes,
            }),
        }
    }
}

impl Place {
    /// # Safety
    /// Nobody writes these bytes meanwhile.
    unsafe fn read(&self, at: u64, into: &mut [u8]) -> Result<(), StorageError> {
        let offset = self.offset + at;
        if let (Backing::Device(memory), Some(device)) = (self.storage.backing(), &self.device) {
            into.copy_from_slice(&device.read(&[(memory, offset, into.len() as u64)])?);
            return Ok(());
        }
        // SAFETY: as the caller promises.
        unsafe { self.storage.read_at(offset, into) }
    }

    /// `keep` is held until nothing can write here any more.
    ///
    /// # Safety
    /// Nobody else touches these bytes until then.
    unsafe fn write(&self, at: u64, bytes: &[u8], keep: &Owner) -> Result<(), StorageError> {
        let offset = self.offset + at;
        if let (Backing::Device(memory), Some(device)) = (self.storage.backing(), &self.device) {
            return device.write(memory, offset, bytes, keep);
        }
        // SAFETY: as the caller promises.
        unsafe { self.storage.write_at(offset, bytes) }
    }
}

/// Copies all ranges of a request. All are looked up before the first byte moves. A copy to a
/// device may still run when this returns an error: `keep` is held until it is over.
///
/// # Safety
/// Nobody else touches the destination, and nobody writes the source, until `keep` is dropped.
pub(super) unsafe fn move_bytes(
    agent: &str,
    ours: &Memory,
    theirs: &Memory,
    request: &RemoteRequest,
    keep: &Owner,
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
    for (source, destination, bytes) in copies {
        // SAFETY: the caller excludes everybody else from both ranges.
        let copied = unsafe { copy(&source, &destination, bytes, keep) };
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
unsafe fn copy(source: &Place, destination: &Place, bytes: u64, keep: &Owner) -> Result<(), StorageError> {
    let (from, to) = (source.storage.backing(), destination.storage.backing());
    if let (Backing::Host(from), Backing::Host(to)) = (from, to) {
        // SAFETY: the caller excludes everybody else from both ranges.
        return Ok(unsafe { to.copy_from(destination.offset, from, source.offset, bytes) }?);
    }
    let mut buffer = vec![0; bytes.min(CHUNK) as usize];
    let mut done = 0;
    while done < bytes {
        let part = &mut buffer[..(bytes - done).min(CHUNK) as usize];
        // SAFETY: the caller excludes writers from the source.
        unsafe { source.read(done, part) }?;
        // SAFETY: the caller excludes everybody else from the destination.
        unsafe { destination.write(done, part, keep) }?;
        done += part.len() as u64;
    }
    Ok(())
}
