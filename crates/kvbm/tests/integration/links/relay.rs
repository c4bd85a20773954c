//! Passes bytes on between a leader and a worker, until the line is cut.

use crate::support::soon;
use kvbm::socket_link::WorkerAddress;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// See the module.
pub(super) struct Relay {
    /// The pair of sockets that is open now.
    now: Mutex<Option<[UnixStream; 2]>>,
    ended: AtomicBool,
    /// Pairs so far.
    joined: AtomicU64,
    at: WorkerAddress,
}

/// A stream socket of TCP, in the type of the others: the same calls serve both.
fn any(stream: TcpStream) -> UnixStream {
    UnixStream::from(OwnedFd::from(stream))
}

fn connect(to: &WorkerAddress) -> std::io::Result<UnixStream> {
    match to {
        WorkerAddress::Unix(path) => UnixStream::connect(path),
        WorkerAddress::Tcp { host, port, .. } => TcpStream::connect((host.as_str(), *port)).map(any),
    }
}

impl Relay {
    /// In front of a worker, at a socket of the same kind.
    pub(super) fn start(worker: &WorkerAddress, folder: &Path) -> (Arc<Self>, JoinHandle<()>) {
        type Accept = Box<dyn Fn() -> UnixStream + Send>;
        let (accept, at): (Accept, _) = match worker {
            WorkerAddress::Unix(_) => {
                let path = folder.join("leader");
                let listener = UnixListener::bind(&path).unwrap();
                (Box::new(move || listener.accept().unwrap().0), WorkerAddress::Unix(path))
            }
            WorkerAddress::Tcp { host, files, .. } => {
                let listener = TcpListener::bind((host.as_str(), 0)).unwrap();
                let port = listener.local_addr().unwrap().port();
                let at = WorkerAddress::Tcp { host: host.clone(), port, files: files.clone() };
                (Box::new(move || any(listener.accept().unwrap().0)), at)
            }
        };
        let (now, ended, joined) = (Mutex::default(), AtomicBool::new(false), AtomicU64::new(0));
        let relay = Arc::new(Self { now, ended, joined, at });
        let (own, worker) = (Arc::clone(&relay), worker.clone());
        let thread = std::thread::spawn(move || {
            loop {
                let leader = accept();
                if own.ended.load(Ordering::Acquire) {
                    return;
                }
                // A worker that does not listen any more: the leader tries again.
                let Ok(worker) = connect(&worker) else { continue };
                own.join(leader, worker);
            }
        });
        (relay, thread)
    }

    /// Where leaders connect.
    pub(super) fn address(&self) -> &WorkerAddress {
        &self.at
    }

    /// Passes nothing on any more.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the relay.
        drop(connect(&self.at));
    }

    fn join(&self, leader: UnixStream, worker: UnixStream) {
        let clones = |stream: &UnixStream| stream.try_clone().unwrap();
        *self.now.lock().unwrap() = Some([clones(&leader), clones(&worker)]);
        self.joined.fetch_add(1, Ordering::AcqRel);
        for (from, to) in [(clones(&leader), clones(&worker)), (worker, leader)] {
            std::thread::spawn(move || pass_on(from, &to));
        }
    }

    /// Cuts the line, and waits until the leader has connected again.
    pub(super) fn cut(&self) {
        let joined = self.joined.load(Ordering::Acquire);
        for stream in self.now.lock().unwrap().iter().flatten() {
            // One that its end has closed is as good.
            let _closed = stream.shutdown(Shutdown::Both);
        }
        let until = soon();
        while self.joined.load(Ordering::Acquire) == joined {
            assert!(Instant::now() < until, "the leader connects again");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn pass_on(mut from: UnixStream, mut to: &UnixStream) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _closed = from.shutdown(Shutdown::Both);
    let _closed = to.shutdown(Shutdown::Both);
}
