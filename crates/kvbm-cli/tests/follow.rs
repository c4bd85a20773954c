//! A follower of `kvbm replay --events URL` comes to what the replay's tiers hold: over `ZeroMQ`, and over a real nats-server where
//! `KVBM_NATS_SERVER` names its program (`cargo xtask test --only events` fetches one).

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn kvbm(line: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
        command.args(line.split_whitespace()).stdin(Stdio::null());
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// As Ctrl-C does.
    fn interrupt(&self) {
        let kill = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status().unwrap();
        assert!(kill.success());
    }

    /// The exit status, and what it printed.
    fn end(mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut err).unwrap();
        }
        (self.0.wait().unwrap().code(), out, err)
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The answer of the index, once it listens.
fn get(port: u16, path: &str) -> Option<Value> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
}

/// Waits until the index says what the replay's tiers held.
fn agree(port: u16, held: &Value) {
    let deadline = Instant::now() + PATIENCE;
    let wanted = json!({ "g1": held[0], "g2": held[1], "g3": held[2], "g4": 0 });
    loop {
        let sizes = get(port, "/sizes").map(|answer| answer["blocks"].clone());
        let health = get(port, "/health");
        let is_whole = health.as_ref().is_some_and(|health| health["status"] == "ok");
        if sizes.as_ref() == Some(&wanted) && is_whole {
            return;
        }
        assert!(Instant::now() < deadline, "{sizes:?} instead of {wanted}, {health:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

const REPLAY: &str = "replay --synthetic 1500 --capacity 500,1500,4000 --metadata-only --json -";

fn replayed(running: Running) -> Value {
    let (status, out, err) = running.end();
    assert_eq!(status, Some(0), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["events"]["lost"], &json["events"]["unpublished"]), (&json!(0), &json!(0)), "{json:#}");
    json
}

#[test]
fn tail_and_index_of_a_replay_over_zmq() {
    let url = format!("zmq+tcp://127.0.0.1:{}?replay={}&from=start", free_port(), free_port());
    let port = free_port();
    let index = Running::kvbm(&format!("events serve-index {url} --listen {port} --forget-after 0"));
    let tail = Running::kvbm(&format!("events tail {url} --json --count 500"));
    let stats = Running::kvbm(&format!("events stats {url} --json --count 1"));
    // Followers ask for five seconds whether somebody publishes.
    let json = replayed(Running::kvbm(&format!("{REPLAY} --events {url}")));
    agree(port, &json["events"]["held"]);

    let (status, out, err) = tail.end();
    assert_eq!(status, Some(0), "{err}");
    let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 500);
    for (number, line) in lines.iter().enumerate() {
        assert_eq!((&line["type"], &line["sequence"]), (&json!("event"), &json!(number)), "{line}");
        assert_eq!(line["source"], json["events"]["source"]);
    }
    let (status, out, err) = stats.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(serde_json::from_str::<Value>(&out).unwrap()["events_per_s"].is_f64(), "{out}");

    // Ctrl-C ends it cleanly.
    index.interrupt();
    assert_eq!(index.end().0, Some(0));
}

#[test]
fn a_url_that_nobody_answers_is_an_error_with_a_hint() {
    for command in ["tail", "stats", "serve-index"] {
        let (status, _, err) = Running::kvbm(&format!("events {command} nats://127.0.0.1:9")).end();
        assert_eq!(status, Some(1), "{err}");
        assert!(err.contains("cannot follow nats://127.0.0.1:9: check that the other side is up"), "{err}");
    }
    let (status, _, err) = Running::kvbm("events tail zmq+tcp://127.0.0.1:9?format=vllm").end();
    assert_eq!(status, Some(1));
    assert!(err.contains("leave format=vllm out"), "{err}");
    let (status, _, err) = Running::kvbm("events serve-index nats://127.0.0.1:9 --listen 0.0.0.0:1").end();
    assert_eq!(status, Some(1));
    assert!(err.contains("--public"), "{err}");
}

/// A nats-server with its files in a folder of its own.
struct Server {
    program: PathBuf,
    port: u16,
    folder: tempfile::TempDir,
    child: Option<Running>,
}

impl Server {
    fn start() -> Option<Self> {
        let Some(program) = std::env::var_os("KVBM_NATS_SERVER") else {
            println!("skipped: KVBM_NATS_SERVER names no nats-server");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let mut server = Self { program: program.into(), port: free_port(), folder, child: None };
        server.restart();
        Some(server)
    }

    fn restart(&mut self) {
        self.child = None;
        let mut command = Command::new(&self.program);
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string(), "-js", "-sd"]).arg(self.folder.path());
        self.child = Some(Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()));
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Starts the index of `url` and waits until it follows.
fn index(url: &str, port: u16) -> Running {
    let mut index = Running::kvbm(&format!("events serve-index {url} --listen {port} --forget-after 0"));
    let mut line = String::new();
    BufReader::new(index.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("index of "), "{line}");
    index
}

#[test]
fn a_replay_over_nats_ends_with_an_index_like_its_tiers() {
    let Some(server) = Server::start() else { return };
    let (url, port) = (format!("nats://127.0.0.1:{}", server.port), free_port());
    let _index = index(&url, port);
    let json = replayed(Running::kvbm(&format!("{REPLAY} --events {url}")));
    agree(port, &json["events"]["held"]);
}

/// Mutation that makes it fail: a publisher that does not keep a batch that the server did not acknowledge.
#[test]
fn over_jetstream_although_the_server_is_killed_in_the_middle() {
    let Some(mut server) = Server::start() else { return };
    let (url, port) = (format!("jetstream+nats://127.0.0.1:{}", server.port), free_port());
    let _index = index(&url, port);
    let dir = tempfile::tempdir().unwrap();
    let replay = Running::kvbm(&format!(
        "replay --synthetic 1500 --capacity 500,1500,4000 --dir {} --json - --events {url}",
        Path::new(dir.path()).display()
    ));
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(400));
        server.child = None;
        std::thread::sleep(Duration::from_millis(200));
        server.restart();
    }
    let json = replayed(replay);
    agree(port, &json["events"]["held"]);
}
