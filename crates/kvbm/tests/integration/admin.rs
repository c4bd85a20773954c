//! Administration of a manager in this process, over its socket and over HTTP.
#![cfg(feature = "worker")]

use crate::support::{books, fill, serve, soon, three_tiers, tokens};
use kvbm::admin::{AdminEngine, AdminHost};
use kvbm::metrics::{EngineCounts, MetricFamily, Metrics};
use kvbm::{BuildError, KvBlockManager, Owned, Tier, TierMask};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Sends a request and reads the whole answer: its status and its JSON.
fn exchange(mut stream: impl Read + Write, request: &[u8]) -> (u16, Value) {
    // The server may refuse a request before it has read it.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer}"));
    (status.unwrap(), serde_json::from_str(body).unwrap_or(Value::Null))
}

fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: kvbm\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Calls over the socket.
struct Socket(PathBuf);

impl Socket {
    fn stream(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.0).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn get(&self, path: &str) -> Value {
        let (status, answer) = exchange(self.stream(), request("GET", path, "", "").as_bytes());
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        exchange(self.stream(), request("POST", path, "", &body.to_string()).as_bytes())
    }

    /// A call that succeeds.
    fn done(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path} {body}: {answer}");
        answer
    }

    /// A call that is refused for this reason.
    fn refused(&self, path: &str, body: &Value, status: u16, why: &str) {
        let (found, answer) = self.post(path, body);
        let text = answer["error"].as_str().unwrap_or_default();
        assert!(found == status && text.contains(why), "{path} {body}: {found} {answer}");
    }
}

fn with_socket(folder: &Path) -> (KvBlockManager<Owned>, Socket) {
    let path = folder.join("run/admin.sock");
    let manager = three_tiers([16, 32, 64], &folder.join("disk"), |config| {
        config.admin.socket = Some(path.clone());
        config.set("tenants.shares", "acme=0.5, beta=0.25").unwrap();
    });
    (manager, Socket(path))
}

#[test]
fn an_operator_sees_where_blocks_are_and_what_the_manager_does() {
    let folder = tempfile::tempdir().unwrap();
    let (manager, socket) = with_socket(folder.path());
    let prompt = tokens(&manager, 1, 6);
    assert_eq!(serve(&manager, &prompt), 0);
    assert!(manager.wait_offloads(soon()));
    manager.step();
    let status = socket.get("/v1/status");
    let tier = |name: &str| {
        status["tiers"].as_array().unwrap().iter().find(|tier| tier["tier"] == name).cloned().unwrap()
    };
    assert_eq!((&tier("g1")["capacity"], &tier("g2")["used"]), (&json!(16), &json!(6)));
    for (field, value) in [
        ("model", json!("test-model")),
        ("iteration", json!(1)),
        ("lookup_blocks", json!(6)),
        ("shut_down", json!(false)),
        ("pid", json!(std::process::id())),
        ("engines", json!([])),
        ("namespace", json!(manager.namespace().tag().to_string())),
    ] {
        assert_eq!(status[field], value, "{field}");
    }
    assert_eq!(status["disk"]["directories"][0]["reads"], "closed");
    assert_eq!(status["tenants"][1]["name"], "acme");

    let by_tokens = socket.done("/v1/look-up", &json!({ "tokens": prompt.tokens() }));
    assert_eq!((&by_tokens["asked"], &by_tokens["found"]), (&json!(6), &json!(6)));
    assert_eq!(by_tokens["by_tier"], json!({ "g1": 6, "g2": 6, "g3": 6, "g4": 0 }));
    assert_eq!(by_tokens["blocks"][0]["hash"], prompt.hashes()[0].to_string());
    let hashes: Vec<_> = prompt.hashes().iter().map(ToString::to_string).collect();
    assert_eq!(socket.done("/v1/look-up", &json!({ "hashes": hashes })), by_tokens);
    let salted = socket.done("/v1/look-up", &json!({ "tokens": prompt.tokens(), "salt": "s" }));
    let of_tenant = socket.done("/v1/look-up", &json!({ "tokens": prompt.tokens(), "tenant": "acme" }));
    let of_adapter = socket.done("/v1/look-up", &json!({ "tokens": prompt.tokens(), "adapter": "sql@3" }));
    for other in [salted, of_tenant, of_adapter] {
        assert_eq!((&other["asked"], &other["found"]), (&json!(6), &json!(0)));
    }
    // As an engine that hashes itself has them.
    let engine = manager.external_sequence([b"ab", b"cd"]);
    drop(fill_external(&manager, &engine));
    let found = socket.done("/v1/look-up", &json!({ "engine_hashes": ["6162", "6364"] }));
    assert_eq!(found["found"], 2);
    assert_eq!(manager.metrics().lookups.get(), 6, "an operator's look is no use");
    assert_eq!(socket.get("/v1/volumes"), json!({ "volumes": [] }));

    let mut stream = socket.stream();
    stream.write_all(request("GET", "/metrics", "", "").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("kvbm_lookup_blocks_total 6\n") && text.ends_with("# EOF\n"), "{text}");
}

