//! The agent: registration, peers, notifications.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

use kvbm_storage::Storage;
use parking_lot::Mutex;

use super::handle::AgentHandle;
use super::library;
use super::lists::{CallOptions, Failed, NotificationMap, RegistrationList, c_string, check};
use super::request::NixlTransfer;
use super::sys;
use crate::NixlOptions;
use crate::agent::{
    AgentError, Descriptor, MAX_NOTIFICATION_BYTES, Notification, Registration, RemoteAgent, RemoteRequest,
    RemoteTransfer, SegmentKind, check_lists,
};

/// The agent over NIXL. Back ends are made when the first memory of their kind is registered: UCX
/// for host and device memory, and one of [`FileBackend`](crate::FileBackend) for files.
pub struct NixlAgent {
    handle: Arc<AgentHandle>,
    /// Peers that were added and not forgotten. NIXL reports an unknown peer as it does any
    /// failure.
    peers: Mutex<BTreeSet<String>>,
    library: PathBuf,
}

impl NixlAgent {
    /// Loads NIXL's library, if no agent has done so, and makes an agent.
    ///
    /// # Errors
    /// [`AgentError::Options`], [`AgentError::Unavailable`] (with the command that installs NIXL),
    /// [`AgentError::Nixl`].
    pub fn new(options: &NixlOptions) -> Result<Self, AgentError> {
        options.validate()?;
        let library = library::load(options)?;
        Ok(Self { handle: Arc::new(AgentHandle::new(options)?), peers: Mutex::default(), library })
    }

    fn check_peer(&self, peer: &str) -> Result<(), AgentError> {
        if peer == self.handle.name() || self.peers.lock().contains(peer) {
            return Ok(());
        }
        Err(AgentError::UnknownPeer { agent: self.handle.name().to_owned(), peer: peer.to_owned() })
    }

    /// The file that NIXL was loaded from.
    pub fn library(&self) -> &Path {
        &self.library
    }
}

impl RemoteAgent for NixlAgent {
    fn name(&self) -> &str {
        self.handle.name()
    }

    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError> {
        let mut kinds: BTreeMap<SegmentKind, Vec<Descriptor>> = BTreeMap::new();
        for storage in storages {
            let whole = Descriptor::within(&**storage, 0, storage.len()).map_err(|error| {
                AgentError::Unsupported { what: error.to_string(), way_out: "register a sound storage" }
            })?;
            kinds.entry(SegmentKind::of(&**storage)?).or_default().push(whole);
        }
        // One batch for each kind. A later failure undoes the earlier ones.
        let batches = kinds.iter().map(|(kind, ranges)| Registered::new(&self.handle, *kind, ranges));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        Ok(Registration::new(Box::new(batches), storages))
    }

    fn metadata(&self) -> Result<Vec<u8>, AgentError> {
        // An agent without a back end has no address that a peer could answer to.
        self.handle.backend_to_peers()?;
        let (mut data, mut length): (*mut c_void, usize) = (null_mut(), 0);
        // SAFETY: the agent is live; both are written by the call.
        let code = unsafe { sys::nixl_capi_get_local_md(self.handle.raw(), &raw mut data, &raw mut length) };
        check("get_local_md", code).map_err(|failed| self.handle.error(failed, String::new()))?;
        // SAFETY: the call has given `length` bytes there, which are ours.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec();
        // SAFETY: the bytes came from `malloc` and are used no more.
        unsafe { libc::free(data) };
        Ok(bytes)
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        self.handle.backend_to_peers()?;
        let mut name: *mut c_char = null_mut();
        let (data, length) = (metadata.as_ptr().cast::<c_void>(), metadata.len());
        // SAFETY: the agent is live, the bytes live through the call, the pointer is written by it.
        let code = unsafe { sys::nixl_capi_load_remote_md(self.handle.raw(), data, length, &raw mut name) };
        check("load_remote_md", code).map_err(|failed| AgentError::Metadata {
            bytes: length,
            reason: format!("NIXL refuses it with {} ({})", failed.status(), failed.code),
        })?;
        // SAFETY: the call has given a C string.
        let text = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // SAFETY: the string came from `strdup` and is used no more.
        unsafe { libc::free(name.cast()) };
        self.peers.lock().insert(text.clone());
        Ok(text)
    }

