//! Why this crate exists: three defects of the crate `zeromq` 0.7, each of which is harmful in the
//! process of an inference engine. Each test asserts that the defect is present. When one fails,
//! upstream has fixed it.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use bytes::Bytes;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{LIMIT, pause, run, soon};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

const FIXED: &str = "the crate zeromq has no longer this defect: reconsider kvbm-zmtp";

#[cfg(unix)]
const SIGABRT: i32 = 6;

/// Set in the process that is the victim, so that its test does something.
const VICTIM: &str = "KVBM_ZMTP_TEST_VICTIM";

/// The greeting of ZMTP 3.1 with the mechanism NULL.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9]) = (0xFF, 1, 0x7F);
    (greeting[10], greeting[11]) = (3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn tcp(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// A SUB socket by hand, after its handshake.
fn subscriber(address: &str) -> TcpStream {
    let mut stream = tcp(address);
    stream.write_all(&greeting()).unwrap();
    stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB").unwrap();
    stream.read_exact(&mut [0; 64]).unwrap();
    let mut head = [0; 2];
    stream.read_exact(&mut head).unwrap();
    stream.read_exact(&mut vec![0; usize::from(head[1])]).unwrap();
    stream
}

/// A PUB socket that waits to be harmed, in a process of its own.
#[test]
fn victim() {
    run(async {
        let mut publisher = PubSocket::new();
        let address = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        assert!(address.starts_with("tcp://127.0.0.1:"));
        if std::env::var_os(VICTIM).is_some() {
            println!("\n{VICTIM} {address}");
            tokio::time::sleep(LIMIT / 2).await;
        }
    });
}

#[cfg(unix)]
#[test]
fn zeromq_aborts_when_an_unauthenticated_peer_announces_a_long_frame() {
    use std::os::unix::process::ExitStatusExt;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| Some(line.strip_prefix(VICTIM)?.trim().to_owned())).unwrap();
    let mut stream = tcp(&address);
    stream.write_all(&greeting()).unwrap();
    // A long command of 2^62 bytes where READY belongs: 73 bytes with the greeting.
    stream.write_all(&[[6].as_slice(), &(1u64 << 62).to_be_bytes()].concat()).unwrap();
    let deadline = soon();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    assert_eq!(status.signal(), Some(SIGABRT), "{FIXED} ({status})");
}

/// A frame of 1 MiB that counts how many of it exist; all share the same bytes.
struct Counted(Arc<AtomicUsize>);

static MEBIBYTE: [u8; 1 << 20] = [0; 1 << 20];

impl Counted {
    fn frame(alive: &Arc<AtomicUsize>) -> Bytes {
        alive.fetch_add(1, Ordering::SeqCst);
        Bytes::from_owner(Self(Arc::clone(alive)))
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &MEBIBYTE
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn zeromq_queues_100_000_messages_of_any_size_for_a_stalled_subscriber() {
    const QUEUED: usize = 100_000;
    run(async {
        let mut publisher = PubSocket::new();
        let address = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let mut stalled = tokio::task::spawn_blocking(move || subscriber(&address)).await.unwrap();
        stalled.write_all(&[0, 1, 1]).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        // Once a message stays, the subscription is there and the subscriber's buffers are full.
        while alive.load(Ordering::SeqCst) < 20 {
            publisher.send(ZmqMessage::from(Counted::frame(&alive))).await.unwrap();
            pause().await;
        }
        for _ in 0..QUEUED + 1000 {
            publisher.send(ZmqMessage::from(Counted::frame(&alive))).await.unwrap();
        }
        let mebibytes = alive.load(Ordering::SeqCst);
        assert!(mebibytes >= QUEUED, "{FIXED} ({mebibytes} MiB are queued)");
        drop(stalled);
    });
}

#[test]
fn zeromq_closes_the_connection_of_a_peer_that_sends_a_heartbeat() {
    run(async {
        let mut publisher = PubSocket::new();
        let address = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let ended = tokio::task::spawn_blocking(move || {
            let mut quiet = subscriber(&address);
            let mut pinging = subscriber(&address);
            pinging.write_all(b"\x04\x07\x04PING\0\0").unwrap();
            let mut byte = [0];
            let ended = matches!(pinging.read(&mut byte), Ok(0) | Err(_));
            // The same without a heartbeat stays.
            quiet.set_read_timeout(Some(std::time::Duration::from_millis(100))).unwrap();
            let quiet = quiet.read(&mut byte);
            assert!(quiet.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
            ended
        });
        assert!(ended.await.unwrap(), "{FIXED}");
    });
}
