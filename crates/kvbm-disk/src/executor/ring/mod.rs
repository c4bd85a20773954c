//! A thread of its own with a ring of the kernel: up to `depth` operations at the device, without a
//! thread for each.
//!
//! The logic is in [`driver`], over the seam [`port::Port`]: [`kernel`] is io_uring, [`emulated`]
//! does the same calls by itself over a simulated medium.

mod driver;
mod emulated;
mod kernel;
mod port;
mod system_calls;
mod transfer;
mod wake_event;

pub(super) use wake_event::WakeEvent;

use super::queue::Queue;
use super::spawn;
use crate::shared::{Alive, EngineState};
use driver::Driver;
use emulated::EmulatedPort;
use kernel::KernelPort;
use port::Port;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// How long the kernel may take to set a ring up and read one page through it.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// Starts the ring's thread, or says why there is none.
pub(super) fn start(queue: &Arc<Queue>, shared: &Arc<EngineState>, alive: &Arc<Alive>) -> io::Result<()> {
    let files = &shared.slots.files;
    let fds: Option<Vec<RawFd>> = files.iter().map(|file| file.raw_fd()).collect();
    let wake_event = WakeEvent::new()?;
    let (started, outcome) = channel();
    let (theirs, queue_, shared_) = (wake_event.clone(), Arc::clone(queue), Arc::clone(shared));
    if let Some(fds) = fds {
        // The ring belongs to the thread that makes it.
        spawn("kvbm-disk-ring".to_owned(), alive, move || {
            run_kernel(&fds, &started, theirs, queue_, shared_);
        })?;
    } else if files.iter().all(|file| file.emulates_ring()) {
        let port = EmulatedPort::new(files.clone(), wake_event.clone());
        spawn("kvbm-disk-ring".to_owned(), alive, move || {
            let _ = started.send(Ok(()));
            run(port, queue_, shared_);
        })?;
    } else {
        return Err(io::Error::other("the medium has no file descriptor"));
    }
    let no_answer = |_| Err(io::Error::other("the ring's thread did not start"));
    outcome.recv_timeout(START_DEADLINE).unwrap_or_else(no_answer)?;
    queue.set_wake_event(wake_event);
    Ok(())
}

fn run_kernel(
    fds: &[RawFd],
    started: &Sender<io::Result<()>>,
    wake_event: WakeEvent,
    queue: Arc<Queue>,
    shared: Arc<EngineState>,
) {
    let probed = KernelPort::new(fds, shared.config.ring_depth(), wake_event).and_then(|mut port| {
        (0..fds.len()).try_for_each(|file| port.probe(file))?;
        Ok(port)
    });
    match probed {
        // Who no longer listens has given up on this ring.
        Ok(port) if started.send(Ok(())).is_ok() => run(port, queue, shared),
        Ok(_) => {}
        Err(error) => drop(started.send(Err(error))),
    }
}

fn run(port: impl Port, queue: Arc<Queue>, shared: Arc<EngineState>) {
    /// Without the driver, queued operations fail instead of waiting for ever.
    struct Closing(Arc<Queue>);
    impl Drop for Closing {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let closing = Closing(Arc::clone(&queue));
    Driver::new(port, queue, shared).run();
    drop(closing);
}