    fn forget_peer(&self, peer: &str) -> Result<(), AgentError> {
        if !self.peers.lock().remove(peer) {
            return Ok(());
        }
        let name = c_string(peer)?;
        // SAFETY: the agent is live and the name lives through the call.
        let code = unsafe { sys::nixl_capi_invalidate_remote_md(self.handle.raw(), name.as_ptr()) };
        check("invalidate_remote_md", code)
            .map(|_| ())
            .map_err(|failed| self.handle.error(failed, format!(": peer {peer}")))
    }

    unsafe fn start(&self, request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        check_lists(request.direction, &request.local, &request.remote)?;
        self.check_peer(&request.peer)?;
        self.handle.sweep();
        // SAFETY: the caller keeps the promises of `RemoteAgent::start`.
        let transfer = unsafe { NixlTransfer::start(&self.handle, request) }?;
        Ok(Box::new(transfer))
    }

    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError> {
        if message.len() > MAX_NOTIFICATION_BYTES {
            let (peer, bytes) = (peer.to_owned(), message.len());
            return Err(AgentError::Notification { peer, bytes, reason: "it is too long" });
        }
        self.check_peer(peer)?;
        let options = CallOptions::new().map_err(|failed| self.handle.error(failed, String::new()))?;
        let backend = self.handle.backend_to_peers()?;
        options.backend(backend).map_err(|failed| self.handle.error(failed, String::new()))?;
        let name = c_string(peer)?;
        let (data, length) = (message.as_ptr().cast::<c_void>(), message.len());
        // SAFETY: the agent is live; the name and the message live through the call.
        let code =
            unsafe { sys::nixl_capi_gen_notif(self.handle.raw(), name.as_ptr(), data, length, options.0) };
        check("gen_notif", code)
            .map(|_| ())
            .map_err(|failed| self.handle.error(failed, format!(": notification to {peer}")))
    }

    fn notifications(&self) -> Result<Vec<Notification>, AgentError> {
        self.handle.backend_to_peers()?;
        self.handle.sweep();
        let failed = |failed: Failed| self.handle.error(failed, String::new());
        NotificationMap::take(self.handle.raw()).map_err(failed)?.messages().map_err(failed)
    }
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlAgent")
            .field("name", &self.handle.name())
            .field("library", &self.library)
            .finish_non_exhaustive()
    }
}

/// Registered ranges of one kind; deregisters them when it is dropped.
pub(super) struct Registered {
    handle: Arc<AgentHandle>,
    list: RegistrationList,
}

// SAFETY: see `AgentHandle`; the list is used by `drop` alone.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    pub(super) fn new(
        handle: &Arc<AgentHandle>,
        kind: SegmentKind,
        ranges: &[Descriptor],
    ) -> Result<Self, AgentError> {
        let bytes: u64 = ranges.iter().map(|range| range.bytes).sum();
        let subject = || format!(": {} ranges of {kind}, {bytes} bytes", ranges.len());
        let failed = |failed: Failed| handle.error(failed, subject());
        handle.backend(kind)?;
        let list = RegistrationList::new(kind).map_err(failed)?;
        for range in ranges {
            list.add(range, &[]).map_err(failed)?;
        }
        Self::register(handle, list).map_err(failed)
    }

    /// The object that a store has under `key`.
    pub(super) fn object(
        handle: &Arc<AgentHandle>,
        range: Descriptor,
        key: &str,
    ) -> Result<Self, AgentError> {
        let failed = |failed: Failed| handle.error(failed, format!(": object {key}"));
        let list = RegistrationList::new(SegmentKind::Object).map_err(failed)?;
        list.add(&range, key.as_bytes()).map_err(failed)?;
        Self::register(handle, list).map_err(failed)
    }

    fn register(handle: &Arc<AgentHandle>, list: RegistrationList) -> Result<Self, Failed> {
        // SAFETY: all handles are live. The memory stays allocated: `Registration` frees it after
        // this is dropped. Without options every back end that takes this kind registers it.
        let code = unsafe { sys::nixl_capi_register_mem(handle.raw(), list.0, null_mut()) };
        check("register_mem", code)?;
        Ok(Self { handle: Arc::clone(handle), list })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: the agent lives as long as this; the ranges were registered by `new`.
        unsafe { sys::nixl_capi_deregister_mem(self.handle.raw(), self.list.0, null_mut()) };
    }
}
