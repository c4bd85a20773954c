//! The agent's handle, its back ends, and the order in which all of it ends.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use kvbm_plan::deadline_after;
use parking_lot::Mutex;

use super::lists::{Failed, Parameters, c_string, check};
use super::signals::KeptHandlers;
use super::sys::{self, Raw};
use crate::agent::{AgentError, SegmentKind};
use crate::{BackendOptions, NixlOptions};

/// How long the end of an agent waits for transfers that still run.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// How long memory of a failed transfer stays claimed. NIXL reports the first failure of a request
/// while other parts of it may still be on their way.
const QUARANTINE: Duration = Duration::from_secs(1);

/// A live agent of NIXL. Registrations and transfers hold it by `Arc`, so it ends last.
pub(super) struct AgentHandle {
    raw: Raw,
    name: String,
    options: NixlOptions,
    backends: Mutex<BTreeMap<&'static str, RawBackend>>,
    detached: Mutex<Vec<Detached>>,
}

struct RawBackend(Raw);

// SAFETY: NIXL's handles belong to no thread, and the agent was made with THREAD_SYNC_RW, under
// which NIXL locks what its calls share.
unsafe impl Send for AgentHandle {}
// SAFETY: as above.
unsafe impl Sync for AgentHandle {}

/// A request whose handle was dropped before it had ended, or that has failed.
pub(super) struct Detached {
    pub(super) request: RawRequest,
    pub(super) keep: Box<dyn Any + Send>,
    /// Set when it has failed: its memory is free after this.
    pub(super) free_at: Option<Instant>,
}

/// A request of NIXL's.
pub(super) struct RawRequest(pub(super) Raw);

// SAFETY: see `AgentHandle`.
unsafe impl Send for RawRequest {}

