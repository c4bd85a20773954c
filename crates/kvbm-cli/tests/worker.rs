//! `kvbm worker` as an operator meets it: its first line, its errors, its end, and a leader over
//! two of them.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[cfg(feature = "tls")]
#[path = "../../kvbm-link/tests/support/authority.rs"]
mod authority;

use kvbm::config::Config;
use kvbm::{KvBlockManager, Owned, Tier};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn configuration(folder: &Path) -> PathBuf {
    let path = folder.join("kvbm.toml");
    let text = format!(
        "[model]\nnum_layers = 2\nnum_kv_heads = 2\nhead_dim = 32\n\
         [namespace]\nmodel = \"test\"\n\
         [parallelism]\ntensor_parallel = 2\nworkers = [\"{0}/run/0.sock\", \"{0}/run/1.sock\"]\n\
         [device]\ncapacity = 16\n[host]\ncapacity = 32\n\
         [disk]\ndir = \"{0}/disk\"\ncapacity = 64\ndrive_writes_per_day = 0\n\
         [offload.g1_g2]\nqueue_share = 1.0\n[offload.g2_g3]\nwrite_through = true\nqueue_share = 1.0\n",
        folder.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// The same with workers at addresses, and the certificates of `authority`.
#[cfg(feature = "tls")]
fn over_tcp(folder: &Path, authority: &authority::Authority<'_>, ports: [u16; 2]) -> PathBuf {
    let text = std::fs::read_to_string(configuration(folder)).unwrap();
    let (cert, key) = authority.issue("leader", |_| {});
    let [cert, key, ca] = [cert, key, authority.file()].map(|file| file.display().to_string());
    let workers = ports.map(|port| format!("\"tcp://127.0.0.1:{port}\"")).join(", ");
    let own = format!("workers = [{workers}]\ntls_cert = \"{cert}\"\ntls_key = \"{key}\"\ntls_ca = \"{ca}\"");
    let line = |line: &str| if line.starts_with("workers") { own.clone() } else { line.to_owned() };
    let path = folder.join("tcp.toml");
    std::fs::write(&path, text.lines().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn command(config: &Path, rank: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.arg("worker").arg("--config").arg(config).args(["--rank", rank]);
    command
}

/// A worker that has said its first line. It ends with this.
struct WorkerProcess {
    child: Child,
    first_line: String,
}

impl WorkerProcess {
    fn start(config: &Path, rank: &str) -> Self {
        Self::of(command(config, rank))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut first_line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
        Self { child, first_line }
    }

    /// Asks it to end; its exit status.
    fn terminate(&mut self) -> Option<i32> {
        // SAFETY: a signal to a child that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) }, 0);
        self.child.wait().unwrap().code()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // One that was terminated is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn workers_serve_one_leader_after_another_and_end_when_they_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
    let mut workers = ["0", "1"].map(|rank| WorkerProcess::start(&file, rank));
    let expected =
        format!("kvbm worker: rank 1 of 2 listens at {}/run/1.sock: G1 16 blocks", folder.path().display());
    assert!(workers[1].first_line.starts_with(&expected), "{}", workers[1].first_line);
    let config = Config::load(Some(&file)).unwrap();
    let prompt: Vec<u32> = (0..16 * 4).collect();
    for life in 0..3 {
        let manager = KvBlockManager::<Owned>::builder().config(config.clone()).build().unwrap();
        let sequence = manager.sequence(&prompt, b"").unwrap();
        let found = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
        assert_eq!(found.len(), if life == 0 { 0 } else { 4 }, "from the disks, verified by both workers");
        if life == 0 {
            let fresh = manager.allocate(4).unwrap();
            drop(manager.register(manager.commit(fresh, &sequence, 0).unwrap().0).unwrap());
            assert!(manager.wait_offloads(Instant::now() + Duration::from_secs(60)));
        }
        drop(found);
        manager.clear(Tier::G1).unwrap();
        let report = manager.shutdown(Duration::from_secs(60));
        assert!(report.is_complete(), "{report:?}");
    }
    for worker in &mut workers {
        assert_eq!(worker.terminate(), Some(0));
    }
    assert!(!folder.path().join("run/0.sock").exists(), "the socket goes with its worker");
}

/// Mutation that makes it fail: the program does not call `leave`.
#[test]
fn workers_that_are_asked_to_end_before_their_leader_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
    let text = std::fs::read_to_string(&file).unwrap();
    // Blocks go to disk only when there is a reason.
    std::fs::write(&file, text.replace("write_through = true", "write_through = false\nahead_share = 0.0"))
        .unwrap();
    let config = Config::load(Some(&file)).unwrap();
    let build = || KvBlockManager::<Owned>::builder().config(config.clone()).build().unwrap();
    let start = || ["0", "1"].map(|rank| WorkerProcess::start(&file, rank));
    let prompt: Vec<u32> = (0..16 * 4).collect();

    let mut workers = start();
    let manager = build();
    let sequence = manager.sequence(&prompt, b"").unwrap();
    let fresh = manager.allocate(4).unwrap();
    drop(manager.register(manager.commit(fresh, &sequence, 0).unwrap().0).unwrap());
    assert!(manager.wait_offloads(Instant::now() + Duration::from_secs(60)));
    assert_eq!(manager.status().tiers[Tier::G3.index()].inactive, 0, "nothing is on disk yet");
    for worker in &mut workers {
        assert_eq!(worker.terminate(), Some(0));
    }
    let report = manager.shutdown(Duration::from_secs(60));
    assert_eq!((report.durable_blocks, report.is_complete()), (Some(4), true), "{report:?}");
    drop(manager);

    let _workers = start();
    assert_eq!(build().look_up(&sequence).len(), 4, "found on the disks of both ranks");
}

#[test]
fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
    let running = WorkerProcess::start(&file, "0");
    let other = folder.path().join("other.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with("workers"));
    std::fs::write(&other, lines.collect::<Vec<_>>().join("\n")).unwrap();
    for (file, rank, status, hint) in [
        (&file, "0", 1, "another process listens at"),
        (&file, "2", 1, "there is no rank 2: the 2 ranks"),
        (&file, "x", 2, "give a whole number"),
        (&other, "1", 2, "--socket PATH"),
        (&folder.path().join("absent.toml"), "1", 1, "absent.toml"),
    ] {
        let mut command = command(file, rank);
        if rank == "2" {
            command.arg("--socket").arg(folder.path().join("run/2.sock"));
        }
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(hint), "{rank}: {stderr}");
        assert_eq!(output.status.code(), Some(status), "{stderr}");
        assert!(output.stdout.is_empty());
    }
    drop(running);
}

/// Four blocks of a sequence that were found and loaded, or computed and saved.
#[cfg(feature = "tls")]
fn put_or_find(manager: &KvBlockManager<Owned>) -> usize {
    let sequence = manager.sequence(&(0..16 * 4).collect::<Vec<u32>>(), b"").unwrap();
    let found = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
    if found.is_empty() {
        let fresh = manager.allocate(4).unwrap();
        drop(manager.register(manager.commit(fresh, &sequence, 0).unwrap().0).unwrap());
        assert!(manager.wait_offloads(Instant::now() + Duration::from_secs(60)));
    }
    let loaded = found.len();
    drop(found);
    manager.clear(Tier::G1).unwrap();
    loaded
}

/// Each rank has a certificate of its own, and one of them is killed.
#[cfg(feature = "tls")]
#[test]
fn workers_at_addresses_serve_holders_of_certificates_and_one_may_die() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, other] = ["ours", "other"].map(|name| authority::Authority::new(folder.path(), name));
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ports = [free(), free()];
    let file = over_tcp(folder.path(), &ours, ports);
    let start = |rank: usize, cert: &(PathBuf, PathBuf)| {
        let mut command = command(&file, &rank.to_string());
        command.arg("--listen").arg(format!("tcp://127.0.0.1:{}", ports[rank]));
        command.arg("--tls-cert").arg(&cert.0).arg("--tls-key").arg(&cert.1);
        WorkerProcess::of(command)
    };
    let own = ["rank-0", "rank-1"].map(|name| ours.issue(name, |_| {}));
    let mut workers = [0, 1].map(|rank| start(rank, &own[rank]));
    let expected = format!("kvbm worker: rank 1 of 2 listens at tcp://127.0.0.1:{}: G1", ports[1]);
    assert!(workers[1].first_line.starts_with(&expected), "{}", workers[1].first_line);
    let config = Config::load(Some(&file)).unwrap();
    let build = |config: &Config| KvBlockManager::<Owned>::builder().config(config.clone()).build();
    let manager = build(&config).unwrap();
    assert_eq!((put_or_find(&manager), put_or_find(&manager)), (0, 4));
    manager.flush(Duration::from_secs(60)).unwrap();

    workers[1].child.kill().unwrap();
    workers[1].child.wait().unwrap();
    workers[1] = start(1, &own[1]);
    // From the disks: what host memory had is lost. Until the new worker is taken in, loads fail.
    let until = Instant::now() + Duration::from_secs(60);
    let sequence = manager.sequence(&(0..16 * 4).collect::<Vec<u32>>(), b"").unwrap();
    while manager.onboard(manager.match_prefix(&sequence)).wait().map_or(0, |found| found.len()) < 4 {
        assert!(Instant::now() < until, "{:?}", manager.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    // The leader may notice the death only now: until it has the new worker, a flush fails.
    while let Err(error) = manager.flush(Duration::from_secs(60)) {
        assert!(Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = manager.shutdown(Duration::from_secs(60));
    assert!(report.is_complete(), "{report:?}");

    // A leader of another authority, and one that trusts another.
    let (foreign, trusting) = (other.issue("foreign", |_| {}), other.file());
    for (cert, ca, why) in [(&foreign, ours.file(), "UnknownCA"), (&own[0], trusting, "UnknownIssuer")] {
        let mut config = config.clone();
        let own = &mut config.parallelism;
        (own.tls_cert, own.tls_key, own.tls_ca) = (Some(cert.0.clone()), Some(cert.1.clone()), Some(ca));
        let error = build(&config).err().unwrap().to_string();
        assert!(error.starts_with("worker of rank 0 at tcp://127.0.0.1:") && error.contains(why), "{error}");
    }
    for worker in &mut workers {
        assert_eq!(worker.terminate(), Some(0));
    }
}

#[test]
fn addresses_without_certificates_and_with_nonsense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
    let lacks =
        if cfg!(feature = "tls") { "set tls_cert, tls_key and tls_ca" } else { "with the feature tls" };
    for (options, status, hint) in [
        (&["--listen", "tcp://127.0.0.1:7"][..], 1, lacks),
        (&["--listen", "tcp://127.0.0.1"], 1, "must be tcp://HOST:PORT"),
        (&["--listen", "10.0.0.1:7"], 2, "give tcp://HOST:PORT, or --socket PATH"),
        (&["--listen", "tcp://127.0.0.1:7", "--tls-cert", "x"], 1, "needs parallelism.tls_key too"),
        (&["--tls-cert", "x", "--tls-key", "x", "--tls-ca", "x"], 2, "have no use at the socket"),
        (&["--listen", "tcp://127.0.0.1:7", "--socket", "x"], 2, "cannot be used with"),
    ] {
        let output = command(&file, "0").args(options).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(hint), "{options:?}: {stderr}");
        assert_eq!(output.status.code(), Some(status), "{stderr}");
    }
}
