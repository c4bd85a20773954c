//! The server: listens, and has a thread for each connection.

use super::connection::Connection;
use super::error::HttpError;
use super::limits::HttpLimits;
use super::request::{HttpRequest, read};
use super::response::HttpResponse;
use super::security::{HttpSecurity, Prepared};
use super::stream::DeadlineStream;
use super::tls::TlsAcceptor;
use super::token::BearerToken;
use kvbm_link::{ConnectionPermit, PendingConnections, SocketFile};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a listener looks whether it was stopped.
const TICK: Duration = Duration::from_millis(100);
/// How often the log says that all connections are in use.
const WARN_EVERY: Duration = Duration::from_secs(10);
/// How long a server that stops waits for its connections, beyond the time of a client.
const STOP_TIME: Duration = Duration::from_secs(1);

/// Listens until it is dropped. It waits then for connections that it serves, for as long as their
/// clients may take.
#[derive(Debug)]
pub struct HttpServer {
    addr: Option<SocketAddr>,
    path: Option<PathBuf>,
    limits: HttpLimits,
    stop: Arc<AtomicBool>,
    open: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// What answers requests. A function of a request is one.
pub trait HttpService: Send + Sync + 'static {
    /// Whether a request is answered, before its body is read.
    ///
    /// # Errors
    /// What the client is told instead.
    fn admit(&self, _head: &HttpRequest) -> Result<(), HttpResponse> {
        Ok(())
    }

    /// The answer.
    fn answer(&self, request: &HttpRequest) -> HttpResponse;
}

impl<F: Fn(&HttpRequest) -> HttpResponse + Send + Sync + 'static> HttpService for F {
    fn answer(&self, request: &HttpRequest) -> HttpResponse {
        self(request)
    }
}

/// A service that only clients with the token reach.
struct WithToken<S> {
    token: BearerToken,
    service: S,
}

impl<S: HttpService> HttpService for WithToken<S> {
    fn admit(&self, head: &HttpRequest) -> Result<(), HttpResponse> {
        if self.token.admits(head.authorization.as_deref()) {
            return self.service.admit(head);
        }
        let why = "a request needs the header 'Authorization: Bearer TOKEN' with what is in token_file";
        Err(HttpResponse { headers: "WWW-Authenticate: Bearer\r\n", ..HttpResponse::error(401, why) })
    }

    fn answer(&self, request: &HttpRequest) -> HttpResponse {
        self.service.answer(request)
    }
}

enum Listener {
    Tcp(TcpListener),
    /// Only processes of the same user are served.
    Unix(SocketFile),
}

/// What the threads of a server share.
struct Served {
    service: Box<dyn HttpService>,
    tls: Option<TlsAcceptor>,
    limits: HttpLimits,
    /// Clients whose request is not there yet, and those that are answered.
    connections: Arc<PendingConnections>,
    open: Arc<AtomicUsize>,
    /// When a warning last said that all connections are in use.
    last_warning: Mutex<Option<Instant>>,
}

impl HttpServer {
    /// Listens at a TCP address; port 0 means any free one. `name` is the one of its thread.
    /// `security` says whom it serves, and whether it speaks TLS.
    ///
    /// # Errors
    /// [`HttpError`] names the address, or the setting and its file.
    pub fn tcp(
        addr: SocketAddr,
        name: &str,
        limits: HttpLimits,
        security: &HttpSecurity,
        service: impl HttpService,
    ) -> Result<Self, HttpError> {
        let Prepared { token, tls } = security.prepare(addr)?;
        let service: Box<dyn HttpService> = match token {
            Some(token) => Box::new(WithToken { token, service }),
            None => Box::new(service),
        };
        let start = || {
            let listener = TcpListener::bind(addr)?;
            listener.set_nonblocking(true)?;
            let bound = listener.local_addr()?;
            let mut server = Self::start(Listener::Tcp(listener), name, limits, tls, service)?;
            server.addr = Some(bound);
            Ok(server)
        };
        start().map_err(|source| HttpError::Bind { addr, source })
    }

    /// Listens at a Unix socket of mode 0600 and serves processes of this user alone. The folder is
    /// created with mode 0700 where it is absent, and refused where others may write to it.
    ///
    /// # Errors
    /// The socket cannot be bound, another process listens there, or the system refuses a thread.
    pub fn unix(path: &Path, name: &str, limits: HttpLimits, service: impl HttpService) -> io::Result<Self> {
        let socket = SocketFile::bind(path)?;
        let mut server = Self::start(Listener::Unix(socket), name, limits, None, Box::new(service))?;
        server.path = Some(path.to_owned());
        Ok(server)
    }

