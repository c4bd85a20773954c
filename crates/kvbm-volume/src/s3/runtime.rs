//! A runtime on a thread of its own. Callers block, with or without a runtime of their own.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// How much later than its deadline a call may come back: work ends itself at its deadline.
const GRACE: Duration = Duration::from_secs(1);

/// Runs futures for callers that block.
#[derive(Debug)]
pub(super) struct Runtime {
    handle: Handle,
    /// Dropped with the volume, which ends the thread.
    _stop: oneshot::Sender<()>,
}

impl Runtime {
    pub(super) fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let drive = move || {
            // An error says that the volume is gone, which is what is waited for.
            let _gone = runtime.block_on(stopped);
            runtime.shutdown_timeout(GRACE);
        };
        std::thread::Builder::new().name(name.into()).spawn(drive)?;
        Ok(Self { handle, _stop: stop })
    }

    /// Runs `work` and waits for it, at most until shortly after `deadline`.
    pub(super) fn run<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (done, result) = mpsc::sync_channel(1);
        let task = self.handle.spawn(async move {
            // Nobody waits any more where this fails.
            let _late = done.send(work.await);
        });
        let patience = deadline.saturating_duration_since(Instant::now()) + GRACE;
        let result = result.recv_timeout(patience).ok();
        if result.is_none() {
            task.abort();
        }
        result
    }
}
