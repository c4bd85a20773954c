//! What only the process knows that the manager is in.

/// An engine that uses the manager from another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminEngine {
    /// Its name.
    pub name: String,
    /// Its blocks of G1 on each rank.
    pub blocks: u32,
    /// Its processes.
    pub pids: Vec<i32>,
    /// Whether it can copy.
    pub ready: bool,
}

/// The process that a manager is in, as far as calls of operators concern it.
pub trait AdminHost: Send + Sync {
    /// Engines in other processes that are attached.
    fn engines(&self) -> Vec<AdminEngine> {
        Vec::new()
    }

    /// The pages that host memory has, in words; `None` where nobody asked for others than the
    /// system gives.
    fn host_pages(&self) -> Option<String> {
        None
    }

    /// The lowest level that the log shows (error, warn, info, debug, trace); `None` where the
    /// manager's process does not say it here.
    fn log_level(&self) -> Option<String> {
        None
    }

    /// Changes it.
    ///
    /// # Errors
    /// Why that cannot be, in words.
    fn set_log_level(&self, level: &str) -> Result<(), String> {
        Err(format!(
            "the log is not kvbm's, so its level cannot be set to '{level}' here: set it in the program that has \
             the manager (RUST_LOG, or the level of the Python logger)"
        ))
    }
}

/// A process that says nothing of itself.
pub(super) struct Unknown;

impl AdminHost for Unknown {}
