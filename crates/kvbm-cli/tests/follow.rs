//! A follower of `kvbm replay --events URL` comes to what the replay's tiers hold: over `ZeroMQ`,
//! and over a real nats-server where `KVBM_NATS_SERVER` names its program (`cargo xtask test --only
//! test` fetches one).

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[path = "../../kvbm-events/tests/support/nats_server.rs"]
mod nats_server;
#[path = "../../kvbm-events/tests/support/ports.rs"]
mod ports;

use kvbm::events_plane::zmq::{ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm::events_plane::{EventBatch, EventKind, EventTransport, KvEvent, SourceId, StreamId, wire};
use kvbm::plan::Epoch;
use nats_server::{NatsServer, STREAM_BYTES};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
/// How long nothing takes that ends at all.
const HANG: Duration = Duration::from_secs(300);

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

    /// Its first line on standard error.
    fn first_note(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
        line
    }

    /// The port that an index says it listens on, once it follows.
    fn port(&mut self) -> u16 {
        let line = self.first_note();
        assert!(line.starts_with("index of "), "{line}");
        line.trim_end().rsplit_once(':').unwrap().1.parse().unwrap()
    }

    /// What it prints, one value a line, while it runs.
    fn reports(&mut self) -> impl Iterator<Item = Value> {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap())
    }

    /// As a service manager does. Ctrl-C says the same, but whoever started the tests may have them
    /// ignore it, and what they start too.
    fn terminate(&self) {
        assert!(Command::new("kill").arg(self.0.id().to_string()).status().unwrap().success());
    }

    /// The exit status, and what it printed.
    fn end(mut self) -> (Option<i32>, String, String) {
        let (out, err) = (all_of(self.0.stdout.take()), all_of(self.0.stderr.take()));
        let deadline = Instant::now() + HANG;
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "process {} does not end", self.0.id());
            std::thread::sleep(Duration::from_millis(5));
        };
        (status.code(), out.join().unwrap(), err.join().unwrap())
    }
}

/// What comes out of a pipe until its end, read meanwhile: a full pipe would hold up who writes.
/// Nothing of one that somebody else reads.
fn all_of(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut pipe) = pipe {
            pipe.read_to_string(&mut text).unwrap();
        }
        text
    })
}

/// What a publisher in `dir` is reached by: no port that somebody else may have taken meanwhile.
fn zmq_in(dir: &tempfile::TempDir) -> String {
    let path = dir.path().display();
    format!("zmq+ipc://{path}/events?replay=ipc://{path}/replay&from=start")
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
    let dir = tempfile::tempdir().unwrap();
    let url = zmq_in(&dir);
    let mut index = Running::kvbm(&format!("events serve-index {url} --listen 0 --forget-after 0 --wait 60"));
    let tail = Running::kvbm(&format!("events tail {url} --json --count 500 --wait 60"));
    let stats = Running::kvbm(&format!("events stats {url} --json --count 1 --wait 60"));
    let json = replayed(Running::kvbm(&format!("{REPLAY} --events {url}")));
    agree(index.port(), &json["events"]["held"]);

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

    // A signal ends it cleanly.
    index.terminate();
    assert_eq!(index.end().0, Some(0));
}