impl AgentHandle {
    /// Makes the agent. The library is loaded.
    pub(super) fn new(options: &NixlOptions) -> Result<Self, AgentError> {
        let name = options.agent_name.clone();
        let c_name = c_string(&name)?;
        let config = sys::AgentConfig {
            // Without it a READ of UCX never ends.
            enable_progress_thread: options.peers,
            // The listener takes the metadata of anybody.
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: sys::THREAD_SYNC_RW,
            num_workers: 1,
            progress_delay_us: options.progress_delay.as_micros() as u64,
            listen_delay_us: 1000,
            capture_telemetry: false,
        };
        let mut raw = null_mut();
        let _kept = KeptHandlers::new();
        // SAFETY: the library is loaded; the name and the configuration live through the call.
        let code = unsafe {
            sys::nixl_capi_create_configured_agent(c_name.as_ptr(), &raw const config, &raw mut raw)
        };
        check("create_configured_agent", code)
            .map_err(|failed| failed.about(&name, String::new(), hint()))?;
        let options = options.clone();
        let made = Self { raw, name, options, backends: Mutex::default(), detached: Mutex::default() };
        if made.options.files.is_some() {
            // Host memory that is registered later is registered for files, too.
            made.backend(SegmentKind::File)?;
        }
        Ok(made)
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn error(&self, failed: Failed, subject: String) -> AgentError {
        failed.about(&self.name, subject, String::new())
    }

    /// The back end for a kind of memory, made at its first use.
    pub(super) fn backend(&self, kind: SegmentKind) -> Result<Raw, AgentError> {
        let unsupported = |what: String, way_out| Err(AgentError::Unsupported { what, way_out });
        let plugin = match (kind, self.options.files) {
            (SegmentKind::Dram | SegmentKind::Vram, _) if self.options.peers => "UCX",
            // Host memory for files, or for objects.
            (SegmentKind::Dram | SegmentKind::File, Some(files)) => files.name(),
            (SegmentKind::Dram | SegmentKind::Object, _) if self.options.objects => "OBJ",
            (SegmentKind::Object, _) => {
                return unsupported(
                    "an object".to_owned(),
                    "set `NixlOptions::objects` when the agent is made",
                );
            }
            (SegmentKind::File, None) => {
                return unsupported("a file".to_owned(), "set `NixlOptions::files` when the agent is made");
            }
            (SegmentKind::Dram | SegmentKind::Vram, _) => {
                return unsupported(kind.to_string(), "set `NixlOptions::peers` when the agent is made");
            }
        };
        let mut backends = self.backends.lock();
        if let Some(backend) = backends.get(plugin) {
            return Ok(backend.0);
        }
        let given = self.options.backends.iter().find(|backend| backend.name == plugin);
        let raw = self.create(plugin, given)?;
        backends.insert(plugin, RawBackend(raw));
        Ok(raw)
    }

    /// The back end that reaches peers.
    pub(super) fn backend_to_peers(&self) -> Result<Raw, AgentError> {
        if self.options.peers {
            return self.backend(SegmentKind::Dram);
        }
        let what = "an agent without peers".to_owned();
        Err(AgentError::Unsupported { what, way_out: "set `NixlOptions::peers` when the agent is made" })
    }

    fn create(&self, plugin: &str, given: Option<&BackendOptions>) -> Result<Raw, AgentError> {
        let _kept = KeptHandlers::new();
        let subject = || format!(": back end {plugin}");
        let failed = |failed: Failed| failed.about(&self.name, subject(), hint());
        let c_plugin = c_string(plugin)?;
        let parameters = Parameters::of_plugin(self.raw, &c_plugin).map_err(failed)?;
        for (key, value) in given.into_iter().flat_map(|given| &given.parameters) {
            let (key, value): (CString, CString) = (c_string(key)?, c_string(value)?);
            parameters.set(&key, &value).map_err(failed)?;
        }
        let mut raw = null_mut();
        // SAFETY: the agent and the parameters are live; the pointer is written by the call.
        let code =
            unsafe { sys::nixl_capi_create_backend(self.raw, c_plugin.as_ptr(), parameters.0, &raw mut raw) };
        check("create_backend", code).map_err(failed)?;
        Ok(raw)
    }

    /// Keeps a request and its memory until the hardware is done with it.
    pub(super) fn detach(&self, detached: Detached) {
        self.detached.lock().push(detached);
    }

    /// The end of quarantine for a request that fails now.
    pub(super) fn quarantine() -> Instant {
        deadline_after(Instant::now(), QUARANTINE)
    }

    /// Ends the detached requests that are done; how many are not.
    pub(super) fn sweep(&self) -> usize {
        let now = Instant::now();
        // NIXL is not asked under the lock.
        let mut waiting = std::mem::take(&mut *self.detached.lock());
        let over = waiting.extract_if(.., |detached| match detached.free_at {
            Some(free_at) => now >= free_at,
            None => !self.is_claimed(detached),
        });
        over.for_each(|detached| drop(detached.keep));
        let mut list = self.detached.lock();
        list.append(&mut waiting);
        list.len()
    }

    /// Whether NIXL may still use the memory. A failure starts the quarantine.
    fn is_claimed(&self, detached: &mut Detached) -> bool {
        // SAFETY: the agent and the request are live: a request is released here and nowhere else
        // once it is detached.
        let status = unsafe { sys::nixl_capi_get_xfer_status(self.raw, detached.request.0) };
        if status > 0 {
            return true;
        }
        self.release(&detached.request);
        if status < 0 {
            detached.free_at = Some(Self::quarantine());
        }
        status < 0
    }

    /// Frees a request that is over.
    pub(super) fn release(&self, request: &RawRequest) {
        // SAFETY: the agent and the request are live, and the request is used no more.
        unsafe { sys::nixl_capi_release_xfer_req(self.raw, request.0) };
        // SAFETY: as above; this frees the handle itself.
        unsafe { sys::nixl_capi_destroy_xfer_req(request.0) };
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        let deadline = deadline_after(Instant::now(), LAST_WAIT);
        while self.sweep() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = std::mem::take(&mut *self.detached.lock());
        if !left.is_empty() {
            // Their memory may still be written: neither it nor the agent is freed.
            std::mem::forget(left);
            return;
        }
        for backend in std::mem::take(&mut *self.backends.lock()).into_values() {
            // SAFETY: the handle came from `create` and is freed once; the back end itself belongs
            // to the agent.
            unsafe { sys::nixl_capi_destroy_backend(backend.0) };
        }
        // SAFETY: registrations and transfers hold this handle, so none is left.
        unsafe { sys::nixl_capi_destroy_agent(self.raw) };
    }
}

/// What makes NIXL fail without saying so.
fn hint() -> String {
    match std::env::var_os("HOME") {
        Some(home) if std::fs::read_dir(&home).is_err() => {
            format!("; HOME={} cannot be read, and UCX looks there: set HOME", home.display())
        }
        _ => String::new(),
    }
}
