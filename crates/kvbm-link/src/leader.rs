//! The leader's end: connects to a worker, and connects again when the worker was started
//! again.

use crate::address::WorkerAddress;
use crate::connection::{Connection, LineTimes};
use crate::frame::{FrameKind, MAX_BODY, frame};
use crate::handshake::{self, HandshakeError, LeaderTerms};
use crate::listener;
use crate::peer::{PeerId, ProcessState};
use crate::queue::{Lane, PushError};
use crate::timed::Timed;
use kvbm_plan::{Message, wire};
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::io;
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
    #[error("no worker is ready at {address}: {reason}")]
    Closed {
        /// Where it is to listen.
        address: String,
        /// What the last try came to.
        reason: String,
    },
    /// The worker has sent nothing for a while.
    #[error("the worker ({peer}) has been silent for {} ms: it is stopped or overloaded", silence.as_millis())]
    Silent {
        /// Its process or address.
        peer: PeerId,
        /// For how long.
        silence: Duration,
    },
    /// The queue is full.
    #[error("{QUEUE_BYTES} bytes of commands wait for the worker ({peer}): no more are taken")]
    Full {
        /// Its process or address.
        peer: PeerId,
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
    /// The worker refuses this leader, and is asked again: settings or certificates do not fit, or
    /// a newer leader has been there.
    Refused {
        /// What differs.
        reason: String,
    },
    /// A worker is connected.
    Connected {
        /// Its process or address.
        peer: PeerId,
        /// Whether commands reach it.
        is_open: bool,
        /// For how long it has not been heard.
        silence: Duration,
    },
}

/// A line to the worker of one rank, which outlives the worker's process.
///
/// What was sent to one process never reaches the next one. Commands to a worker are refused until
/// its [`Message::Ready`] is about to be given to the sink. So the leader counts the starts of all
/// workers that it has sent anything to.
pub struct LeaderLine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Where messages of the worker go, in wire form. Called on the line's thread.
type Sink = Box<dyn Fn(Vec<u8>) + Send + Sync>;

/// What a leader is notified of about a worker, beside its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerNotice {
    /// It is about to end, and waits for so long until it is dismissed
    /// ([`LeaderLine::dismiss`]): save what only it holds.
    Leaves(Duration),
    /// The line to its process has ended; the next one is not tried yet.
    Ended(ProcessState),
}

/// Where notices go. Called on the line's thread: what takes time is done elsewhere.
type OnNotice = Box<dyn Fn(WorkerNotice) + Send + Sync>;

struct Shared {
    address: WorkerAddress,
    terms: LeaderTerms,
    times: LineTimes,
    sink: Sink,
    on_notice: OnNotice,
    state: Mutex<LineState>,
    /// The line is to end.
    ended: Condvar,
}

/// Why no worker is connected.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Absence {
    #[default]
    Unexpected,
    /// The last try was refused, for a reason that time does not change.
    Refused,
    /// The worker was told that it may end.
    Dismissed,
}

#[derive(Default)]
struct LineState {
    connection: Option<Arc<Connection>>,
    /// Whether commands go to the worker that is connected.
    is_open: bool,
    reason: String,
    absence: Absence,
    ending: bool,
}

