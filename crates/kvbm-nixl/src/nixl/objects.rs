//! Bodies of objects in a bucket, moved by NIXL's back end OBJ.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm_plan::deadline_after;
use kvbm_storage::{Storage, StorageAllocator, StorageError, StorageExt, SystemAllocator};

use super::agent::Registered;
use super::handle::AgentHandle;
use super::library;
use super::request::NixlTransfer;
use crate::NixlOptions;
use crate::agent::{
    AgentError, Descriptor, DescriptorList, RemoteRequest, RemoteTransfer, SegmentKind, TransferDirection,
    TransferState,
};

/// Alignment of the memory that bodies pass through.
const PAGE: u64 = 4096;
/// Most transfers whose callers have left them and that have not ended. NIXL cannot cancel one.
const MAX_LEFT: usize = 32;
/// How long the end of an agent waits for them.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Writes and reads objects of one bucket, whole. It can neither list nor delete them, nor write
/// under a condition, and of a failure it says no more than that.
pub struct NixlObjects {
    handle: Arc<AgentHandle>,
    library: PathBuf,
    /// Each registration of an object has a number of its own.
    next: AtomicU64,
}

/// Why the body of an object is not on its way, or did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// Memory for the body.
    #[error("no memory for the body of an object: {0}")]
    Memory(String),
    /// Too many transfers are late.
    #[error(
        "{left} transfers of objects have not ended although nobody waits for them any more; the store is too slow"
    )]
    Behind {
        /// How many.
        left: usize,
    },
}

impl From<StorageError> for ObjectError {
    fn from(error: StorageError) -> Self {
        Self::Memory(error.to_string())
    }
}

impl NixlObjects {
    /// Loads NIXL's library and makes the back end, whose parameters are those of `OBJ` among
    /// [`NixlOptions::backends`]. Whether the bucket is there shows with the first object.
    ///
    /// # Errors
    /// As [`NixlAgent::new`](crate::NixlAgent::new), and [`AgentError::Unsupported`] where
    /// [`NixlOptions::objects`] is not set.
    pub fn new(options: &NixlOptions) -> Result<Self, AgentError> {
        options.validate()?;
        let library = library::load(options)?;
        let handle = Arc::new(AgentHandle::new(options)?);
        handle.backend(SegmentKind::Object)?;
        Ok(Self { handle, library, next: AtomicU64::new(0) })
    }

    /// The file that NIXL was loaded from.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Starts to write an object, over what is there.
    ///
    /// # Errors
    /// [`ObjectError`]. Nothing has started then.
    pub fn write(&self, key: &str, body: &[u8]) -> Result<ObjectTransfer, ObjectError> {
        let memory = SystemAllocator::default().allocate(body.len() as u64, PAGE)?;
        // SAFETY: the memory is new, and nobody else has it.
        unsafe { memory.write_at(0, body) }?;
        self.start(TransferDirection::Write, key, memory)
    }

    /// Starts to read the first `bytes` bytes of an object. Where it is shorter, the rest is zeros.
    ///
    /// # Errors
    /// [`ObjectError`]. Nothing has started then.
    pub fn read(&self, key: &str, bytes: u64) -> Result<ObjectTransfer, ObjectError> {
        let memory = SystemAllocator::default().allocate(bytes, PAGE)?;
        self.start(TransferDirection::Read, key, memory)
    }

    fn start(
        &self,
        direction: TransferDirection,
        key: &str,
        memory: Arc<dyn Storage>,
    ) -> Result<ObjectTransfer, ObjectError> {
        let left = self.handle.sweep();
        if left >= MAX_LEFT {
            return Err(ObjectError::Behind { left });
        }
        let device_id = self.next.fetch_add(1, Ordering::Relaxed);
        let bytes = memory.len();
        let ours = Descriptor { address: memory.address(), bytes, device_id: 0 };
        let theirs = Descriptor { address: 0, bytes, device_id };
        let registered = (
            Registered::new(&self.handle, SegmentKind::Dram, &[ours])?,
            Registered::object(&self.handle, theirs, key)?,
        );
        let list = |kind, entry| DescriptorList { kind, entries: vec![entry] };
        let request = RemoteRequest {
            direction,
            peer: self.handle.name().to_owned(),
            local: list(SegmentKind::Dram, ours),
            remote: list(SegmentKind::Object, theirs),
            notification: None,
            // Deregistered first, freed after.
            keep: Box::new((registered, Arc::clone(&memory))),
        };
        // SAFETY: the memory is this transfer's: it is read after its end alone.
        let transfer = unsafe { NixlTransfer::start(&self.handle, request) }?;
        Ok(ObjectTransfer { transfer, memory, direction })
    }
}

impl Drop for NixlObjects {
    fn drop(&mut self) {
        // What transfers keep holds the agent: it ends when they are swept. What has not ended by
        // then may still be written, so neither its memory nor the agent is freed.
        let deadline = deadline_after(Instant::now(), LAST_WAIT);
        while self.handle.sweep() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl fmt::Debug for NixlObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlObjects").field("name", &self.handle.name()).finish_non_exhaustive()
    }
}

/// The body of an object on its way. Dropping it while it runs detaches it: its memory stays
/// claimed until its end.
pub struct ObjectTransfer {
    transfer: NixlTransfer,
    memory: Arc<dyn Storage>,
    direction: TransferDirection,
}

impl ObjectTransfer {
    /// `None` while it runs. Then what was read; nothing of a write.
    ///
    /// # Errors
    /// [`ObjectError::Agent`]: the store refused it, could not be reached, or has no such object.
    pub fn poll(&mut self) -> Result<Option<Vec<u8>>, ObjectError> {
        if self.transfer.poll()? == TransferState::Running {
            return Ok(None);
        }
        if self.direction == TransferDirection::Write {
            return Ok(Some(Vec::new()));
        }
        let mut body = vec![0; self.memory.len() as usize];
        // SAFETY: the transfer is over, and nobody else has its memory.
        unsafe { self.memory.read_at(0, &mut body) }?;
        Ok(Some(body))
    }

    /// Waits for its end, or until `deadline`.
    ///
    /// # Errors
    /// As [`poll`](Self::poll), and [`AgentError::Deadline`].
    pub fn wait(&mut self, deadline: Instant) -> Result<Vec<u8>, ObjectError> {
        self.transfer.wait(deadline)?;
        Ok(self.poll()?.unwrap_or_default())
    }
}

impl fmt::Debug for ObjectTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectTransfer({} of {} bytes)", self.direction, self.memory.len())
    }
}
