//! Bytes of the disk tier moved by an agent for files, such as NIXL's.

use kvbm_disk::{IoMemory, SlotIo, SlotIoLane, SlotIoRequest};
use kvbm_nixl::{
    AgentError, Descriptor, DescriptorList, Registration, RemoteAgent, RemoteRequest, SegmentKind,
    TransferDirection, TransferState,
};
use kvbm_plan::clock;
use kvbm_storage::{DiskStorage, HostStorage, Storage, StorageError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Runs of memory in one request of an agent: NIXL's back ends have room for a bounded number.
const MAX_RUNS: usize = 128;
/// Between two looks at a transfer; longer for one that takes long. A look is a call of the system,
/// and a disk takes longer than many of them.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Makes an agent that moves bytes of files.
pub type MakeAgent = Box<dyn Fn() -> Result<Arc<dyn RemoteAgent>, AgentError> + Send + Sync>;

/// Moves the bytes of a disk engine through agents for files.
pub struct AgentIo {
    name: &'static str,
    what: String,
    lanes: Arc<Lanes>,
}

/// What all lanes have in common.
struct Lanes {
    make: MakeAgent,
    /// The agent of all of them, if they have one in common; made with the first lane.
    shared: Option<Mutex<Option<Arc<FileAgent>>>>,
    /// Memory that each agent registers before its next request.
    memory: Mutex<Vec<Arc<dyn Storage>>>,
}

impl AgentIo {
    /// An engine called `name` over the agents of `make`, which `what` describes. With `one_agent`
    /// all threads of the engine use one agent, and else each has its own.
    ///
    /// A thread with an agent of its own drops it after a failure and makes another. So no failure
    /// is taken for that of another thread, and nothing of a failed transfer goes on: the end of
    /// NIXL's back end POSIX waits for the kernel. Where memory can be registered once only,
    /// as with NIXL's `GDS_MT`, one agent is needed; its transfers must be over when they fail.
    pub fn new(name: &'static str, what: impl Into<String>, one_agent: bool, make: MakeAgent) -> Self {
        let lanes = Lanes { make, shared: one_agent.then(Mutex::default), memory: Mutex::default() };
        Self { name, what: what.into(), lanes: Arc::new(lanes) }
    }
}

impl fmt::Debug for AgentIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentIo").field("what", &self.what).finish_non_exhaustive()
    }
}

impl SlotIo for AgentIo {
    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> String {
        self.what.clone()
    }

    /// NIXL's back end POSIX looks whether a request failed, not how much it moved.
    fn hides_short_writes(&self) -> bool {
        true
    }

    fn open_lane(&self, files: Vec<OwnedFd>) -> io::Result<Box<dyn SlotIoLane>> {
        let files = files.into_iter().enumerate().map(slot_file).collect::<io::Result<Vec<_>>>()?;
        let mut lane = AgentLane { lanes: Arc::clone(&self.lanes), files, own: Vec::new(), agent: None };
        lane.agent()?;
        Ok(Box::new(lane))
    }

    fn register(&self, memory: IoMemory) -> io::Result<()> {
        let memory = host_storage(memory)?;
        self.lanes.memory.lock().push(memory);
        Ok(())
    }
}

impl Lanes {
    /// An agent for `files`: that of all lanes, or a new one.
    fn agent(&self, files: &[DiskStorage]) -> io::Result<Arc<FileAgent>> {
        let make = || (self.make)().and_then(|agent| FileAgent::new(agent, files)).map_err(io::Error::other);
        let Some(shared) = &self.shared else { return Ok(Arc::new(make()?)) };
        let mut shared = shared.lock();
        if let Some(agent) = &*shared {
            return Ok(Arc::clone(agent));
        }
        Ok(Arc::clone(shared.insert(Arc::new(make()?))))
    }
}

/// What one thread of the engine moves bytes through.
struct AgentLane {
    lanes: Arc<Lanes>,
    files: Vec<DiskStorage>,
    /// Memory of this lane alone.
    own: Vec<Arc<dyn Storage>>,
    /// None after a failure.
    agent: Option<Arc<FileAgent>>,
}

impl AgentLane {
    fn agent(&mut self) -> io::Result<Arc<FileAgent>> {
        if let Some(agent) = &self.agent {
            return Ok(Arc::clone(agent));
        }
        let agent = self.lanes.agent(&self.files)?;
        for memory in &self.own {
            agent.register(memory).map_err(io::Error::other)?;
        }
        Ok(Arc::clone(self.agent.insert(agent)))
    }

    /// After a failed transfer: returns when nothing of it can go on.
    fn give_up(&mut self, agent: Arc<FileAgent>) {
        if self.lanes.shared.is_none() {
            self.agent = None;
        }
        drop(agent);
    }
}

impl SlotIoLane for AgentLane {
    fn register(&mut self, memory: IoMemory) -> io::Result<()> {
        let memory = host_storage(memory)?;
        self.agent()?.register(&memory).map_err(io::Error::other)?;
        self.own.push(memory);
        Ok(())
    }

    fn knows(&mut self, start: *mut u8, len: usize) -> bool {
        // Without an agent the memory of the lane is registered with the next one.
        self.agent().is_ok_and(|agent| agent.knows(&self.lanes, start.addr() as u64, len as u64))
    }

