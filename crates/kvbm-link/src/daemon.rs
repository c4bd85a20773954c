//! The node daemon's end: listens, and serves many processes at a time.

use crate::attach::{self, AttachError};
use crate::connection::{Connection, LineTimes};
use crate::frame::{FrameKind, MAX_BODY, frame};
use crate::peer::{Peer, ProcessState};
use crate::queue::{Lane, PushError};
use crate::socket_file::SocketFile;
use crate::timed::Timed;
use crate::worker::BindError;
use kvbm_plan::{LogLimit, clock};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most sessions, and processes that are about to have one.
const MAX_SESSIONS: usize = 256;
/// Bytes that wait for one process.
const QUEUE_BYTES: usize = 4 * MAX_BODY;
/// How often a listener looks whether it was stopped.
const TICK: Duration = Duration::from_millis(100);
/// How long a listener that stops waits for its sessions to end.
const STOP_TIME: Duration = Duration::from_secs(5);

/// Bytes that do not reach a process, or the daemon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachedSendError {
    /// The line has ended.
    #[error("the line to process {pid} has ended")]
    Closed {
        /// The process at the other end.
        pid: i32,
    },
    /// It has sent nothing for a while.
    #[error("process {pid} has been silent for {} ms: it is stopped or overloaded", silence.as_millis())]
    Silent {
        /// The process at the other end.
        pid: i32,
        /// For how long.
        silence: Duration,
    },
    /// The queue is full.
    #[error("{QUEUE_BYTES} bytes wait for process {pid}: no more are taken")]
    Full {
        /// The process at the other end.
        pid: i32,
    },
}

/// Sends to the process at the other end of an attached line. Clones are the same line.
#[derive(Clone)]
pub struct AttachedSender(pub(crate) Arc<Connection>);

impl AttachedSender {
    /// Sends bytes, or queues them; never waits. It may call the system: hold no lock.
    ///
    /// # Errors
    /// [`AttachedSendError`]: they reach nobody.
    pub fn send(&self, lane: Lane, bytes: &[u8]) -> Result<(), AttachedSendError> {
        let pid = self.0.peer.pid();
        if self.0.is_silent() {
            return Err(AttachedSendError::Silent { pid, silence: self.0.silence() });
        }
        self.0.send(lane, frame(FrameKind::Body, bytes)).map_err(|error| match error {
            PushError::Full => AttachedSendError::Full { pid },
            PushError::Closed => AttachedSendError::Closed { pid },
        })
    }

    /// Sends an answer, or queues it; waits for room until the line ends. For the thread that reads
    /// questions: who does not read the answers asks no more.
    pub fn answer(&self, bytes: &[u8]) {
        let _gone = self.0.send_when_room(frame(FrameKind::Body, bytes));
    }

    /// Ends the line: its session ends.
    pub fn close(&self) {
        self.0.close();
    }

    /// The process at the other end.
    pub fn pid(&self) -> i32 {
        self.0.peer.pid()
    }

    /// Whether that process has ended; waits for its end, `time` at most (less than a second).
    pub fn process(&self, time: Duration) -> ProcessState {
        self.0.peer.state(time)
    }
}

/// A process that is attached.
pub struct Attachment {
    /// The first message to it.
    pub welcome: Vec<u8>,
    /// What it gets with that, at most 64.
    pub files: Vec<OwnedFd>,
    /// What serves it.
    pub session: Box<dyn AttachedSession>,
}

/// What a node daemon does for processes that attach.
pub trait AttachService: Send + Sync {
    /// A process attaches with these terms; `out` sends to it, once it was welcomed.
    ///
    /// # Errors
    /// A text for the process: why it is refused.
    fn attach(&self, terms: &[u8], out: AttachedSender) -> Result<Attachment, String>;
}

/// A process that is being served.
pub trait AttachedSession: Send {
    /// Takes what it sent.
    ///
    /// # Errors
    /// A text for the log: the bytes mean nothing. The line is closed.
    fn take(&mut self, bytes: &[u8]) -> Result<(), String>;

    /// The line has ended. May wait for as long as the process can still write to memory that it
    /// was given.
    fn end(self: Box<Self>);
}

/// A node daemon's socket.
pub struct AttachListener {
    socket: SocketFile,
    times: LineTimes,
    stop: Arc<AtomicBool>,
}

/// What all threads of a listener share.
struct Open {
    service: Arc<dyn AttachService>,
    times: LineTimes,
    sessions: AtomicUsize,
    lines: Mutex<Vec<AttachedSender>>,
    /// A process that connects again and again must not fill the log.
    log_limit: LogLimit<&'static str>,
}

