//! Lines over TCP: who is let in, and what ends them where no kernel says that a process is gone.

#[path = "../support/authority.rs"]
mod authority;

use crate::echo::{Echo, Leader, PATIENCE, TIMES, Worker, leader_terms, soon, worker_terms};
use crate::processes::Process;
use authority::Authority;
use kvbm_link::{
    Lane, LeaderLine, LineSendError, LineStatus, LineTimes, PeerId, ProcessState, Service, TlsFiles,
    WorkerAddress, WorkerListener,
};
use kvbm_plan::wire;
use rcgen::date_time_ymd;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Set in a process that is a worker: the folder of its certificates.
const WORKER: &str = "KVBM_TEST_LINK_TCP_WORKER";

fn files(of: &Authority<'_>, (cert, key): (PathBuf, PathBuf)) -> TlsFiles {
    TlsFiles { cert, key, ca: of.file() }
}

fn tcp(host: &str, port: u16, files: &TlsFiles) -> WorkerAddress {
    WorkerAddress::Tcp { host: host.to_owned(), port, files: files.clone() }
}

fn port(of: &WorkerAddress) -> u16 {
    match of {
        WorkerAddress::Tcp { port, .. } => *port,
        WorkerAddress::Unix(path) => panic!("{}", path.display()),
    }
}

/// A worker, and where a leader with other certificates finds it.
fn worker(files: &TlsFiles) -> (Worker, u16) {
    let (worker, bound) = Worker::listen(tcp("127.0.0.1", 0, files));
    (worker, port(&bound))
}

/// Waits until a leader gets no line, for a reason.
fn no_line(leader: &Leader, part: &str) {
    soon(|| match leader.line.status() {
        LineStatus::Connecting { reason } if reason.contains(part) => Some(()),
        _ => None,
    })
    .unwrap_or_else(|| panic!("{part}: {:?}", leader.line));
}

/// The same, where time does not change it.
fn refused(leader: &Leader, part: &str) {
    soon(|| match leader.line.status() {
        LineStatus::Refused { reason } if reason.contains(part) => Some(()),
        _ => None,
    })
    .unwrap_or_else(|| panic!("{part}: {:?}", leader.line));
}

#[test]
fn commands_pass_over_tls_and_an_idle_line_stays() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let [of_worker, of_leader] = ["worker", "leader"].map(|name| files(&ours, ours.issue(name, |_| {})));
    let (_worker, port) = worker(&of_worker);
    let leader = Leader::start(tcp("localhost", port, &of_leader), leader_terms(1));
    let largest: Vec<u8> = (0..wire::MAX_BYTES).map(|at| (at % 251) as u8).collect();
    leader.send(&largest);
    leader.send(b"small");
    leader.expect_echoes(&[&largest, b"small"]);
    let LineStatus::Connected { peer: PeerId::Address(address), .. } = leader.line.status() else {
        panic!("{:?}", leader.line)
    };
    assert_eq!(address.port(), port);
    // Longer than either end waits for one that is not heard.
    std::thread::sleep(TIMES.lost_after + TIMES.silent_after);
    leader.line.send(Lane::Urgent, b"urgent").unwrap();
    soon(|| (leader.echoes().len() == 3).then_some(())).unwrap();
    assert!(leader.ended.lock().unwrap().is_empty(), "it is one line");
}

#[test]
fn what_differs_is_named_as_at_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let both = files(&ours, ours.issue("both", |_| {}));
    let (_worker, port) = worker(&both);
    let first = Leader::start(tcp("127.0.0.1", port, &both), leader_terms(5));
    first.send(b"mine");
    first.expect_echoes(&[b"mine"]);
    let second = Leader::start(tcp("127.0.0.1", port, &both), leader_terms(6));
    no_line(&second, "the worker has 127.0.0.1:");
    drop(second);
    let mut terms = leader_terms(6);
    terms.settings[0].value = "3".into();
    let other = Leader::start(tcp("127.0.0.1", port, &both), terms);
    refused(&other, "blocks of G1 differs: the leader has 3, the worker has 2");
}