fn fill_external(
    manager: &KvBlockManager<Owned>,
    sequence: &kvbm::ExternalSequence,
) -> kvbm::Cached<kvbm::G1> {
    let fresh = manager.allocate(sequence.num_blocks()).unwrap();
    let (done, _) = manager.commit(fresh, sequence, 0).unwrap();
    manager.register(done).unwrap()
}

#[test]
fn pins_have_an_end_in_time_and_in_iterations() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let manager = books([16, 0, 0], |config| config.admin.socket = Some(path.clone()));
    let socket = Socket(path);
    let [timed, counted] = [1, 2].map(|start| tokens(&manager, start, 3));
    for sequence in [&timed, &counted] {
        drop(fill(&manager, sequence, 0));
    }
    let pinned = || manager.status().tiers[0].pinned;
    let pin = |chain: &kvbm::TokenSequence, more: &Value| {
        let mut body = json!({ "tokens": chain.tokens(), "tiers": ["g1"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        socket.done("/v1/pin", &body)
    };
    assert_eq!(pin(&counted, &json!({ "iterations": 2 })), json!({ "asked": 3, "pinned": 3 }));
    assert_eq!(pin(&timed, &json!({ "seconds": 0.3 }))["pinned"], 3);
    assert_eq!(pinned(), 6);
    // What somebody else still pins stays.
    let first = json!({ "tokens": &timed.tokens()[..16], "seconds": 600 });
    assert_eq!(socket.done("/v1/pin", &first)["pinned"], 1);
    let until = Instant::now() + PATIENCE;
    while pinned() != 4 {
        assert!(Instant::now() < until, "{}", pinned());
        std::thread::sleep(Duration::from_millis(10));
    }
    for _ in 0..2 {
        manager.step();
    }
    assert_eq!(pinned(), 1);
    assert_eq!(socket.done("/v1/unpin", &json!({ "tokens": timed.tokens() })), json!({ "ended": 1 }));
    assert_eq!(pinned(), 0);
    // Through the facade alone.
    assert_eq!(manager.pin_for(&timed, TierMask::ALL, Duration::from_secs(600)).unwrap(), 3);
    assert_eq!(manager.unpin(&timed, TierMask::ALL), 3);
    socket.refused("/v1/pin", &json!({ "tokens": timed.tokens(), "seconds": -1 }), 400, "above 0");
    socket.refused("/v1/pin", &json!({ "tokens": timed.tokens() }), 400, "seconds or iterations");
    socket.refused("/v1/pin", &json!({ "tokens": timed.tokens(), "iterations": 0 }), 409, "is over");
    let tiers = json!({ "tokens": timed.tokens(), "seconds": 1, "tiers": ["g4"] });
    socket.refused("/v1/pin", &tiers, 400, "none of g1, g2 and g3");
    // More than half of a tier.
    for start in 3..6 {
        drop(fill(&manager, &tokens(&manager, start, 3), 0));
        let body = json!({ "tokens": tokens(&manager, start, 3).tokens(), "seconds": 600 });
        let (status, answer) = socket.post("/v1/pin", &body);
        assert_eq!(status, if start < 5 { 200 } else { 409 }, "{answer}");
    }
}

#[test]
fn an_operator_steers_tiers_tenants_and_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let (manager, socket) = with_socket(folder.path());
    let acme = manager.tenant("acme").unwrap();
    let prompt: Vec<u32> = (0..96).collect();
    let of_acme = manager.sequence_in(&acme, &prompt, b"").unwrap();
    let ours = tokens(&manager, 1, 4);
    for sequence in [&of_acme, &ours] {
        assert_eq!(serve(&manager, sequence), 0);
        assert!(manager.wait_offloads(soon()));
    }
    assert_eq!(socket.done("/v1/flush", &json!({ "timeout_s": 60 })), json!({ "durable_blocks": 10 }));

    let quotas = socket.done("/v1/quotas", &json!({ "tenant": "beta", "share": 0.4 }));
    assert_eq!(quotas["tenants"][2]["share"], 0.4);
    assert_eq!(socket.get("/v1/quotas"), quotas);
    socket.refused(
        "/v1/quotas",
        &json!({ "tenant": "nobody", "share": 0.1 }),
        400,
        "there is no tenant 'nobody'",
    );
    socket.refused("/v1/quotas", &json!({ "tenant": "beta", "share": 0.6 }), 400, "more than 1");
    socket.refused("/v1/quotas", &json!({ "tenant": "beta" }), 400, "give tenant and share");

    let receipt = socket.done("/v1/forget", &json!({ "tenant": "acme" }));
    assert_eq!(receipt["removed"], json!({ "g1": 6, "g2": 6, "g3": 6, "g4": 0 }));
    assert_eq!((&receipt["complete"], &receipt["slots_in_use"]), (&json!(true), &json!(0)));
    assert_eq!(receipt["keys"], json!({ "destroyed": [], "pending": [] }), "nothing is encrypted");
    assert!(manager.look_up(&of_acme).is_empty() && manager.look_up(&ours).len() == 4);
    // What is in use goes with its user, and the receipt says so.
    let held = manager.match_prefix(&ours);
    let receipt = socket.done("/v1/forget", &json!({ "model": "test-model" }));
    assert_eq!((&receipt["complete"], &receipt["slots_in_use"]), (&json!(false), &json!(4)));
    drop(held);
    socket.refused("/v1/forget", &json!({}), 400, "name what to forget");
    socket.refused("/v1/forget", &json!({ "model": "other" }), 400, "nothing was forgotten");

    assert_eq!(serve(&manager, &ours), 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(socket.done("/v1/clear", &json!({ "tier": "g1" })), json!({ "tier": "g1", "removed": 4 }));
    assert_eq!(manager.look_up(&ours)[0].nearest(), Some(Tier::G2));
    socket.refused("/v1/clear", &json!({ "tier": "g4" }), 409, "not configured");
    socket.refused("/v1/clear", &json!({ "tier": "g5" }), 400, "tier = 'g5'");

    let none = Value::Null;
    let set = socket.done("/v1/ttl", &json!({ "iterations": 1 }));
    assert_eq!(set, json!({ "iterations": 1, "seconds": none }));
    let set = socket.done("/v1/ttl", &json!({ "seconds": 3600, "iterations": 9 }));
    assert_eq!(set, json!({ "iterations": 9, "seconds": 3600 }));
    socket.refused("/v1/ttl", &json!({ "iterations": 0 }), 400, "time to live of 0 iterations");
    socket.refused("/v1/ttl", &json!({ "seconds": 0 }), 400, "time to live of 0 s");
    let lifted = socket.done("/v1/ttl", &json!({ "iterations": null }));
    assert_eq!(lifted, json!({ "iterations": none, "seconds": none }));
    socket.refused("/v1/log", &json!({ "level": "debug" }), 501, "is not kvbm's");
    socket.refused("/v1/log", &json!({ "level": "loud" }), 400, "give one of error");

    assert!(!manager.is_draining());
    let drained = socket.done("/v1/drain", &json!({ "timeout_s": 60 }));
    assert_eq!((&drained["complete"], &drained["durable_blocks"]), (&json!(true), &json!(4)));
    assert!(manager.is_draining());
    assert_eq!(socket.get("/v1/status")["shut_down"], true);
    let report = manager.shutdown(PATIENCE);
    assert!(report.is_complete(), "a second end changes nothing: {report:?}");
    drop(manager);
    assert!(!socket.0.exists());
}

#[test]
fn calls_that_make_no_sense_get_an_error_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let _manager = books([16, 0, 0], |config| config.admin.socket = Some(path.clone()));
    let socket = Socket(path);
    for (body, why) in [
        (json!([1]), "no JSON object"),
        (json!({ "token": [1] }), "'token' is not known; there are: tokens, hashes"),
        (json!({}), "give the blocks by one of"),
        (json!({ "tokens": [1], "hashes": ["a"] }), "give the blocks by one of"),
        (json!({ "tokens": [] }), "tokens is empty"),
        (json!({ "tokens": 5 }), "tokens = 5: expected a list"),
        (json!({ "tokens": [4_294_967_296_u64] }), "is no token"),
        (json!({ "tokens": [-1] }), "is no token"),
        (json!({ "hashes": ["xyz"] }), "expected 32 hexadecimal digits"),
        (json!({ "hashes": ["00112233445566778899aabbccddeeff"], "salt": "s" }), "salt goes with tokens"),
        (json!({ "engine_hashes": ["abc"] }), "hexadecimal digits"),
        (json!({ "tokens": [1], "salt": 5 }), "salt = 5: expected a text"),
        (json!({ "tokens": [1], "salt": "x".repeat(5000) }), "salt"),
        (json!({ "tokens": [1], "tenant": "acme" }), "no tenant 'acme'"),
    ] {
        socket.refused("/v1/look-up", &body, 400, why);
    }
    let (status, answer) = exchange(socket.stream(), request("POST", "/v1/look-up", "", "{").as_bytes());
    assert!(status == 400 && answer["error"].as_str().unwrap().contains("no JSON"), "{answer}");
    socket.refused("/v1/flush", &json!({}), 409, "nothing that lasts is configured");
    socket.refused("/v1/flush", &json!({ "timeout_s": 1e300 }), 400, "at most 3600");
    socket.refused("/v1/nothing", &json!({}), 404, "POST /v1/look-up");
    socket.refused("/v1/status", &json!({}), 405, "/v1/status takes GET, not POST");
    // Deep nesting is refused, and costs no stack.
    let deep = "[".repeat(1 << 20);
    let (status, _) = exchange(socket.stream(), request("POST", "/v1/look-up", "", &deep).as_bytes());
    assert_eq!(status, 400);
    let (status, answer) =
        exchange(socket.stream(), b"POST /v1/look-up HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n");
    assert!(status == 413 && answer["error"].as_str().unwrap().contains("99999999"), "{answer}");
    let long = format!("GET /v1/status HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(20 << 10));
    assert_eq!(exchange(socket.stream(), long.as_bytes()).0, 431);
    assert_eq!(socket.get("/v1/status")["iteration"], 0, "it serves on");
}

/// A process with engines and a log.
#[derive(Default)]
struct Host(Mutex<String>);

impl AdminHost for Host {
    fn engines(&self) -> Vec<AdminEngine> {
        vec![AdminEngine { name: "e".into(), blocks: 5, pids: vec![7], ready: true }]
    }

    fn host_pages(&self) -> Option<String> {
        Some("huge pages".into())
    }

    fn log_level(&self) -> Option<String> {
        Some(self.0.lock().unwrap().clone())
    }

    fn set_log_level(&self, level: &str) -> Result<(), String> {
        level.clone_into(&mut self.0.lock().unwrap());
        Ok(())
    }
}

#[test]
fn the_process_adds_what_only_it_knows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let manager = books([16, 0, 0], |config| config.admin.socket = Some(path.clone()));
    assert_eq!(manager.admin().socket(), Some(path.as_path()));
    manager.admin().hosted_by(Arc::new(Host::default()));
    let socket = Socket(path);
    assert_eq!(socket.done("/v1/log", &json!({ "level": "debug" })), json!({ "level": "debug" }));
    let status = socket.get("/v1/status");
    assert_eq!((&status["log_level"], &status["host_pages"]), (&"debug".into(), &"huge pages".into()));
    let engine = json!([{ "name": "e", "blocks": 5, "pids": [7], "ready": true }]);
    assert_eq!(status["engines"], engine);
}

fn with_http(folder: &Path) -> (KvBlockManager<Owned>, SocketAddr) {
    let file = folder.join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let manager = books([16, 0, 0], |config| {
        config.admin.http = Some("127.0.0.1:0".parse().unwrap());
        config.admin.token_file = Some(file.clone());
    });
    let addr = manager.admin().http().unwrap();
    (manager, addr)
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn over_http_whoever_has_the_token_calls_and_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let (_manager, addr) = with_http(folder.path());
    let with = |authorization: &str, path: &str| {
        exchange(connect(addr), request("GET", path, authorization, "").as_bytes())
    };
    let right = format!("Authorization: Bearer {TOKEN}\r\n");
    assert_eq!(with(&right, "/v1/status").0, 200);
    for wrong in [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer 0123456789abcdef0123456789abcdeX\r\n",
        "Authorization: Basic 0123456789abcdef0123456789abcdef\r\n",
    ] {
        for path in ["/v1/status", "/metrics", "/v1/none"] {
            let (status, answer) = with(wrong, path);
            assert!(status == 401 && answer["error"].as_str().unwrap().contains("token_file"), "{answer}");
        }
    }
    // A stranger's body is not read.
    let head = b"POST /v1/look-up HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n";
    let began = Instant::now();
    assert_eq!(exchange(connect(addr), head).0, 401);
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn slow_and_many_clients_hold_nobody_up_for_long() {
    let folder = tempfile::tempdir().unwrap();
    let (manager, addr) = with_http(folder.path());
    let idle: Vec<_> = (0..200).map(|_| connect(addr)).collect();
    // The manager itself does not notice.
    drop(fill(&manager, &tokens(&manager, 1, 3), 0));
    assert_eq!(manager.match_prefix(&tokens(&manager, 1, 3)).len(), 3);
    let call = request("GET", "/v1/status", &format!("Authorization: Bearer {TOKEN}\r\n"), "");
    let until = Instant::now() + PATIENCE;
    while exchange(connect(addr), call.as_bytes()).0 != 200 {
        assert!(Instant::now() < until, "silent clients hold all places");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(idle);
    let began = Instant::now();
    drop(manager);
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn what_cannot_be_served_is_reported_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let build = |change: &dyn Fn(&mut kvbm::config::Config)| {
        let built = KvBlockManager::<Owned>::builder()
            .model(crate::support::model())
            .namespace(crate::support::namespace())
            .device(kvbm::config::Blocks(16))
            .configure(|config| change(config))
            .build_metadata_only();
        built.map(drop).map_err(|error: BuildError| error.to_string())
    };
    let _first = books([16, 0, 0], |config| config.admin.socket = Some(path.clone()));
    let error = build(&|config| config.admin.socket = Some(path.clone())).unwrap_err();
    assert!(error.contains("admin.socket") && error.contains("another process listens"), "{error}");
    let open = folder.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = build(&|config| config.admin.socket = Some(open.join("s"))).unwrap_err();
    assert!(error.contains("mode 777"), "{error}");
    let http = Some("127.0.0.1:0".parse().unwrap());
    let error = build(&|config| config.admin.http = http).unwrap_err();
    assert!(error.contains("admin.http = 127.0.0.1:0: needs admin.token_file"), "{error}");
    let file = folder.path().join("token");
    std::fs::write(&file, TOKEN).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let with_file = |config: &mut kvbm::config::Config| {
        config.admin.http = http;
        config.admin.token_file = Some(file.clone());
    };
    let error = build(&with_file).unwrap_err();
    assert!(error.contains("admin.token_file") && error.contains("chmod 600"), "{error}");
    let error = build(&|config| config.admin.token_file = Some(file.clone())).unwrap_err();
    assert!(error.contains("has no use without admin.http"), "{error}");
}

/// What dashboards and alerts are made of is what a scrape of a real manager has.
#[test]
fn the_schema_of_metrics_is_what_a_manager_with_everything_says() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    std::fs::set_permissions(&store, std::fs::Permissions::from_mode(0o700)).unwrap();
    let path = folder.path().join("admin.sock");
    let manager = three_tiers([16, 32, 64], &folder.path().join("disk"), |config| {
        config.admin.socket = Some(path.clone());
        config.set("tenants.shares", "acme=0.5").unwrap();
        config.set("volume.uri", &format!("dir://{}", store.display())).unwrap();
        config.set("volumes.queue_share", "1").unwrap();
    });
    let socket = Socket(path);
    // As if a peer had been announced.
    drop(manager.metrics().remote.peer(kvbm::plan::NodeId(2)));
    // As a node daemon does.
    manager.metrics().count_engines_by(|| EngineCounts { ready: 1, attaching: 0 });
    let mut stream = socket.stream();
    stream.write_all(request("GET", "/metrics", "", "").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let found = MetricFamily::parse(text.split_once("\r\n\r\n").unwrap().1);
    assert_eq!(found, Metrics::schema());

    let prompt = tokens(&manager, 1, 4);
    assert_eq!(serve(&manager, &prompt), 0);
    assert!(manager.wait_offloads(soon()));
    let volume = socket.get("/v1/volumes")["volumes"][0].clone();
    assert_eq!((&volume["state"], &volume["blocks"]), (&json!("up"), &json!(4)), "{volume}");
    let found = socket.done("/v1/look-up", &json!({ "tokens": prompt.tokens() }));
    assert_eq!(found["by_tier"], json!({ "g1": 4, "g2": 4, "g3": 4, "g4": 4 }));
    let receipt = socket.done("/v1/forget", &json!({ "model": "test-model" }));
    assert_eq!(receipt["removed"], json!({ "g1": 4, "g2": 4, "g3": 4, "g4": 4 }));
    assert_eq!((&receipt["complete"], &receipt["volumes_unconfirmed"]), (&json!(true), &json!([])));
}
