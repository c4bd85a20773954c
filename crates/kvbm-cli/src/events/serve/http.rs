//! As much of HTTP/1.1 as a small JSON API needs: a few threads, one request a connection, a
//! deadline for each.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kvbm::metrics::DeadlineStream;
use serde_json::{Value, json};

/// Longest time for a whole request and its answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// Requests at a time; more wait in the system's queue.
const THREADS: usize = 4;
/// Longest request head, and longest body.
const MAX_HEAD: usize = 64 << 10;
const MAX_BODY: usize = 4 << 20;
/// Pause after the listener failed to accept, so that a lasting error does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What a client asks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) method: String,
    /// Without the question mark and what follows.
    pub(super) path: String,
    pub(super) query: String,
    pub(super) body: Vec<u8>,
}

/// An answer: a status and JSON.
#[derive(Debug, PartialEq)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) body: Value,
}

impl Response {
    pub(super) const fn ok(body: Value) -> Self {
        Self { status: 200, body }
    }

    pub(super) fn error(status: u16, message: &str) -> Self {
        Self { status, body: json!({ "error": message }) }
    }
}

/// Listens until the process ends.
pub(super) struct Server {
    addr: SocketAddr,
}

impl Server {
    pub(super) fn start(
        addr: SocketAddr,
        answer: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Result<Self> {
        let refused = || format!("cannot listen on {addr}: choose a free port, or port 0 for any");
        let listener = Arc::new(TcpListener::bind(addr).with_context(refused)?);
        let addr = listener.local_addr().with_context(refused)?;
        let answer = Arc::new(answer);
        for _ in 0..THREADS {
            let (listener, answer) = (Arc::clone(&listener), Arc::clone(&answer));
            let serve = move || loop {
                match listener.accept() {
                    // A client that goes away or talks nonsense is its own problem.
                    Ok((stream, _)) => drop(converse(stream, answer.as_ref())),
                    Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                }
            };
            std::thread::Builder::new().name("http".into()).spawn(serve).context("no thread to serve")?;
        }
        Ok(Self { addr })
    }

    /// Where it listens: the port that was chosen, if 0 was asked for.
    pub(super) const fn addr(&self) -> SocketAddr {
        self.addr
    }
}

fn converse(stream: TcpStream, answer: &dyn Fn(&Request) -> Response) -> io::Result<()> {
    let mut stream = DeadlineStream::new(stream, Instant::now() + DEADLINE);
    let response = match read(&mut stream)? {
        Ok(request) => answer(&request),
        Err(response) => response,
    };
    let (status, body) = (response.status, format!("{}\n", response.body));
    write!(
        stream,
        "HTTP/1.1 {status} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        reason(status),
        body.len()
    )?;
    stream.flush()
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        _ => "Bad Request",
    }
}

/// A request, or what to answer to what is none.
fn read(stream: &mut DeadlineStream) -> io::Result<Result<Request, Response>> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if bytes.len() > MAX_HEAD {
            return Ok(Err(Response::error(431, "the request head is too long")));
        }
        more(stream, &mut bytes)?;
    };
    let body = bytes.split_off(end + 4);
    let (mut request, length) = match head(&bytes) {
        Ok(head) => head,
        Err(response) => return Ok(Err(response)),
    };
    request.body = body;
    while request.body.len() < length {
        more(stream, &mut request.body)?;
    }
    request.body.truncate(length);
    Ok(Ok(request))
}

fn more(stream: &mut DeadlineStream, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut chunk = [0; 4096];
    match stream.read(&mut chunk)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => {
            bytes.extend_from_slice(&chunk[..n]);
            Ok(())
        }
    }
}

/// The request of a head, and the length of its body.
fn head(bytes: &[u8]) -> Result<(Request, usize), Response> {
    let bad = |what: &str| Response::error(400, what);
    let text = std::str::from_utf8(bytes).map_err(|_| bad("the request head is not text"))?;
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
        return Err(bad("the request line is not METHOD TARGET VERSION"));
    };
    if !version.starts_with("HTTP/1.") {
        return Err(bad("only HTTP/1.1 is spoken here"));
    }
    let mut length = 0;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(|_| bad("Content-Length is not a number"))?;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Response::error(501, "send the body with a Content-Length"));
        }
    }
    if length > MAX_BODY {
        return Err(Response::error(413, "the body is larger than 4 MiB: ask for fewer hashes"));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (method, path, query) = (method.to_owned(), path.to_owned(), query.to_owned());
    Ok((Request { method, path, query, body: Vec::new() }, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(addr: SocketAddr, text: &str) -> String {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        // A connection that is closed with bytes unread may be reset: what came before counts.
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn requests_are_read_and_nonsense_is_answered() {
        let echo = |request: &Request| {
            Response::ok(json!([request.method, request.path, request.query, request.body.len()]))
        };
        let addr = Server::start("127.0.0.1:0".parse().unwrap(), echo).unwrap().addr();
        let answer = ask(addr, "POST /find?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.ends_with("[\"POST\",\"/find\",\"a=b\",3]\n"), "{answer}");
        for (text, status) in [
            ("GET /\r\n\r\n", "400"),
            ("GET / SPDY/3\r\n\r\n", "400"),
            ("POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", "400"),
            ("POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", "413"),
            ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "501"),
        ] {
            let answer = ask(addr, text);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{text:?}: {answer}");
            assert!(answer.contains("\"error\""), "{answer}");
        }
        let long = format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(MAX_HEAD));
        assert!(ask(addr, &long).starts_with("HTTP/1.1 431 "));
    }

    /// Mutation that makes it fail: the deadline counts for each write.
    #[test]
    fn a_client_that_reads_slowly_holds_no_thread_longer_than_the_deadline() {
        let large = "x".repeat(64 << 20);
        let answer = move |_: &Request| Response::ok(json!(large));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let (served, _) = listener.accept().unwrap();
        let serving = std::thread::spawn(move || {
            let began = Instant::now();
            (converse(served, &answer).is_err(), began.elapsed())
        });
        // Each part comes well within the deadline; all of them would take minutes.
        let mut part = vec![0; 256 << 10];
        while !serving.is_finished() {
            std::thread::sleep(Duration::from_millis(200));
            let _ = client.read(&mut part);
        }
        let (failed, took) = serving.join().unwrap();
        assert!(failed && took < DEADLINE + Duration::from_secs(3), "{took:?}");
    }
}