#[test]
fn only_holders_of_a_certificate_of_the_authority_connect() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "other"));
    let good = files(&ours, ours.issue("good", |_| {}));
    let (worker, port) = worker(&good);
    let foreign = TlsFiles { ca: ours.file(), ..files(&other, other.issue("foreign", |_| {})) };
    let late = ours.issue("late", |params| params.not_after = date_time_ymd(2020, 1, 1));
    let late = files(&ours, late);
    for (leader, host, why) in [
        (&foreign, "127.0.0.1", "UnknownCA; see tls_cert and tls_ca of both ends"),
        (&late, "127.0.0.1", "CertificateExpired"),
        (&TlsFiles { ca: other.file(), ..good.clone() }, "127.0.0.1", "UnknownIssuer"),
        (&good, "127.0.0.2", "not valid for name"),
    ] {
        if host == "127.0.0.2" {
            let (_named, bound) = Worker::listen(tcp(host, 0, &good));
            let leader = Leader::start(bound, leader_terms(1));
            refused(&leader, why);
            continue;
        }
        let leader = Leader::start(tcp(host, port, leader), leader_terms(1));
        refused(&leader, why);
        assert!(leader.line.send(Lane::Bulk, b"x").is_err());
    }
    assert_eq!(worker.echo.started.load(Ordering::SeqCst), 0, "nobody was served");
    let leader = Leader::start(tcp("127.0.0.1", port, &good), leader_terms(1));
    leader.send(b"served");
    leader.expect_echoes(&[b"served"]);
}

#[test]
fn files_that_cannot_be_used_are_named_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let good = files(&ours, ours.issue("good", |_| {}));
    let swapped = TlsFiles { key: good.cert.clone(), ..good.clone() };
    let gone = TlsFiles { ca: folder.path().join("gone"), ..good };
    for (files, why) in [(swapped, "tls_key = "), (gone, "tls_ca = ")] {
        let at = tcp("127.0.0.1", 0, &files);
        let error = WorkerListener::bind(at.clone(), worker_terms(), TIMES).err().unwrap().to_string();
        assert!(error.starts_with("cannot listen at tcp://127.0.0.1:0") && error.contains(why), "{error}");
        let error =
            LeaderLine::connect(at, leader_terms(1), TIMES, |_| (), |_| ()).err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn strangers_keep_no_leader_away() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let both = files(&ours, ours.issue("both", |_| {}));
    let (worker, port) = worker(&both);
    let mut state = 3_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize
    };
    // The head of a client's first record, which is longer than what follows.
    let hello = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03";
    let mut silent = Vec::new();
    for at in 0..200 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
        let prefix: &[u8] = if at % 2 == 0 { hello } else { b"\x40\0\0\0\x01" };
        // The worker may hang up before all of it is written.
        let _ = stream.write_all(prefix).and_then(|()| stream.write_all(&bytes));
        if at % 8 == 0 {
            silent.push(stream);
        }
    }
    let leader = Leader::start(tcp("127.0.0.1", port, &both), leader_terms(1));
    leader.send(b"still here");
    leader.expect_echoes(&[b"still here"]);
    assert_eq!(worker.echo.started.load(Ordering::SeqCst), 1);
    // Each is let go when its time is over.
    for mut stream in silent {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    }
}

/// Mutation that makes it fail: `Waiting::enter` has no place where as many wait as may.
#[test]
fn silent_strangers_that_fill_every_place_make_room_for_a_leader() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let both = files(&ours, ours.issue("both", |_| {}));
    // No stranger goes by itself while this waits.
    let times = LineTimes { handshake: 10 * PATIENCE, ..TIMES };
    let (worker, bound) = Worker::with_times(tcp("127.0.0.1", 0, &both), times);
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(("127.0.0.1", port(&bound))).unwrap()).collect();
    let is_open = |mut stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    let open = soon(|| Some(silent.iter().filter(|stream| is_open(stream)).count()).filter(|at| *at <= 32));
    assert_eq!(open, Some(32), "as many as may wait");
    let leader = Leader::start(bound, leader_terms(1));
    leader.send(b"served");
    leader.expect_echoes(&[b"served"]);
    assert_eq!(worker.echo.started.load(Ordering::SeqCst), 1);
    // The worker's end does not wait for the rest.
    drop(silent);
}

/// Not a test but a worker, where the variable says so.
#[test]
fn worker_process() {
    let Some(folder) = std::env::var_os(WORKER) else { return };
    let folder = Path::new(&folder);
    let [cert, key, ca] = ["both", "both.key", "ours"].map(|name| folder.join(name));
    let port = std::fs::read_to_string(folder.join("port")).unwrap().parse().unwrap();
    let at = tcp("127.0.0.1", port, &TlsFiles { cert, key, ca });
    let listener = WorkerListener::bind(at.clone(), worker_terms(), TIMES).unwrap();
    assert_eq!(*listener.address(), at);
    let service: Arc<dyn Service> = Arc::new(Echo::default());
    listener.serve(&service);
}

