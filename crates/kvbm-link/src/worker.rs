//! The worker's end: listens, and serves one leader at a time.

use crate::address::WorkerAddress;
use crate::connection::{Connection, LineTimes};
use crate::frame::{FrameKind, MAX_BODY, frame};
use crate::handshake::{self, HandshakeError, LeaderTerms, Refusal, WorkerTerms};
use crate::listener::{Listener, UnverifiedConnection};
use crate::peer::{Peer, PeerId};
use crate::pending::{ConnectionPermit, PendingConnections};
use crate::timed::Timed;
use kvbm_plan::{Epoch, LogLimit, clock};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, Scope};
use std::time::{Duration, Instant};

/// Bytes of messages that wait for the leader; who sends more waits.
const QUEUE_BYTES: usize = 4 * MAX_BODY;
/// Handshakes at a time.
const MAX_HANDSHAKES: usize = 32;
/// How often a listener looks whether it was stopped.
const TICK: Duration = Duration::from_millis(100);

/// A place that cannot be listened at.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {}: {source}", path.display())]
pub struct BindError {
    /// The path, or the address.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The leader that a session serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderInfo {
    /// Its process or address.
    pub peer: PeerId,
    /// What it offered.
    pub terms: LeaderTerms,
}

/// What a worker does for each leader.
pub trait Service: Send + Sync {
    /// Starts serving a leader. Messages go to `out`. The session before has ended.
    ///
    /// # Errors
    /// A text for the log and for the leader; the line is closed, and the leader tries again.
    fn start(&self, leader: &LeaderInfo, out: MessageSender) -> Result<Box<dyn Session>, String>;
}

/// A leader that is being served.
pub trait Session: Send {
    /// Takes a command in wire form.
    ///
    /// # Errors
    /// A text for the log: the bytes are no command. The line is closed.
    fn command(&mut self, bytes: &[u8]) -> Result<(), String>;

    /// The leader is gone. Returns when nothing can write to the memory that commands name any
    /// more.
    fn end(self: Box<Self>);
}

/// Sends messages to the leader of a session.
#[derive(Clone)]
pub struct MessageSender(Arc<Connection>);

impl MessageSender {
    /// Sends a message in wire form; waits for room in the queue. A message to a leader that is
    /// gone is dropped: the next one learns everything from its own session.
    pub fn send(&self, message: &[u8]) {
        let _gone = self.0.send_when_room(frame(FrameKind::Body, message));
    }
}

/// Where a worker listens.
pub struct WorkerListener {
    listener: Listener,
    address: WorkerAddress,
    terms: WorkerTerms,
    times: LineTimes,
    stop: Arc<AtomicBool>,
    /// That of the leader that is served.
    line: Mutex<Weak<Connection>>,
}

/// What is served now, and what was.
#[derive(Default)]
struct Serving {
    now: Option<(Arc<Connection>, JoinHandle<()>)>,
    /// Epoch of the last leader.
    last: Option<Epoch>,
}

/// What all handshakes of a listener share.
struct Handshakes<'a> {
    service: &'a Arc<dyn Service>,
    serving: Mutex<Serving>,
    /// Those that are under way.
    pending: Arc<PendingConnections>,
    /// Whoever connects again and again must not fill the log.
    log_limit: LogLimit<&'static str>,
}

impl WorkerListener {
    /// Listens at a Unix socket or over TCP. A Unix socket has mode 0600, and its folder is created
    /// with mode 0700 where it is absent. The file of a process that is gone is replaced.
    ///
    /// # Errors
    /// [`BindError`], also where another process listens there, others can write to the folder, or
    /// a certificate cannot be used.
    pub fn bind(
        address: impl Into<WorkerAddress>,
        terms: WorkerTerms,
        times: LineTimes,
    ) -> Result<Self, BindError> {
        let address = address.into();
        let wrong = |source| BindError { path: address.to_string().into(), source };
        let (listener, address) = Listener::bind(&address).map_err(wrong)?;
        Ok(Self { listener, address, terms, times, stop: Arc::default(), line: Mutex::default() })
    }

    /// Where it listens: with the port that the system chose where any was asked for.
    pub fn address(&self) -> &WorkerAddress {
        &self.address
    }

