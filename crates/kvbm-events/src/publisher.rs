//! A manager that pumps itself on a thread.

#![cfg_attr(kvbm_sim, allow(dead_code, unused_imports, reason = "a simulation has no threads"))]

use crate::commands::Command;
use crate::deadline;
use crate::{EventManager, PublisherStats, PublisherWaker, Pumped, TransportError};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// Why a flush did not publish everything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// The transport did not take the events; they are kept and tried again.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Time is over; the thread goes on.
    #[error("event publisher did not flush within {0:?}: it goes on in the background; allow more time")]
    TimedOut(Duration),
    /// The thread has ended, by a panic in a source or in the transport.
    #[error("event publisher has stopped: a source or the transport panicked; build a new one")]
    Stopped,
}

/// Publishes on a thread of its own. Dropping it publishes what is left, within the manager's
/// publish timeout, and never waits much longer than that.
pub struct Publisher {
    waker: PublisherWaker,
    stop: Arc<AtomicBool>,
    stats: Arc<Mutex<PublisherStats>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
    thread: ThreadId,
    patience: Duration,
    /// Pumped by [`flush`](Self::flush): a simulation has no threads.
    #[cfg(kvbm_sim)]
    inline: Mutex<EventManager>,
}

/// How long an event of a source that wakes nobody waits at most until it is looked for.
const LONGEST_TICK: Duration = Duration::from_millis(5);

/// Commands that may wait; a wake-up that finds no room is not needed.
const COMMANDS: usize = 16;

impl EventManager {
    /// Pumps on a thread of its own until the [`Publisher`] is dropped.
    pub fn spawn(self) -> std::io::Result<Publisher> {
        Publisher::start(self)
    }
}

impl Publisher {
    #[cfg(kvbm_sim)]
    fn start(manager: EventManager) -> std::io::Result<Self> {
        let (commands, _) = bounded(0);
        let (_, ended) = bounded(0);
        let waker = PublisherWaker(commands);
        let stats = Arc::new(Mutex::new(manager.stats()));
        let (stop, thread) = (Arc::default(), std::thread::current().id());
        let inline = Mutex::new(manager);
        Ok(Self { waker, stop, stats, ended, thread, patience: Duration::ZERO, inline })
    }

    #[cfg(not(kvbm_sim))]
    fn start(mut manager: EventManager) -> std::io::Result<Self> {
        let (commands, inbox) = bounded(COMMANDS);
        let waker = PublisherWaker(commands);
        manager.attach(&waker);
        let (end, ended) = bounded::<()>(0);
        let stop = Arc::new(AtomicBool::new(false));
        let stats = Arc::new(Mutex::new(manager.stats()));
        let patience = manager.config().publish_timeout.saturating_add(Duration::from_millis(500));
        let worker = Worker { manager, inbox, stop: Arc::clone(&stop), stats: Arc::clone(&stats), _end: end };
        let thread =
            std::thread::Builder::new().name("kvbm-events".into()).spawn(move || worker.run())?.thread().id();
        Ok(Self { waker, stop, stats, ended, thread, patience })
    }

    /// Asks for a pump now, for example because a ring is half full. Never waits.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// What wakes the thread from elsewhere.
    pub fn waker(&self) -> PublisherWaker {
        self.waker.clone()
    }

    /// Publishes everything that the sources hold now.
    #[cfg(kvbm_sim)]
    pub fn flush(&self, timeout: Duration) -> Result<(), FlushError> {
        let mut manager = self.inline.lock();
        let flushed = manager.flush(timeout);
        *self.stats.lock() = manager.stats();
        let backlog = flushed?.backlog;
        if backlog { Err(FlushError::TimedOut(timeout)) } else { Ok(()) }
    }

    /// Publishes everything that the sources hold now.
    #[cfg(not(kvbm_sim))]
    pub fn flush(&self, timeout: Duration) -> Result<(), FlushError> {
        let deadline = deadline::after(timeout);
        let (answer, answered) = bounded(1);
        match self.waker.0.send_timeout(Command::Flush { timeout, answer }, timeout) {
            Ok(()) => {}
            Err(crossbeam_channel::SendTimeoutError::Timeout(_)) => {
                return Err(FlushError::TimedOut(timeout));
            }
            Err(crossbeam_channel::SendTimeoutError::Disconnected(_)) => return Err(self.stopped(deadline)),
        }
        match answered.recv_deadline(deadline) {
            Ok(Ok(backlog)) if !backlog => Ok(()),
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(_)) | Err(RecvTimeoutError::Timeout) => Err(FlushError::TimedOut(timeout)),
            Err(RecvTimeoutError::Disconnected) => Err(self.stopped(deadline)),
        }
    }

    /// The thread is unwinding: waits for its end, so that `is_running` agrees with the error.
    #[cfg(not(kvbm_sim))]
    fn stopped(&self, deadline: Instant) -> FlushError {
        // Ended or out of time: the answer is the same.
        let _ = self.ended.recv_deadline(deadline);
        FlushError::Stopped
    }

    /// Counters as of the last pump.
    pub fn stats(&self) -> PublisherStats {
        *self.stats.lock()
    }

    /// Whether the thread is alive. It ends early only by a panic in a source or in the transport.
    pub fn is_running(&self) -> bool {
        !matches!(self.ended.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected))
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
        // A source that drops the publisher from inside its own drain must not wait for itself.
        if std::thread::current().id() != self.thread {
            // Ends by disconnection or by time: either way there is nothing more to do.
            let _ = self.ended.recv_timeout(self.patience);
        }
    }
}

struct Worker {
    manager: EventManager,
    inbox: Receiver<Command>,
    stop: Arc<AtomicBool>,
    stats: Arc<Mutex<PublisherStats>>,
    _end: Sender<()>,
}

impl Worker {
    fn run(mut self) {
        let config = *self.manager.config();
        let tick = (config.max_age / 2).min(config.heartbeat).clamp(Duration::from_millis(1), LONGEST_TICK);
        let mut rest = Duration::ZERO;
        while !self.stop.load(Ordering::Acquire) {
            let pumped = match self.inbox.recv_timeout(rest) {
                Ok(Command::Flush { timeout, answer }) => {
                    let done = self.manager.flush(timeout);
                    self.show();
                    // Nobody listens any more when its time was over.
                    let _ = answer.try_send(done.clone().map(|pumped| pumped.backlog));
                    done
                }
                Ok(Command::Wake) | Err(RecvTimeoutError::Timeout) => self.manager.pump(Instant::now()),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.show();
            rest = match pumped {
                Ok(Pumped { backlog: true, .. }) => Duration::ZERO,
                Ok(_) => self.manager.rest(Instant::now(), tick),
                // An unavailable transport is counted and tried again after a tick.
                Err(_) => tick,
            };
        }
        // What cannot be published now is lost with its source; followers see the restart.
        let _ = self.manager.flush(config.publish_timeout);
        self.show();
    }

    fn show(&self) {
        *self.stats.lock() = self.manager.stats();
    }
}
