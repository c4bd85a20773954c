//! The leader's end: connects to a worker's socket, and connects again when the worker was started
//! again.

use crate::connection::{Connection, LineTimes};
use crate::frame::{FrameKind, MAX_BODY, frame};
use crate::handshake::{self, HandshakeError, LeaderTerms, Timed};
use crate::peer::{Peer, ProcessState};
use crate::queue::{Lane, PushError};
use kvbm_plan::{Message, wire};
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of commands that wait for the worker; more are refused.
const QUEUE_BYTES: usize = 4 * MAX_BODY;
/// First pause before the line is tried again; it doubles up to [`LineTimes::reconnect`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// A command that was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineSendError {
    /// No worker is connected, or the one that is has not said yet that it is ready.
    #[error("no worker is ready at {}: {reason}", path.display())]
    Closed {
        /// The socket.
        path: PathBuf,
        /// What the last try came to.
        reason: String,
    },
    /// The worker has not been heard for a while.
    #[error("the worker (process {pid}) has been silent for {} ms: it is stopped or overloaded", silence.as_millis())]
    Silent {
        /// Its process.
        pid: i32,
        /// For how long.
        silence: Duration,
    },
    /// The queue is full.
    #[error("{QUEUE_BYTES} bytes of commands wait for the worker (process {pid}): no more are taken")]
    Full {
        /// Its process.
        pid: i32,
    },
}

/// How a line stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineStatus {
    /// There is no worker.
    Connecting {
        /// What the last try came to.
        reason: String,
    },
    /// The worker refuses this leader, and is asked again: settings differ, or a newer leader has
    /// been there.
    Refused {
        /// What differs.
        reason: String,
    },
    /// A worker is connected.
    Connected {
        /// Its process.
        pid: i32,
        /// Whether commands reach it.
        is_open: bool,
        /// For how long it has not been heard.
        silence: Duration,
    },
}

/// A line to the worker of one rank, which outlives the worker's process.
///
/// What was sent to one process never reaches the next one. Commands to a worker are refused until
/// its [`Message::Ready`] is about to be given to the sink: so the leader counts the starts of all
/// workers that it has sent anything to.
pub struct LeaderLine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Where messages of the worker go, in wire form. Called on the line's thread.
type Sink = Box<dyn Fn(Vec<u8>) + Send + Sync>;

/// What is called when the line to a process has ended, on the line's thread.
type OnEnd = Box<dyn Fn(ProcessState) + Send + Sync>;

struct Shared {
    path: PathBuf,
    terms: LeaderTerms,
    times: LineTimes,
    sink: Sink,
    on_end: OnEnd,
    state: Mutex<LineState>,
    /// The line is to end.
    ended: Condvar,
}

#[derive(Default)]
struct LineState {
    connection: Option<Arc<Connection>>,
    /// Whether commands go to the worker that is connected.
    is_open: bool,
    reason: String,
    /// The last try was refused, for a reason that time does not change.
    is_refused: bool,
    ending: bool,
}

impl LeaderLine {
    /// A line to the worker that listens, or will listen, at `path`. Returns at once; messages go
    /// to `sink`. `on_end` is called each time when a connection has ended, before the next one is
    /// tried.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn connect(
        path: &Path,
        terms: LeaderTerms,
        times: LineTimes,
        sink: impl Fn(Vec<u8>) + Send + Sync + 'static,
        on_end: impl Fn(ProcessState) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let state = LineState { reason: "not tried yet".into(), ..LineState::default() };
        let (path, state, ended) = (path.to_owned(), Mutex::new(state), Condvar::new());
        let (sink, on_end) = (Box::new(sink), Box::new(on_end));
        let shared = Arc::new(Shared { path, terms, times, sink, on_end, state, ended });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvbm-link-lead".into()).spawn(move || own.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a command in wire form. Never waits.
    ///
    /// # Errors
    /// [`LineSendError`]: the command reaches no worker.
    pub fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LineSendError> {
        let state = self.shared.state.lock();
        let closed = |reason: &str| LineSendError::Closed {
            path: self.shared.path.clone(),
            reason: reason.to_owned(),
        };
        let Some(line) = &state.connection else { return Err(closed(&state.reason)) };
        if !state.is_open {
            return Err(closed("its worker is not ready yet"));
        }
        if line.is_silent() {
            return Err(LineSendError::Silent { pid: line.peer.pid, silence: line.silence() });
        }
        line.queue.push(lane, frame(FrameKind::Body, command)).map_err(|error| match error {
            PushError::Full => LineSendError::Full { pid: line.peer.pid },
            PushError::Closed => closed("the worker is gone"),
        })
    }