#[test]
fn a_url_that_nobody_answers_is_an_error_with_a_hint() {
    for command in ["tail", "stats", "serve-index"] {
        let (status, _, err) = Running::kvbm(&format!("events {command} nats://127.0.0.1:9 --wait 1")).end();
        assert_eq!(status, Some(1), "{err}");
        assert!(err.contains("cannot follow nats://127.0.0.1:9: check that the other side is up"), "{err}");
    }
    let (status, _, err) = Running::kvbm("events tail zmq+tcp://127.0.0.1:9?format=vllm --wait 1").end();
    assert_eq!(status, Some(1));
    assert!(err.contains("no publisher at tcp://127.0.0.1:9 within") && err.contains("--wait"), "{err}");
    let (status, _, err) =
        Running::kvbm("replay --synthetic 20 --metadata-only --events nats://me:word@127.0.0.1:9").end();
    assert_eq!(status, Some(1));
    assert!(err.contains("were not published") && err.contains("nats://***@127.0.0.1:9: "), "{err}");
    assert!(err.contains("Connection refused") && !err.contains("word"), "{err}");
    let (status, _, err) = Running::kvbm("events tail zmq+tcp://127.0.0.1:99999 --wait 1").end();
    assert_eq!(status, Some(1));
    assert!(err.contains("is not an address: write") && !err.contains("the other side is up"), "{err}");
    let (status, _, err) = Running::kvbm("events tail nats://127.0.0.1:9?format=vllm").end();
    assert_eq!(status, Some(2));
    assert!(err.contains("no parameter 'format'"), "{err}");
    let (status, _, err) = Running::kvbm("events serve-index nats://127.0.0.1:9 --listen 0.0.0.0:1").end();
    assert_eq!(status, Some(2));
    assert!(err.contains("--public"), "{err}");
}

/// An engine at an address of its own, with a socket for replays.
struct Engine {
    transport: ZmqTransport,
    url: String,
}

impl Engine {
    fn start(topic: &str) -> Self {
        let config = ZmqConfig { topic: topic.into(), ..ZmqConfig::default() };
        let address = ZmqAddress::new("tcp://127.0.0.1:*").with_replay("tcp://127.0.0.1:*");
        let transport = ZmqTransport::bind(config, &address).unwrap();
        let bound = transport.addresses().remove(0);
        let (events, replay) = (bound.events.strip_prefix("tcp://").unwrap(), bound.replay.unwrap());
        let url = format!("zmq+tcp://{events}?replay={replay}&format=vllm&from=start");
        Self { transport, url }
    }

    fn publish(&self, payload: &[u8]) {
        self.transport.publish(&payload.into(), PATIENCE).unwrap();
    }
}

/// Captured from vLLM. After the first two a chain of four blocks has lost three, and another one
/// came.
const CAPTURED: [&[u8]; 4] = [
    include_bytes!("../../kvbm-events/tests/golden/vllm/gpu_evict_int_000.msgpack"),
    include_bytes!("../../kvbm-events/tests/golden/vllm/gpu_evict_int_003.msgpack"),
    include_bytes!("../../kvbm-events/tests/golden/vllm/cpuspec_002.msgpack"),
    include_bytes!("../../kvbm-events/tests/golden/vllm/cpuspec_013.msgpack"),
];