impl AttachListener {
    /// Listens at `path`: the socket has mode 0600, and its folder is created with mode 0700 where
    /// it is absent. The file of a process that is gone is replaced.
    ///
    /// # Errors
    /// [`BindError`], also where another process listens there or others can write to the folder.
    pub fn bind(path: &Path, times: LineTimes) -> Result<Self, BindError> {
        let wrong = |source| BindError { path: path.to_owned(), source };
        let socket = SocketFile::bind(path).map_err(wrong)?;
        Ok(Self { socket, times, stop: Arc::default() })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Ends [`serve`](Self::serve) when it is called, from any thread.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        let stop = Arc::clone(&self.stop);
        move || stop.store(true, Ordering::Release)
    }

    /// Serves processes until it is stopped, each on threads of its own. Lines are closed when it
    /// returns; sessions whose process cannot answer may still be ending.
    pub fn serve(&self, service: &Arc<dyn AttachService>) {
        let open = Arc::new(Open {
            service: Arc::clone(service),
            times: self.times,
            sessions: AtomicUsize::new(0),
            lines: Mutex::default(),
            log_limit: LogLimit::default(),
        });
        while !self.stop.load(Ordering::Acquire) {
            self.wait();
            match self.socket.listener.accept() {
                Ok((stream, _)) => open.accept(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    if let Some(suppressed) = open.log_limit.allow("accept", clock::now()) {
                        tracing::warn!(path = %self.path().display(), suppressed, "cannot accept a process: {error}");
                    }
                    // Out of descriptors, for example: it may pass.
                    std::thread::sleep(TICK);
                }
            }
        }
        open.lines.lock().iter().for_each(AttachedSender::close);
        let until = Instant::now() + STOP_TIME;
        while open.sessions.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait(&self) {
        let mut fds = [PollFd::new(&self.socket.listener, PollFlags::IN)];
        let time = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&time));
    }
}

/// A place among the sessions.
struct Place(Arc<Open>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Open {
    /// Serves each connection on a thread of its own, so that a silent one delays no other.
    fn accept(self: &Arc<Self>, stream: UnixStream) {
        if self.sessions.fetch_add(1, Ordering::AcqRel) >= MAX_SESSIONS {
            self.sessions.fetch_sub(1, Ordering::AcqRel);
            if let Some(suppressed) = self.log_limit.allow("full", clock::now()) {
                tracing::warn!(suppressed, "a process is not served: {MAX_SESSIONS} are");
            }
            return;
        }
        let place = Place(Arc::clone(self));
        let thread = std::thread::Builder::new().name("kvbm-attached".into());
        let serve = move || {
            let Err(error) = place.0.shake_hands(stream) else { return };
            if let Some(suppressed) = place.0.log_limit.allow("handshake", clock::now()) {
                tracing::warn!(suppressed, "a process was not attached: {error}");
            }
        };
        if let Err(error) = thread.spawn(serve) {
            tracing::error!("cannot start a thread for a process: {error}");
        }
    }

    /// The handshake, and what follows it.
    fn shake_hands(&self, stream: UnixStream) -> Result<(), AttachError> {
        stream.set_nonblocking(false)?;
        let peer = Peer::of(&stream)?;
        peer.expect_same_user()?;
        let copy = stream.try_clone()?;
        let mut line = Timed::new(&copy, self.times.handshake);
        let terms = match attach::read_offer(&mut line)? {
            Ok(terms) => terms,
            Err(reason) => return attach::refuse(&mut line, &reason),
        };
        let connection = Arc::new(Connection::new(stream, peer, self.times, QUEUE_BYTES)?);
        let sender = AttachedSender(Arc::clone(&connection));
        let Attachment { welcome, files, session } = match self.service.attach(&terms, sender.clone()) {
            Ok(attachment) => attachment,
            Err(reason) => {
                if let Some(suppressed) = self.log_limit.allow("refuse", clock::now()) {
                    tracing::warn!(pid = connection.peer.pid(), suppressed, "refused a process: {reason}");
                }
                return attach::refuse(&mut line, &reason);
            }
        };
        // The service may have taken longer than a handshake does.
        let welcomed = attach::welcome(&mut Timed::new(&copy, self.times.handshake), &welcome, &files);
        drop(files);
        self.lines.lock().push(sender);
        if welcomed.is_ok() {
            serve(&connection, session);
        } else {
            connection.close();
            session.end();
        }
        self.lines.lock().retain(|known| !Arc::ptr_eq(&known.0, &connection));
        welcomed
    }
}

/// One process, from its first message to the end of its session.
fn serve(line: &Arc<Connection>, mut session: Box<dyn AttachedSession>) {
    std::thread::scope(|scope| {
        let writer = std::thread::Builder::new().name("kvbm-attached-send".into());
        if let Err(error) = writer.spawn_scoped(scope, || line.write()) {
            tracing::error!("cannot start a thread for a process: {error}");
            line.close();
        }
        let ended = line.read(|bytes| {
            if let Err(error) = session.take(&bytes) {
                tracing::error!(pid = line.peer.pid(), "a process sent what means nothing: {error}");
                line.close();
            }
        });
        tracing::info!(pid = line.peer.pid(), "the line to an attached process ended: {ended}");
        session.end();
    });
}