    /// How the line stands.
    pub fn status(&self) -> LineStatus {
        let state = self.shared.state.lock();
        match &state.connection {
            None if state.is_refused => LineStatus::Refused { reason: state.reason.clone() },
            None => LineStatus::Connecting { reason: state.reason.clone() },
            Some(line) => {
                LineStatus::Connected { pid: line.peer.pid, is_open: state.is_open, silence: line.silence() }
            }
        }
    }
}

impl Drop for LeaderLine {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.ending = true;
        if let Some(line) = &state.connection {
            line.close();
        }
        drop(state);
        self.shared.ended.notify_all();
        let thread = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(thread) = thread {
            // A sink that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for LeaderLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaderLine({}, {:?})", self.shared.path.display(), self.status())
    }
}

impl Shared {
    /// Connects, serves the connection, and connects again, until the line ends.
    fn run(&self) {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.try_connect() {
                Ok(line) => {
                    pause = FIRST_PAUSE;
                    if !self.serve(&line) {
                        return;
                    }
                }
                Err(error) => self.note(&error),
            }
            let mut state = self.state.lock();
            if !state.ending {
                self.ended.wait_until(&mut state, kvbm_plan::deadline_after(Instant::now(), pause));
            }
            if state.ending {
                return;
            }
            pause = (pause * 2).min(self.times.reconnect.max(FIRST_PAUSE));
        }
    }

    fn try_connect(&self) -> Result<Arc<Connection>, HandshakeError> {
        let stream = UnixStream::connect(&self.path)?;
        let peer = Peer::of(&stream)?;
        peer.expect_same_user()?;
        handshake::offer(&mut Timed::new(&stream, self.times.handshake), &self.terms)?;
        Ok(Arc::new(Connection::new(stream, peer, self.times, QUEUE_BYTES)?))
    }

    /// The reason is logged when it changes, not at every try.
    fn note(&self, error: &HandshakeError) {
        let reason = error.to_string();
        let mut state = self.state.lock();
        // A leader that is still being served goes some time.
        state.is_refused =
            matches!(error, HandshakeError::Refused { field, .. } if field != handshake::SERVED);
        if state.reason != reason {
            tracing::warn!(path = %self.path.display(), rank = self.terms.rank.0, "no line to the worker: {reason}");
            state.reason = reason;
        }
    }

    /// Reads messages until the connection ends. `false` when the line ends.
    fn serve(&self, line: &Arc<Connection>) -> bool {
        {
            let mut state = self.state.lock();
            if state.ending {
                return false;
            }
            state.connection = Some(Arc::clone(line));
            (state.is_open, state.is_refused) = (false, false);
        }
        tracing::info!(path = %self.path.display(), pid = line.peer.pid, "connected to the worker of rank {}", self.terms.rank.0);
        let mut is_ready = false;
        let error = std::thread::scope(|scope| {
            let writer = std::thread::Builder::new().name("kvbm-link-send".into());
            if let Err(error) = writer.spawn_scoped(scope, || line.write()) {
                line.close();
                return error;
            }
            line.read(|message| {
                if !is_ready && matches!(wire::decode_message(&message), Ok(Message::Ready { .. })) {
                    is_ready = true;
                    // Before the sink: the leader may answer its `Ready` at once.
                    self.state.lock().is_open = true;
                }
                (self.sink)(message);
            })
        });
        let process = line.process_state();
        let mut state = self.state.lock();
        state.connection = None;
        state.is_open = false;
        state.reason = format!("the line to process {} ended: {error}", line.peer.pid);
        let goes_on = !state.ending;
        drop(state);
        if goes_on {
            (self.on_end)(process);
        }
        goes_on
    }
}