impl LeaderLine {
    /// A line to the worker that listens, or will listen, at `address`. Returns at once; messages
    /// go to `sink`, and what else is heard of the worker to `on_notice`.
    ///
    /// # Errors
    /// A certificate of this end cannot be used; the system refuses a thread.
    pub fn connect(
        address: impl Into<WorkerAddress>,
        terms: LeaderTerms,
        times: LineTimes,
        sink: impl Fn(Vec<u8>) + Send + Sync + 'static,
        on_notice: impl Fn(WorkerNotice) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let state = LineState { reason: "not tried yet".into(), ..LineState::default() };
        let address = address.into();
        listener::check(&address)?;
        let (state, ended) = (Mutex::new(state), Condvar::new());
        let (sink, on_notice) = (Box::new(sink), Box::new(on_notice));
        let shared = Arc::new(Shared { address, terms, times, sink, on_notice, state, ended });
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
            address: self.shared.address.to_string(),
            reason: reason.to_owned(),
        };
        let Some(line) = &state.connection else { return Err(closed(&state.reason)) };
        if !state.is_open {
            return Err(closed("its worker is not ready yet"));
        }
        if line.is_silent() {
            return Err(LineSendError::Silent { peer: line.peer.id, silence: line.silence() });
        }
        line.queue.push(lane, frame(FrameKind::Body, command)).map_err(|error| match error {
            PushError::Full => LineSendError::Full { peer: line.peer.id },
            PushError::Closed => closed("the worker is gone"),
        })
    }

    /// Tells the worker that is connected that it may end. One that has not said that it is about
    /// to ([`WorkerNotice::Leaves`]) serves on: it is the successor of one that has.
    pub fn dismiss(&self) {
        let mut state = self.shared.state.lock();
        let Some(line) = state.connection.clone() else { return };
        // Before the worker knows: its end may come at once.
        let before = state.absence;
        state.absence = Absence::Dismissed;
        drop(state);
        if !line.dismiss() {
            self.shared.state.lock().absence = before;
        }
    }

    /// How the line stands.
    pub fn status(&self) -> LineStatus {
        let state = self.shared.state.lock();
        match &state.connection {
            None if state.absence == Absence::Refused => LineStatus::Refused { reason: state.reason.clone() },
            None => LineStatus::Connecting { reason: state.reason.clone() },
            Some(line) => {
                LineStatus::Connected { peer: line.peer.id, is_open: state.is_open, silence: line.silence() }
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
        write!(f, "LeaderLine({}, {:?})", self.shared.address, self.status())
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
        let (stream, peer) = listener::connect(&self.address, self.times.handshake)?;
        handshake::offer(&mut Timed::new(&stream, self.times.handshake), &self.terms)?;
        Ok(Arc::new(Connection::new(stream, peer, self.times, QUEUE_BYTES)?))
    }

    /// The reason is logged when it changes, not at every try.
    fn note(&self, error: &HandshakeError) {
        let reason = error.to_string();
        let mut state = self.state.lock();
        match state.absence {
            _ if error.is_refusal() => state.absence = Absence::Refused,
            Absence::Dismissed => {}
            _ => state.absence = Absence::Unexpected,
        }
        if state.reason != reason {
            let rank = self.terms.rank.0;
            if state.absence == Absence::Dismissed {
                tracing::info!(address = %self.address, rank, "no line to the worker, which has ended: {reason}");
            } else {
                tracing::warn!(address = %self.address, rank, "no line to the worker: {reason}");
            }
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
            (state.is_open, state.absence) = (false, Absence::Unexpected);
        }
        tracing::info!(address = %self.address, peer = %line.peer.id, "connected to the worker of rank {}", self.terms.rank.0);
        let mut is_ready = false;
        let error = std::thread::scope(|scope| {
            let writer = std::thread::Builder::new().name("kvbm-link-send".into());
            if let Err(error) = writer.spawn_scoped(scope, || line.write()) {
                line.close();
                return error;
            }
            let on_leave = |patience| (self.on_notice)(WorkerNotice::Leaves(patience));
            let on_message = |message: Vec<u8>| {
                if !is_ready && matches!(wire::decode_message(&message), Ok(Message::Ready { .. })) {
                    is_ready = true;
                    // Before the sink: the leader may answer its `Ready` at once.
                    self.state.lock().is_open = true;
                }
                (self.sink)(message);
            };
            line.read_and_watch(on_message, Some(&on_leave))
        });
        let process = line.process_state();
        let mut state = self.state.lock();
        state.connection = None;
        state.is_open = false;
        state.reason = format!("the line to {} ended: {error}", line.peer.id);
        let goes_on = !state.ending;
        drop(state);
        if goes_on {
            (self.on_notice)(WorkerNotice::Ended(process));
        }
        goes_on
    }
}
