//! An HTTP server for `GET /metrics` alone.
//!
//! One thread serves one connection at a time. Each connection has one deadline for the request and
//! the whole answer, so a client that reads or writes slowly holds the thread for two seconds at
//! most.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{DeadlineStream, Metrics};

/// Time for one connection: to read the request and to write the whole answer.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(2);
/// Longest request head.
const MAX_REQUEST: usize = 8 << 10;
/// Pause after the listener failed to accept, so that a lasting error does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The endpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot serve metrics on {addr}: {source}; choose a free port, or port 0 for any")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The address can be reached from other machines, and there is no authentication.
    #[error(
        "will not serve metrics on {addr}: other machines could reach it and there is no authentication; \
         use 127.0.0.1, or serve_public if that is meant"
    )]
    NotLoopback {
        /// The address.
        addr: SocketAddr,
    },
    /// The thread could not be started.
    #[error("cannot start the metrics thread: {0}")]
    Thread(io::Error),
}

/// Serves `GET /metrics` until dropped.
#[derive(Debug)]
pub struct MetricsServer {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    pub(super) fn start(metrics: Metrics, addr: SocketAddr, public: bool) -> Result<Self, ServeError> {
        if !public && !addr.ip().is_loopback() {
            return Err(ServeError::NotLoopback { addr });
        }
        let bind = |source| ServeError::Bind { addr, source };
        let listener = TcpListener::bind(addr).map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("kvbm-metrics".into())
            .spawn(move || accept(&listener, &metrics, &stopped))
            .map_err(ServeError::Thread)?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// Where it listens: the port that was chosen, if 0 was asked for.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The thread waits in `accept`: a connection wakes it up.
        let mut wake = self.addr;
        if wake.ip().is_unspecified() {
            wake.set_ip(match wake {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let woken = TcpStream::connect_timeout(&wake, CONNECTION_DEADLINE).is_ok();
        if let Some(thread) = self.thread.take()
            && woken
        {
            // Bounded: the thread serves at most one connection, which has a deadline. A panic
            // there is its own report.
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, metrics: &Metrics, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        match listener.accept() {
            // A client that goes away or talks nonsense is its own problem.
            Ok((stream, _)) if !stop.load(Ordering::Acquire) => drop(answer(stream, metrics)),
            Ok(_) => {}
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
    }
}

/// An answer: status, further headers, body, and whether the body is only measured (HEAD).
struct Response {
    status: &'static str,
    headers: &'static str,
    body: String,
    head_only: bool,
}

const TEXT: &str = "Content-Type: text/plain; charset=utf-8\r\n";
const TEXT_ALLOW: &str = "Content-Type: text/plain; charset=utf-8\r\nAllow: GET, HEAD\r\n";
const OPENMETRICS: &str = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";

impl Response {
    fn error(status: &'static str, headers: &'static str) -> Self {
        Self { status, headers, body: format!("{status}: kvbm serves GET /metrics\n"), head_only: false }
    }
}

fn answer(stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    let mut connection = DeadlineStream::new(stream, Instant::now() + CONNECTION_DEADLINE);
    let response = match read_head(&mut connection)? {
        Some(head) => respond(&head, metrics),
        None => Response::error("431 Request Header Fields Too Large", TEXT),
    };
    let Response { status, headers, body, head_only } = response;
    let length = body.len();
    write!(
        connection,
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    if !head_only {
        connection.write_all(body.as_bytes())?;
    }
    connection.flush()
}

fn respond(head: &[u8], metrics: &Metrics) -> Response {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
        return Response::error("400 Bad Request", TEXT);
    };
    if !version.starts_with(b"HTTP/1.") {
        return Response::error("400 Bad Request", TEXT);
    }
    if target.split(|byte| *byte == b'?').next() != Some(b"/metrics") {
        return Response::error("404 Not Found", TEXT);
    }
    if !matches!(method, b"GET" | b"HEAD") {
        return Response::error("405 Method Not Allowed", TEXT_ALLOW);
    }
    Response { status: "200 OK", headers: OPENMETRICS, body: metrics.encode(), head_only: method == b"HEAD" }
}

/// Reads up to the empty line; `None` if the head is too long.
fn read_head(connection: &mut DeadlineStream) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > MAX_REQUEST {
            return Ok(None);
        }
        match connection.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => head.extend_from_slice(&chunk[..n]),
        }
    }
    Ok(Some(head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_slowly_ends_at_the_deadline() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        let deadline = Instant::now() + Duration::from_millis(300);
        // The client reads enough to let each write make progress, and far less than the answer.
        let reader = std::thread::spawn(move || {
            let mut chunk = vec![0; 64 << 10];
            while client.read(&mut chunk).is_ok_and(|n| n > 0) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let error = DeadlineStream::new(stream, deadline).write_all(&vec![0; 256 << 20]).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        assert!(Instant::now() >= deadline);
        reader.join().unwrap();
    }
}