fn post(port: u16, path: &str, body: &Value) -> Value {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let body = body.to_string();
    write!(stream, "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
}

fn until(what: impl Fn() -> Option<Value>) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(Instant::now() < deadline, "not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn tail_stats_and_index_of_an_engine() {
    let engine = Engine::start("kv@tiny");
    CAPTURED[..2].iter().for_each(|payload| engine.publish(payload));
    let url = &engine.url;
    let tail = Running::kvbm(&format!("events tail {url} --json --count 13"));
    let lines = Running::kvbm(&format!("events tail {url} --count 1"));
    let mut stats = Running::kvbm(&format!("events stats {url} --json"));
    let (served, port) = index(url);
    until(|| get(port, "/health").filter(|health| health["events"] == 5));
    CAPTURED[2..].iter().for_each(|payload| engine.publish(payload));
    let health = until(|| get(port, "/health").filter(|health| health["events"] == 15));
    assert_eq!((&health["status"], &health["messages_missing"]), (&json!("ok"), &json!(0)), "{health}");

    let (status, out, err) = tail.end();
    assert_eq!(status, Some(0), "{err}");
    let values: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(values.len(), 13, "{out}");
    assert!(values.iter().all(|value| value["type"] == "event" && value["topic"] == "kv@tiny"));
    let kinds: Vec<&str> = values[..5].iter().map(|value| value["event_type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["BlockStored", "BlockRemoved", "BlockRemoved", "BlockRemoved", "BlockStored"]);
    let (status, out, _) = lines.end();
    assert_eq!((status, out.lines().count()), (Some(0), 1));
    assert!(out.contains("stored   GPU  4 blocks 10957728731991320456 .. 17487227652846051583"), "{out}");
    let last = stats.reports().nth(1).unwrap();
    assert!(last["missing"] == 0 && last["malformed"] == 0 && last["lag_batches"].is_u64(), "{last}");

    // The engine's own hashes: eight blocks of one chain are there, all on both media.
    let chain = [
        10_957_728_731_991_320_456_u64,
        7_264_425_548_371_609_122,
        14_450_321_436_011_090_161,
        17_487_227_652_846_051_583,
    ];
    let by_hashes = post(port, "/find", &json!({ "hashes": chain }));
    let found = &by_hashes["matches"][0];
    assert_eq!(
        (&by_hashes["asked"], &found["blocks"], &found["by_tier"]["g2"]),
        (&json!(4), &json!(4), &json!(0))
    );
    assert_eq!(
        found["source"],
        url.split_once("//").map(|(_, rest)| format!("tcp://{}", &rest[..rest.find('?').unwrap()])).unwrap()
    );
    let text = chain.map(|hash| hash.to_string()).join(",");
    assert_eq!(get(port, &format!("/find?hashes={text}")).unwrap(), by_hashes);
    // The prompt itself, a few tokens longer.
    let mut tokens = values[0]["token_ids"].as_array().unwrap().clone();
    tokens.extend([json!(1), json!(2)]);
    let by_tokens = post(port, "/find", &json!({ "tokens": tokens }));
    assert_eq!((&by_tokens["asked_tokens"], &by_tokens["matches"]), (&json!(130), &by_hashes["matches"]));
    let other = post(port, "/find", &json!({ "tokens": tokens, "lora_name": "poet" }));
    assert_eq!(other["matches"], json!([]), "another model");
    let sources = get(port, "/sources").unwrap();
    assert_eq!(sources["sources"][0]["block_tokens"], json!([32]), "{sources}");
    drop(served);
}

/// A batch of clearings with these numbers.
fn clearings(numbers: std::ops::Range<u64>) -> Vec<u8> {
    let stream = StreamId { source: SourceId(7), epoch: Epoch(1), shard: 0 };
    let next = numbers.end;
    let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
    wire::encode(&EventBatch::new(stream, next, events)).unwrap()
}

/// Mutation that makes it fail: a tail, or stats, that count all that came before as lost.
#[test]
fn a_running_source_is_joined_where_it_is() {
    let transport = ZmqTransport::bind(ZmqConfig::default(), &ZmqAddress::new("tcp://127.0.0.1:*")).unwrap();
    let url = format!("zmq+{}", transport.addresses().remove(0).events);
    transport.publish(&clearings(0..4000).into(), PATIENCE).unwrap();
    let mut tail = Running::kvbm(&format!("events tail {url} --json --count 4 --wait 60"));
    let mut stats = Running::kvbm(&format!("events stats {url} --json --wait 60"));
    for follower in [&mut tail, &mut stats] {
        let line = follower.first_note();
        assert!(line.starts_with("following "), "{line}");
    }
    for start in [4000, 4004] {
        transport.publish(&clearings(start..start + 2).into(), PATIENCE).unwrap();
    }
    let (status, out, _) = tail.end();
    assert_eq!(status, Some(0), "{out}");
    let values: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = values.iter().map(|value| value["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["joined", "event", "event", "gap"], "{out}");
    assert_eq!((&values[0]["joined_at"], &values[1]["sequence"]), (&json!(4000), &json!(4000)));
    assert_eq!((&values[3]["first"], &values[3]["missing"]), (&json!(4002), &json!(2)));
    // However many reports it takes.
    let last = stats.reports().find(|report| report["events"] == 4).unwrap();
    assert_eq!((&last["gaps"], &last["missing"]), (&json!(1), &json!(2)), "{last}");
    assert_eq!((&last["sources"][0]["joined_at"], &last["sources"][0]["missing"]), (&json!(4000), &json!(2)));
}

/// Arrays instead of maps, a signed number for a hash, media of its own.
#[test]
fn an_engine_that_speaks_sglangs_dialect_is_followed() {
    let engine = Engine::start("");
    let mut payload = vec![0x93, 0xCB, 0x41, 0xDA, 0, 0, 0, 0, 0, 0, 0x92, 0x97, 0xAB];
    payload.extend(b"BlockStored");
    payload.extend([0x92, 0xD3, 0x80, 0, 0, 0, 0, 0, 0, 1, 5, 0xC0, 0x94, 1, 2, 3, 4, 2, 0xC0, 0xA4]);
    payload.extend(b"DISK");
    payload.extend([0x93, 0xAC]);
    payload.extend(b"BlockRemoved");
    payload.extend([0x91, 5, 0xA4]);
    payload.extend(b"DISK");
    payload.push(3);
    let (_served, port) = index(&engine.url);
    engine.publish(&payload);
    until(|| get(port, "/sizes").filter(|sizes| sizes["blocks"]["g3"] == 1));
    for question in
        [json!({ "hashes": [-9_223_372_036_854_775_807_i64, 5] }), json!({ "tokens": [1, 2, 3, 4] })]
    {
        let answer = post(port, "/find", &question);
        assert_eq!(answer["matches"][0]["blocks"], 1, "{question}: {answer}");
    }
    let tail = Running::kvbm(&format!("events tail {} --count 2", engine.url));
    let (status, out, err) = tail.end();
    assert_eq!(status, Some(0), "{err}");
    assert!(out.contains("stored   DISK  2 blocks -9223372036854775807 .. 5"), "{out}");
}

#[test]
fn a_replay_that_speaks_as_engines_do_ends_with_an_index_like_its_tiers() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("{}&format=vllm", zmq_in(&dir));
    let mut index = Running::kvbm(&format!("events serve-index {url} --listen 0 --wait 60"));
    let json = replayed(Running::kvbm(&format!("{REPLAY} --events {url}")));
    agree(index.port(), &json["events"]["held"]);
}

/// Starts the index of `url` and waits until it follows. It listens on the port.
fn index(url: &str) -> (Running, u16) {
    let mut index = Running::kvbm(&format!("events serve-index {url} --listen 0 --forget-after 0 --wait 60"));
    let port = index.port();
    (index, port)
}

#[test]
fn a_replay_over_nats_ends_with_an_index_like_its_tiers() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let url = format!("nats://127.0.0.1:{}", server.port());
    let (_index, port) = index(&url);
    let json = replayed(Running::kvbm(&format!("{REPLAY} --events {url}")));
    agree(port, &json["events"]["held"]);
}

/// Mutation that makes it fail: a publisher that does not keep a batch that the server did not
/// acknowledge.
#[test]
fn over_jetstream_although_the_server_is_killed_in_the_middle() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let url = format!("jetstream+nats://127.0.0.1:{}?max_bytes={STREAM_BYTES}", server.port());
    let (_index, port) = index(&url);
    let dir = tempfile::tempdir().unwrap();
    let replay = Running::kvbm(&format!(
        "replay --synthetic 1500 --capacity 500,1500,4000 --dir {} --json - --events {url}",
        Path::new(dir.path()).display()
    ));
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(400));
        server.kill();
        std::thread::sleep(Duration::from_millis(200));
        server.restart();
    }
    let json = replayed(replay);
    agree(port, &json["events"]["held"]);
}