    fn start(
        listener: Listener,
        name: &str,
        limits: HttpLimits,
        tls: Option<TlsAcceptor>,
        service: Box<dyn HttpService>,
    ) -> io::Result<Self> {
        let (stop, open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let served = Arc::new(Served {
            service,
            tls,
            limits,
            connections: PendingConnections::new(limits.connections),
            open: Arc::clone(&open),
            last_warning: Mutex::default(),
        });
        let (stopped, of_connection) = (Arc::clone(&stop), name.to_owned());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                listener.wait();
                match listener.accept() {
                    Ok(Some(stream)) => served.admit(stream, &of_connection),
                    Ok(None) => {}
                    // Out of descriptors, for example: it may pass.
                    Err(_) => std::thread::sleep(TICK),
                }
            }
        })?;
        Ok(Self { addr: None, path: None, limits, stop, open, thread: Some(thread) })
    }

    /// Where it listens on TCP: the port that was chosen, if 0 was asked for.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// The Unix socket that it listens at.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // Bounded by the tick. A panic there is its own report.
            let _ = thread.join();
        }
        let until = Instant::now().checked_add(self.limits.client_time.saturating_add(STOP_TIME));
        while self.open.load(Ordering::Acquire) > 0 && until.is_some_and(|until| Instant::now() < until) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Listener {
    fn wait(&self) {
        let mut fds = match self {
            Self::Tcp(listener) => [PollFd::new(listener, PollFlags::IN)],
            Self::Unix(socket) => [PollFd::new(socket.listener(), PollFlags::IN)],
        };
        let time = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&time));
    }

    /// The next client, if there is one that may be served.
    fn accept(&self) -> io::Result<Option<DeadlineStream>> {
        let accepted = match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Some(DeadlineStream::from(stream))),
            Self::Unix(socket) => {
                socket.listener().accept().map(|(stream, _)| match kvbm_link::expect_same_user(&stream) {
                    Ok(()) => Some(DeadlineStream::from(stream)),
                    Err(error) => {
                        tracing::warn!(target: "kvbm", "a client was not served: {error}");
                        refuse(&DeadlineStream::from(stream), &HttpResponse::error(403, &error.to_string()));
                        None
                    }
                })
            }
        };
        match accepted {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            other => other,
        }
    }
}

/// Counts a connection that has a thread.
struct OpenConnection(Arc<Served>);

impl OpenConnection {
    fn count(served: &Arc<Served>) -> Self {
        served.open.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(served))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Served {
    fn admit(self: &Arc<Self>, stream: DeadlineStream, name: &str) {
        // Without a descriptor there is no room either.
        let Some(permit) = stream.socket().ok().and_then(|socket| self.connections.enter(socket)) else {
            self.warn_full(name);
            // A client that waits for a handshake does not read it.
            if self.tls.is_none() {
                let text = format!("{} connections are served: try again", self.limits.connections);
                refuse(&stream, &HttpResponse::error(503, &text));
            }
            return;
        };
        if permit.has_replaced() {
            self.warn_full(name);
        }
        let open = OpenConnection::count(self);
        // A client that goes away or talks nonsense is its own problem.
        let serve = move || drop(open.0.converse(stream, permit));
        if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(serve) {
            tracing::error!(target: "kvbm", "no thread for a client: {error}");
        }
    }

    fn warn_full(&self, server: &str) {
        let (mut last_warning, now) = (self.last_warning.lock(), Instant::now());
        if last_warning.is_none_or(|last_warning| now.duration_since(last_warning) >= WARN_EVERY) {
            *last_warning = Some(now);
            let connections = self.limits.connections;
            tracing::warn!(target: "kvbm", server, connections, "all connections are in use: clients are refused, or closed before their request is there");
        }
    }

    fn converse(&self, mut stream: DeadlineStream, mut permit: ConnectionPermit) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        let began = Instant::now();
        stream.set_deadline(kvbm_plan::deadline_after(began, self.limits.client_time));
        let mut stream: Box<dyn Connection> = match &self.tls {
            None => Box::new(stream),
            Some(tls) => match tls.accept(stream)? {
                Ok(stream) => stream,
                Err(mut stream) => {
                    let text = "this server speaks TLS: use https://";
                    HttpResponse::error(400, text).write(&mut stream, false)?;
                    return self.discard(&mut stream);
                }
            },
        };
        let admit = |head: &HttpRequest| self.service.admit(head);
        match read(stream.as_mut(), &self.limits, &admit)? {
            // Its place was given away.
            Ok(_) if !permit.keep() => Ok(()),
            Ok(request) => {
                let left = self.limits.client_time.saturating_sub(began.elapsed());
                let response = self.service.answer(&request);
                stream.set_deadline(kvbm_plan::deadline_after(Instant::now(), left));
                response.write(&mut stream, request.method == "HEAD")?;
                stream.finish()
            }
            Err(response) => {
                response.write(&mut stream, false)?;
                self.discard(stream.as_mut())
            }
        }
    }

    /// Reads what a client still sends, within bounds: the system resets a connection that is
    /// closed with bytes unread, and the client would not see the answer.
    fn discard(&self, stream: &mut dyn Connection) -> io::Result<()> {
        stream.finish()?;
        let mut chunk = [0; 4096];
        let mut left = self.limits.head_bytes + self.limits.body_bytes;
        while left > 0 {
            match stream.read(&mut chunk)? {
                0 => break,
                n => left = left.saturating_sub(n),
            }
        }
        Ok(())
    }
}

/// Tells a client that it is not served, if that is possible at once.
fn refuse(stream: &DeadlineStream, response: &HttpResponse) {
    let mut text = Vec::new();
    // Writing to memory does not fail. Whom the answer does not reach sees the end.
    let _ = response.write(&mut text, false);
    let _ = stream.write_at_once(&text);
}