    unsafe fn transfer(&mut self, request: &SlotIoRequest<'_>) -> io::Result<u64> {
        if !request.write {
            let asked = request.runs.iter().map(|(_, len)| *len as u64).sum();
            let there = self.files[request.file].file().metadata()?.len().saturating_sub(request.offset);
            if there < asked {
                // The file was cut, so the block fails: all that counts is how much of it there is.
                // An agent would say that the device failed, or that all is well.
                return Ok(there);
            }
        }
        let agent = self.agent()?;
        // SAFETY: by the caller's contract.
        unsafe { agent.transfer(request) }.map_err(|error| {
            self.give_up(agent);
            io::Error::other(error)
        })
    }
}

/// An agent with the slot files and memory that it has registered.
struct FileAgent {
    // Fields drop in this order.
    registered: Mutex<Registered>,
    files: Vec<DiskStorage>,
    agent: Arc<dyn RemoteAgent>,
}

#[derive(Default)]
struct Registered {
    held: Vec<Registration>,
    /// Memory: where each starts and ends.
    ranges: BTreeMap<u64, u64>,
    /// How many of `Lanes::memory` were seen.
    seen: usize,
}

impl FileAgent {
    fn new(agent: Arc<dyn RemoteAgent>, files: &[DiskStorage]) -> Result<Self, AgentError> {
        let storages: Vec<_> = files.iter().map(|file| Arc::new(file.clone()) as Arc<dyn Storage>).collect();
        let held = vec![agent.register(&storages)?];
        let registered = Mutex::new(Registered { held, ..Registered::default() });
        Ok(Self { registered, files: files.to_vec(), agent })
    }

    /// Registers memory, if it is not.
    fn register(&self, memory: &Arc<dyn Storage>) -> Result<(), AgentError> {
        let mut registered = self.registered.lock();
        let (start, end) = (memory.address(), memory.address().saturating_add(memory.len()));
        if registered.ranges.get(&start).is_some_and(|known| *known >= end) {
            return Ok(());
        }
        let registration = self.agent.register(std::slice::from_ref(memory))?;
        registered.held.push(registration);
        registered.ranges.insert(start, end);
        Ok(())
    }

    /// Whether a run lies in registered memory. Registers first what is new for all lanes.
    fn knows(&self, lanes: &Lanes, start: u64, bytes: u64) -> bool {
        let seen = self.registered.lock().seen;
        let new: Vec<_> = lanes.memory.lock().iter().skip(seen).cloned().collect();
        for memory in &new {
            if let Err(error) = self.register(memory) {
                tracing::warn!(%error, bytes = memory.len(), "memory is not registered for the disk: blocks in it are copied first");
            }
        }
        let mut registered = self.registered.lock();
        registered.seen = registered.seen.max(seen + new.len());
        let below = registered.ranges.range(..=start).next_back();
        below.is_some_and(|(_, end)| start.saturating_add(bytes) <= *end)
    }

    /// Moves all bytes of a request, in as many transfers as it takes.
    ///
    /// # Safety
    /// As [`SlotIoLane::transfer`].
    unsafe fn transfer(&self, request: &SlotIoRequest<'_>) -> Result<u64, FileIoError> {
        let mut moved = 0;
        for runs in request.runs.chunks(MAX_RUNS) {
            let (local, remote) = self.lists(request, request.offset + moved, runs)?;
            moved += local.bytes();
            let direction = if request.write { TransferDirection::Write } else { TransferDirection::Read };
            let (peer, keep) = (self.agent.name().to_owned(), Box::new(()));
            let wanted = RemoteRequest { direction, peer, local, remote, notification: None, keep };
            // SAFETY: by the caller's contract nobody else touches the memory before this function
            // returns. It does not while the transfer runs; the slot is that of the caller alone.
            let mut transfer = unsafe { self.agent.start(wanted) }?;
            // It has no deadline: who asked for it has one, and its memory is in use until it ends.
            let mut pause = FIRST_PAUSE;
            while transfer.poll()? == TransferState::Running {
                clock::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        Ok(moved)
    }

    /// The runs, and where their bytes lie in the file from `offset` on.
    fn lists(
        &self,
        request: &SlotIoRequest<'_>,
        mut offset: u64,
        runs: &[(*mut u8, usize)],
    ) -> Result<(DescriptorList, DescriptorList), FileIoError> {
        let mut lists = (DescriptorList::new(SegmentKind::Dram), DescriptorList::new(SegmentKind::File));
        for &(start, len) in runs {
            let (address, bytes) = (start.expose_provenance() as u64, len as u64);
            lists.0.entries.push(Descriptor { address, bytes, device_id: 0 });
            lists.1.entries.push(Descriptor::within(&self.files[request.file], offset, bytes)?);
            offset += bytes;
        }
        Ok(lists)
    }
}

/// Why a request of a lane failed.
#[derive(Debug, thiserror::Error)]
enum FileIoError {
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Range(#[from] StorageError),
}

/// Slot file `member` of an engine.
fn slot_file((member, file): (usize, OwnedFd)) -> io::Result<DiskStorage> {
    let file = File::from(file);
    let bytes = file.metadata()?.len();
    let path = PathBuf::from(format!("slot file {member}"));
    DiskStorage::from_file(file, &path, bytes).map_err(io::Error::other)
}

fn host_storage(memory: IoMemory) -> io::Result<Arc<dyn Storage>> {
    let (start, bytes) = (memory.start(), memory.bytes());
    // SAFETY: who made the memory promised that it stays allocated until its owner is dropped. It
    // is read and written by requests alone, whose blocks are theirs meanwhile.
    let storage = unsafe { HostStorage::from_external(start, bytes, memory.into_owner()) };
    Ok(Arc::new(storage.map_err(io::Error::other)?))
}