    /// Ends [`serve`](Self::serve) when it is called, from any thread.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        let stop = Arc::clone(&self.stop);
        move || stop.store(true, Ordering::Release)
    }

    /// Tells the leader that is served that this worker is about to end, and waits until the leader
    /// has saved what only this worker holds, for `patience` at most. Serves on meanwhile: call it
    /// before [`stopper`](Self::stopper). Whether the leader has let it go, or there is none: the
    /// leader's log says what could not be saved. A repeated call waits for the same answer.
    pub fn leave(&self, patience: Duration) -> bool {
        let line = self.line.lock().upgrade();
        line.is_none_or(|line| line.leave(patience, kvbm_plan::deadline_after(Instant::now(), patience)))
    }

    /// Serves leaders, one at a time, until it is stopped. The session of the last one has ended
    /// when it returns.
    pub fn serve(&self, service: &Arc<dyn Service>) {
        let handshakes = Handshakes {
            service,
            serving: Mutex::default(),
            pending: PendingConnections::new(MAX_HANDSHAKES),
            log_limit: LogLimit::default(),
        };
        std::thread::scope(|scope| {
            while !self.stop.load(Ordering::Acquire) {
                self.wait();
                match self.listener.accept() {
                    Ok(stranger) => self.begin_handshake(scope, stranger, &handshakes),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        self.warn(
                            &handshakes.log_limit,
                            "accept",
                            &format!("cannot accept a leader: {error}"),
                        );
                        // Out of descriptors, for example: it may pass.
                        std::thread::sleep(TICK);
                    }
                }
            }
        });
        if let Some((line, thread)) = handshakes.serving.lock().now.take() {
            line.close();
            // A session that panicked has said so.
            let _ = thread.join();
        }
    }

    /// A warning, unless its topic had one lately.
    fn warn(&self, limit: &LogLimit<&'static str>, topic: &'static str, text: &str) {
        if let Some(suppressed) = limit.allow(topic, clock::now()) {
            tracing::warn!(address = %self.address, suppressed, "{text}");
        }
    }

    /// Shakes hands on a thread of its own, so that a silent stranger delays nobody.
    fn begin_handshake<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stranger: UnverifiedConnection,
        handshakes: &'scope Handshakes<'_>,
    ) {
        let warn = |topic, text: &str| self.warn(&handshakes.log_limit, topic, text);
        let permit = match stranger.socket().map(|socket| handshakes.pending.enter(socket)) {
            Ok(Some(permit)) => permit,
            Ok(None) => {
                let why = format!("a connection was refused: {MAX_HANDSHAKES} handshakes are under way");
                return warn("full", &why);
            }
            Err(error) => return warn("full", &format!("a leader has no place: {error}")),
        };
        let thread = std::thread::Builder::new().name("kvbm-link-hand".into());
        let spawned = thread.spawn_scoped(scope, move || {
            if let Err(error) = self.shake_hands(stranger, permit, handshakes) {
                warn("handshake", &error.to_string());
            }
        });
        if let Err(error) = spawned {
            warn("thread", &format!("no thread for a leader: {error}"));
        }
    }

    fn wait(&self) {
        let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
        let time = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&time));
    }

    /// The handshake with whoever connected.
    fn shake_hands(
        &self,
        stranger: UnverifiedConnection,
        mut permit: ConnectionPermit,
        handshakes: &Handshakes<'_>,
    ) -> Result<(), HandshakeError> {
        let until = kvbm_plan::deadline_after(Instant::now(), self.times.handshake);
        let (stream, peer) = self.listener.admit(stranger, until)?;
        let mut line = Timed::until(&stream, until);
        let (terms, versions) = handshake::read_offer(&mut line)?;
        if !permit.keep() {
            return Err(io::Error::other("its place was given to a later connection").into());
        }
        let mut serving = handshakes.serving.lock();
        let fits = versions
            .and_then(|()| self.terms.check(&terms, serving.last))
            .and_then(|()| Self::is_free(&mut serving, &peer));
        if let Err(refusal) = fits {
            let Refusal { field, leader, worker } = &refusal;
            let why = format!("refused leader {}: its {field} is {leader}, the worker's {worker}", peer.id);
            self.warn(&handshakes.log_limit, "refuse", &why);
            return handshake::refuse(&mut line, &refusal);
        }
        handshake::accept(&mut line)?;
        drop(line);
        serving.last = Some(terms.epoch);
        let leader = LeaderInfo { peer: peer.id, terms };
        let line = Arc::new(Connection::new(stream, peer, self.times, QUEUE_BYTES)?);
        *self.line.lock() = Arc::downgrade(&line);
        let (own, service) = (Arc::clone(&line), Arc::clone(handshakes.service));
        let thread = std::thread::Builder::new()
            .name("kvbm-link-serve".into())
            .spawn(move || serve_leader(&own, &leader, service.as_ref()))?;
        serving.now = Some((line, thread));
        Ok(())
    }

    /// Whether no other leader is served: a session that has ended is joined.
    fn is_free(serving: &mut Serving, peer: &Peer) -> Result<(), Refusal> {
        match serving.now.take() {
            Some((line, thread)) if !thread.is_finished() => {
                let refusal = Refusal::new(
                    handshake::SERVED,
                    peer.id,
                    format!("{}, whose session has not ended", line.peer.id),
                );
                serving.now = Some((line, thread));
                Err(refusal)
            }
            Some((_, thread)) => {
                // A session that panicked has said so.
                let _ = thread.join();
                Ok(())
            }
            None => Ok(()),
        }
    }
}

/// One leader, from the first command to the last.
fn serve_leader(line: &Arc<Connection>, leader: &LeaderInfo, service: &dyn Service) {
    std::thread::scope(|scope| {
        let writer = std::thread::Builder::new().name("kvbm-link-send".into());
        if let Err(error) = writer.spawn_scoped(scope, || line.write()) {
            tracing::error!("cannot start a thread for the leader: {error}");
            return line.close();
        }
        let mut session = match service.start(leader, MessageSender(Arc::clone(line))) {
            Ok(session) => session,
            Err(error) => {
                tracing::error!(peer = %leader.peer, "cannot serve the leader: {error}");
                let refusal = Refusal::not_served(&error).frame();
                return line.end_with(refusal.unwrap_or_default());
            }
        };
        let ended = line.read(|command| {
            if let Err(error) = session.command(&command) {
                tracing::error!(peer = %leader.peer, "the leader sent what is no command: {error}");
                line.close();
            }
        });
        tracing::info!(peer = %leader.peer, "the line to the leader ended: {ended}");
        session.end();
    });
    line.close();
}
