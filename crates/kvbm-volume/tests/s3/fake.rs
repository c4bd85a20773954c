//! A server that answers as it is told.

use crate::open;
use kvbm_volume::S3Volume;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the fake server does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// A status and a body.
    Body(u16, Vec<u8>),
    /// The same, with one more line in its head.
    With(&'static str, u16, Vec<u8>),
    /// The same, after a while.
    Slow(Duration, u16, Vec<u8>),
    /// Says that more bytes come than do, then hangs up.
    Torn(usize, Vec<u8>),
    /// Nothing, for as long as the client stays.
    Silence,
    /// Hangs up at once.
    Reset,
}

/// Answers every request as it is told.
pub(crate) struct Fake {
    pub(crate) addr: SocketAddr,
    answer: Arc<Mutex<Answer>>,
    pub(crate) requests: Arc<AtomicUsize>,
    /// Requests that it has at this moment, and most that it ever had.
    pub(crate) busy: Arc<[AtomicUsize; 2]>,
}

impl Fake {
    pub(crate) fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the test's own set-up");
        let addr = listener.local_addr().expect("the test's own set-up");
        let (answer, requests) = (Arc::new(Mutex::new(answer)), Arc::new(AtomicUsize::new(0)));
        let (shared, counted) = (Arc::clone(&answer), Arc::clone(&requests));
        let busy: Arc<[AtomicUsize; 2]> = Arc::default();
        let at_work = Arc::clone(&busy);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, counted, busy) =
                    (Arc::clone(&shared), Arc::clone(&counted), Arc::clone(&at_work));
                std::thread::spawn(move || serve(stream, &answer, &counted, &busy));
            }
        });
        Self { addr, answer, requests, busy }
    }

    pub(crate) fn volume(&self, deadline: Duration) -> S3Volume {
        open(format!("s3://bucket/p?endpoint=http://{}&anonymous=true", self.addr), deadline)
    }

    pub(crate) fn say(&self, answer: Answer) {
        *self.answer.lock().expect("the test's own set-up") = answer;
    }
}

/// One request after the other on a connection; an error is a client that went away.
pub(crate) fn serve(
    stream: TcpStream,
    answer: &Mutex<Answer>,
    requests: &AtomicUsize,
    [busy, most]: &[AtomicUsize; 2],
) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let (mut line, mut length, mut head) = (String::new(), 0, false);
        loop {
            line.clear();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            head |= line.starts_with("HEAD");
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
            if line == "\r\n" {
                break;
            }
        }
        std::io::copy(&mut (&mut reader).take(length), &mut std::io::sink()).ok()?;
        requests.fetch_add(1, Ordering::Relaxed);
        let answer = answer.lock().expect("the test's own set-up").clone();
        let mut date = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: \"1\"".to_owned();
        let (status, announced, body) = match answer {
            Answer::Body(status, body) => (status, body.len(), body),
            Answer::With(line, status, body) => {
                date.extend(["\r\n", line]);
                (status, body.len(), body)
            }
            Answer::Slow(pause, status, body) => {
                most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(pause);
                busy.fetch_sub(1, Ordering::SeqCst);
                (status, body.len(), body)
            }
            Answer::Torn(announced, body) => (200, announced, body),
            Answer::Silence => return reader.read_line(&mut line).ok().map(drop),
            Answer::Reset => return None,
        };
        write!(stream, "HTTP/1.1 {status} X\r\n{date}\r\nContent-Length: {announced}\r\n\r\n").ok()?;
        if !head {
            stream.write_all(&body).ok()?;
        }
        if announced > body.len() {
            return None;
        }
    }
}
