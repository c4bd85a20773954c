//! What moves the bytes of G3 with `disk.engine = "nixl"`: agents of NIXL for files.

use crate::config::{Config, NixlFiles};
use kvbm_disk::SlotIo;
use kvbm_nixl::{AgentError, Availability, BackendOptions, FileBackend, NixlOptions, RemoteAgent};
use kvbm_plan::Rank;
use kvbm_transfer::AgentIo;
use std::sync::Arc;

/// I/O that NIXL's back end POSIX has room for in an agent, which does one transfer at a time. Its
/// default takes eight megabytes of each agent.
const POSIX_IOS: &str = "256";
/// Of those, how many the kernel has at a time. All agents of a machine share `fs.aio-max-nr`.
const KERNEL_IOS: &str = "64";

/// NIXL cannot move the bytes of G3.
#[derive(Debug, thiserror::Error)]
#[error(
    "disk.engine is \"nixl\" and disk.nixl_backend is \"{backend}\": {reason}; or set disk.engine to \"auto\""
)]
pub struct NoNixl {
    backend: FileBackend,
    reason: String,
}

/// What moves the bytes of G3 of `rank` with `disk.engine = "nixl"`, by `disk.nixl_backend` and
/// `remote.library`. An agent was made to see whether the back end works.
///
/// # Errors
/// What is missing, and what installs it.
pub fn nixl_slot_io(config: &Config, rank: Rank) -> Result<Arc<dyn SlotIo>, NoNixl> {
    let backend = match config.disk.nixl_backend {
        NixlFiles::Posix => FileBackend::Posix,
        NixlFiles::GdsMt => FileBackend::GdsMt,
    };
    let options = options(config, backend);
    let refused = |reason: String| NoNixl { backend, reason };
    let library = match options.probe() {
        Availability::Ready { library } => library,
        missing => return Err(refused(missing.to_string())),
    };
    // A plugin that NIXL lists may not load: only a back end that was made is there.
    let tried = agent(&options, rank).map_err(|error| refused(explained(backend, &error)))?;
    drop(tried);
    let what = format!("NIXL's back end {backend} of {}", library.display());
    // Memory can be registered with a GPU's driver once only.
    let one_agent = backend != FileBackend::Posix;
    Ok(Arc::new(AgentIo::new("nixl", what, one_agent, Box::new(move || agent(&options, rank)))))
}

fn options(config: &Config, backend: FileBackend) -> NixlOptions {
    let mut options = NixlOptions::new("disk");
    options.library.clone_from(&config.remote.library);
    (options.files, options.peers) = (Some(backend), false);
    if backend == FileBackend::Posix {
        let parameters =
            [("ios_pool_size", POSIX_IOS), ("kernel_queue_size", KERNEL_IOS), ("use_aio", "true")];
        let parameters = parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        options.backends.push(BackendOptions { name: backend.name().to_owned(), parameters });
    }
    options
}

/// What else a failure may mean.
fn explained(backend: FileBackend, error: &AgentError) -> String {
    match backend {
        FileBackend::Posix => format!("{error}; it needs free places in /proc/sys/fs/aio-max-nr"),
        FileBackend::GdsMt => {
            format!("{error}; it needs an NVIDIA GPU, its driver, and GPUDirect Storage (libcufile)")
        }
    }
}

#[cfg(feature = "nixl")]
fn agent(options: &NixlOptions, rank: Rank) -> Result<Arc<dyn RemoteAgent>, AgentError> {
    use std::sync::atomic::{AtomicU64, Ordering};

    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let agent_name = format!("kvbm-disk-{}-{rank}-{number}", std::process::id());
    let options = NixlOptions { agent_name, ..options.clone() };
    Ok(Arc::new(kvbm_nixl::NixlAgent::new(&options)?))
}

#[cfg(not(feature = "nixl"))]
fn agent(options: &NixlOptions, _rank: Rank) -> Result<Arc<dyn RemoteAgent>, AgentError> {
    Err(AgentError::Unavailable(options.probe().to_string()))
}