/// Certificates, and a port that was free, for processes of workers.
fn world(folder: &Path) -> WorkerAddress {
    let ours = Authority::new(folder, "ours");
    let both = files(&ours, ours.issue("both", |_| {}));
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::fs::write(folder.join("port"), port.to_string()).unwrap();
    tcp("127.0.0.1", port, &both)
}

fn start(folder: &Path) -> Process {
    Process::of("tcp::worker_process", WORKER, folder)
}

#[test]
fn a_killed_worker_closes_its_line_and_its_successor_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let leader = Leader::start(world(folder.path()), leader_terms(1));
    for round in 0..3 {
        let process = start(folder.path());
        leader.send(&[round]);
        soon(|| (leader.echoes().len() > round as usize).then_some(())).unwrap();
        drop(process);
        soon(|| matches!(leader.line.status(), LineStatus::Connecting { .. }).then_some(())).unwrap();
    }
    assert_eq!(leader.echoes(), [[0], [1], [2]]);
    // No kernel says what became of the process.
    assert_eq!(*leader.ended.lock().unwrap(), [ProcessState::MayRun; 3]);
}

/// Mutation that makes it fail: `Connection::lost` says nothing.
#[test]
fn a_silent_worker_loses_its_line_and_ends_its_session_when_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let leader = Leader::start(world(folder.path()), leader_terms(1));
    let process = start(folder.path());
    leader.send(b"before");
    leader.expect_echoes(&[b"before"]);
    process.signal("-STOP");
    let refused = soon(|| leader.line.send(Lane::Bulk, b"x").err()).unwrap();
    assert!(matches!(refused, LineSendError::Silent { .. }), "{refused}");
    let start = Instant::now();
    no_line(&leader, "handshake");
    assert!(start.elapsed() < PATIENCE / 2);
    let ended = leader.ended.lock().unwrap().clone();
    assert_eq!(ended, [ProcessState::MayRun], "the leader has hung up");
    process.signal("-CONT");
    leader.send(b"after");
    soon(|| (leader.echoes().last().map(Vec::as_slice) == Some(b"after")).then_some(())).unwrap();
}

/// Passes bytes on between a leader and a worker, until it is told to pass none.
struct Relay {
    port: u16,
    stands: Arc<AtomicBool>,
}

impl Relay {
    fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let stands = Arc::new(AtomicBool::new(false));
        let own = Arc::clone(&stands);
        std::thread::spawn(move || {
            for leader in listener.incoming() {
                let (leader, worker) = (leader.unwrap(), TcpStream::connect(("127.0.0.1", to)).unwrap());
                let ends = [(leader.try_clone(), worker.try_clone()), (Ok(worker), Ok(leader))];
                for (from, to) in ends {
                    let (own, from, to) = (Arc::clone(&own), from.unwrap(), to.unwrap());
                    std::thread::spawn(move || pass_on(from, to, &own));
                }
            }
        });
        Self { port, stands }
    }
}

/// One byte at a time: frames and records are cut everywhere.
fn pass_on(mut from: TcpStream, mut to: TcpStream, stands: &AtomicBool) {
    let mut byte = [0];
    while let Ok(1) = from.read(&mut byte) {
        while stands.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if to.write_all(&byte).is_err() {
            break;
        }
    }
    let _closed = to.shutdown(std::net::Shutdown::Both);
}

/// As when a cable is pulled: both processes run, and neither end of the line is closed.
#[test]
fn a_network_that_stands_still_ends_the_session_at_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let both = files(&ours, ours.issue("both", |_| {}));
    let (worker, port) = worker(&both);
    let relay = Relay::start(port);
    let leader = Leader::start(tcp("127.0.0.1", relay.port, &both), leader_terms(1));
    leader.send(b"before");
    leader.expect_echoes(&[b"before"]);
    relay.stands.store(true, Ordering::Release);
    soon(|| (worker.echo.ended.load(Ordering::SeqCst) == 1).then_some(())).unwrap();
    soon(|| (*leader.ended.lock().unwrap() == [ProcessState::MayRun]).then_some(())).unwrap();
    relay.stands.store(false, Ordering::Release);
    leader.send(b"after");
    soon(|| (leader.echoes().last().map(Vec::as_slice) == Some(b"after")).then_some(())).unwrap();
}
