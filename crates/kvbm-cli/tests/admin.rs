//! `kvbm ctl` and `kvbm top` with a real daemon, as an operator uses them.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use kvbm_node::{EngineTerms, LineTimes, NodeEngine};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const KVBM: &str = env!("CARGO_BIN_EXE_kvbm");
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// `kvbm serve` with an admin socket, and HTTP. It ends with this.
struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
    port: u16,
    log: std::thread::JoinHandle<String>,
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Daemon {
    fn start() -> Self {
        Self::start_with("", "")
    }

    /// With further settings of `[admin]`, and further sections.
    fn start_with(of_admin: &str, sections: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (at, port) = (folder.path().display(), free_port());
        let text = format!(
            "[model]\nnum_layers = 2\nnum_kv_heads = 2\nhead_dim = 32\n[namespace]\nmodel = \"test\"\n\
             [host]\ncapacity = 32\n[disk]\ndir = \"{at}/disk\"\ncapacity = 64\n\
             [tenants]\nshares = \"acme=0.5\"\n[node]\nsocket = \"{at}/run/node.sock\"\nengine_blocks = 64\n\
             [admin]\nsocket = \"{at}/run/admin.sock\"\nhttp = \"127.0.0.1:{port}\"\ntoken_file = \"{at}/token\"\n\
             {of_admin}\n{sections}\n"
        );
        std::fs::write(folder.path().join("kvbm.toml"), text).unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, TOKEN).unwrap();
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
        let mut command = Command::new(KVBM);
        command.arg("serve").arg("--config").arg(folder.path().join("kvbm.toml"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let log = std::thread::spawn(move || {
            let mut text = String::new();
            // The daemon's end ends it.
            let _ = stderr.read_to_string(&mut text);
            text
        });
        let mut first_line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
        assert!(first_line.starts_with("kvbm serve: test"), "{first_line}");
        Self { child, folder, port, log }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("run/admin.sock")
    }

    /// `kvbm WORDS --socket ..`
    fn kvbm(&self, words: &[&str]) -> Output {
        Command::new(KVBM).args(words).arg("--socket").arg(self.socket()).output().unwrap()
    }

    fn ctl(&self, words: &[&str]) -> String {
        let output = self.kvbm(&[&["ctl"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[words, &["--json"]].concat())).unwrap()
    }

    /// Ends the daemon: what it logged.
    fn end(mut self) -> String {
        // SAFETY: a signal to a child that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) }, 0);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        self.log.join().unwrap()
    }
}

/// Ends a daemon whatever happens to the test.
struct Ended(Option<Daemon>);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.0 {
            // One that was terminated is gone.
            let _ = daemon.child.kill();
            let _ = daemon.child.wait();
        }
    }
}

impl std::ops::Deref for Ended {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        self.0.as_ref().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn failed(output: &Output, status: i32, why: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(error.contains(why), "{error}\nwant: {why}");
}

#[test]
fn an_operator_sees_and_steers_a_running_daemon() {
    let mut daemon = Ended(Some(Daemon::start()));
    let status = daemon.ctl(&["status"]);
    for part in ["kvbm ", ", test, process ", "g2", "g3", "log level info", "acme"] {
        assert!(status.contains(part), "{part} is missing from {status}");
    }
    assert_eq!(daemon.json(&["status"])["pid"], daemon.child.id());
    let top = text(&daemon.kvbm(&["top", "--once"]).stdout);
    assert!(top.contains("look-ups: 0 blocks/s") && top.contains("[    ") && !top.contains('\x1b'), "{top}");

    let times = LineTimes { silent_after: PATIENCE, ..LineTimes::default() };
    let socket = daemon.folder.path().join("run/node.sock");
    let terms = || EngineTerms { times, call_time: PATIENCE, ..EngineTerms::new(&socket, "vllm-0", 16) };
    let engine = NodeEngine::attach(terms(), true, Vec::new()).unwrap();
    let until = Instant::now() + PATIENCE;
    while daemon.json(&["status"])["engines"][0]["name"] != "vllm-0" {
        assert!(Instant::now() < until, "the engine is not attached");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(daemon.ctl(&["status"]).contains("vllm-0"));
    drop(engine);

    assert_eq!(
        daemon.ctl(&["look-up", "--tokens", &vec!["7"; 40].join(",")]),
        "0 of 2 blocks are there (a block may be on several tiers): g1 0, g2 0, g3 0, g4 0\n"
    );
    let file = daemon.folder.path().join("tokens");
    std::fs::write(&file, format!("[{}]\n", vec!["7"; 32].join(", "))).unwrap();
    assert_eq!(
        daemon.json(&["look-up", "--tokens-file", file.to_str().unwrap(), "--tenant", "acme"])["asked"],
        2
    );
    let hash = "00112233445566778899aabbccddeeff";
    assert_eq!(daemon.json(&["look-up", "--hashes", hash])["found"], 0);
    assert_eq!(
        daemon.json(&["pin", "--engine-hashes", "6162", "--seconds", "5", "--tiers", "g2,g3"])["pinned"],
        0
    );
    assert_eq!(daemon.ctl(&["unpin", "--hashes", hash]), "0 pins ended\n");
    assert!(daemon.ctl(&["ttl", "1000"]).contains("1,000 iterations"));
    assert!(daemon.ctl(&["ttl", "off", "--tenant", "acme"]).contains("until their slots"));
    assert!(daemon.ctl(&["quotas", "acme", "0.25"]).contains("25.0 %"));
    assert_eq!(daemon.json(&["quotas"])["tenants"][1]["share"], 0.25);
    assert_eq!(daemon.ctl(&["volumes"]), "there are no volumes\n");
    assert_eq!(daemon.ctl(&["clear", "g2"]), "0 blocks removed from g2\n");
    assert_eq!(daemon.ctl(&["flush", "--timeout", "30"]), "0 blocks are durable\n");
    assert!(daemon.ctl(&["forget", "--tenant", "acme"]).starts_with("0 blocks forgotten"));
    assert_eq!(daemon.ctl(&["log"]), "the log shows info and above\n");
    assert_eq!(daemon.ctl(&["log", "error"]), "the log shows error and above\n");
    assert_eq!(daemon.ctl(&["ttl", "77"]), "blocks leave after 77 iterations without use\n");
    assert_eq!(daemon.ctl(&["log", "debug"]), "the log shows debug and above\n");

    let drained = daemon.ctl(&["drain", "--timeout", "30"]);
    assert!(drained.starts_with("new work is refused\n"), "{drained}");
    assert_eq!(daemon.json(&["status"])["shut_down"], true);
    let late = NodeEngine::attach(terms(), true, Vec::new()).unwrap();
    let until = Instant::now() + PATIENCE;
    while !format!("{:?}", late.status()).contains("it is drained") {
        assert!(Instant::now() < until, "nobody attaches any more: {:?}", late.status());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(daemon.json(&["status"])["engines"], serde_json::json!([]));
    drop(late);
    let log = daemon.0.take().unwrap().end();
    let calls = |path: &str| log.lines().filter(|line| line.contains(path)).count();
    assert_eq!((calls("/v1/drain"), calls("/v1/clear")), (1, 1), "{log}");
    assert_eq!(calls("/v1/ttl"), 2, "the log showed errors alone for one: {log}");
}

#[test]
fn what_goes_wrong_names_the_way_out() {
    let daemon = Ended(Some(Daemon::start()));
    failed(&daemon.kvbm(&["ctl", "clear", "g9"]), 1, "tier = 'g9': give g1, g2, g3 or g4");
    failed(&daemon.kvbm(&["ctl", "forget"]), 1, "name what to forget");
    failed(&daemon.kvbm(&["ctl", "look-up"]), 2, "--tokens-file");
    failed(&daemon.kvbm(&["ctl", "look-up", "--tokens", "1", "--hashes", "a"]), 2, "one of --tokens");
    failed(&daemon.kvbm(&["ctl", "pin", "--tokens", "1"]), 2, "--seconds");
    failed(&daemon.kvbm(&["ctl", "ttl", "soon"]), 2, "or off");
    failed(&daemon.kvbm(&["ctl", "flush", "--timeout", "-5"]), 2, "--timeout");
    failed(&daemon.kvbm(&["ctl", "status", "--http", "http://127.0.0.1:1"]), 2, "one of them");
    let kvbm =
        |words: &[&str]| Command::new(KVBM).args(words).env_remove("KVBM_ADMIN_SOCKET").output().unwrap();
    failed(&kvbm(&["ctl", "status"]), 2, "KVBM_ADMIN_SOCKET");
    failed(&kvbm(&["top", "--once", "--socket", "/no/such.sock"]), 1, "is the manager running");
    let named =
        Command::new(KVBM).args(["ctl", "log"]).env("KVBM_ADMIN_SOCKET", daemon.socket()).output().unwrap();
    assert_eq!(text(&named.stdout), "the log shows info and above\n");

    // Over HTTP.
    let url = format!("http://127.0.0.1:{}", daemon.port);
    let token = daemon.folder.path().join("token");
    let over = |file: &Path| {
        kvbm(&["ctl", "status", "--json", "--http", &url, "--token-file", file.to_str().unwrap()])
    };
    let status: Value = serde_json::from_slice(&over(&token).stdout).unwrap();
    assert_eq!(status["pid"], daemon.child.id());
    let wrong = daemon.folder.path().join("wrong");
    std::fs::write(&wrong, "0123456789abcdef0123456789abcdeX").unwrap();
    failed(&over(&wrong), 1, "status 401");
    failed(&kvbm(&["ctl", "status", "--http", &url]), 2, "--token-file");
    let token = token.to_str().unwrap();
    failed(&kvbm(&["ctl", "status", "--http", "https://a:1", "--token-file", token]), 2, "--ca FILE");
    let with_ca = ["ctl", "status", "--http", &url, "--token-file", token, "--ca", token];
    failed(&kvbm(&with_ca), 2, "--http https://");
}

/// Encryption, a certificate of the client and the token, with the program at both ends.
#[cfg(feature = "tls")]
#[test]
fn a_manager_is_administered_over_tls_with_a_certificate_of_the_client() {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let certificates = tempfile::tempdir().unwrap();
    let file = |name: &str| certificates.path().join(name).display().to_string();
    let write = |name: &str, text: &str| {
        std::fs::write(file(name), text).unwrap();
        std::fs::set_permissions(file(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    let mut params = CertificateParams::new([]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    write("ca", &params.self_signed(&key).unwrap().pem());
    let authority = Issuer::new(params, key);
    for name in ["server", "client"] {
        let (params, key) =
            (CertificateParams::new(["127.0.0.1".into()]).unwrap(), KeyPair::generate().unwrap());
        write(name, &params.signed_by(&key, &authority).unwrap().pem());
        write(&format!("{name}.key"), &key.serialize_pem());
    }
    let [ca, cert, key] = ["ca", "server", "server.key"].map(file);
    let tls = format!("tls_cert = \"{cert}\"\ntls_key = \"{key}\"\nclient_ca = \"{ca}\"\n");
    let metrics_port = free_port();
    let metrics = format!("[metrics]\nhttp = \"127.0.0.1:{metrics_port}\"\n{tls}");
    let daemon = Ended(Some(Daemon::start_with(&tls, &metrics)));
    let token = daemon.folder.path().join("token").display().to_string();
    let url = |scheme: &str| format!("{scheme}://127.0.0.1:{}", daemon.port);
    let kvbm = |words: &[&str]| {
        let call = ["ctl", "status", "--json", "--token-file", &token, "--http"];
        Command::new(KVBM).args(call).args(words).output().unwrap()
    };
    let [client, client_key] = ["client", "client.key"].map(file);
    let known = ["--ca", &ca, "--cert", &client, "--key", &client_key];
    let output = kvbm(&[&[url("https").as_str()][..], &known].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["pid"], daemon.child.id());
    failed(&kvbm(&[&url("https"), "--ca", &ca]), 1, "ertificate");
    failed(&kvbm(&[&url("https"), "--ca", &client]), 1, "is --ca its authority");
    failed(&kvbm(&[&url("http")]), 1, "use https://");
    failed(&kvbm(&[&url("https"), "--ca", &token]), 1, "--ca = ");
    let mut plain = TcpStream::connect(("127.0.0.1", metrics_port)).unwrap();
    plain.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    plain.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("use https://") && !answer.contains("kvbm_"), "{answer}");
}

/// The kernel says whose process calls, whatever the modes of socket and folder have become.
#[test]
fn a_process_of_another_user_is_refused() {
    let daemon = Ended(Some(Daemon::start()));
    // SAFETY: it has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        assert!(daemon.ctl(&["status"]).contains("test"), "only root can be two users: the rest is not run");
        return;
    }
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let program = daemon.folder.path().join("kvbm");
    // By another process: a child of another test that starts meanwhile would inherit the file open
    // for writing, and a file that is open for writing cannot be executed.
    assert!(Command::new("cp").arg(KVBM).arg(&program).status().unwrap().success());
    open(&program, 0o755);
    open(daemon.folder.path(), 0o755);
    let call = || {
        let mut command = Command::new(&program);
        command.args(["ctl", "status", "--socket"]).arg(daemon.socket()).uid(65_534).gid(65_534);
        command.current_dir("/").output().unwrap()
    };
    failed(&call(), 1, "call as the user that the manager runs as");
    open(daemon.socket().parent().unwrap(), 0o755);
    open(&daemon.socket(), 0o666);
    failed(&call(), 1, "belongs to user 65534, this one to user 0: refused");
    assert!(daemon.ctl(&["status"]).contains("test"));
}

#[test]
fn two_hundred_silent_clients_do_not_keep_an_operator_out_for_long() {
    let daemon = Ended(Some(Daemon::start()));
    let over_tcp: Vec<_> =
        (0..200).map(|_| TcpStream::connect(("127.0.0.1", daemon.port)).unwrap()).collect();
    // The socket has places of its own.
    assert!(daemon.ctl(&["status"]).contains("test"));
    let mut silent: Vec<_> = (0..200).map(|_| UnixStream::connect(daemon.socket()).unwrap()).collect();
    for stream in &mut silent {
        // Some begin a request and never end it; those that were refused are gone.
        let _ = stream.write_all(b"GET /v1/sta");
    }
    let until = Instant::now() + PATIENCE;
    while !daemon.kvbm(&["ctl", "status"]).status.success() {
        assert!(Instant::now() < until, "silent clients hold all places");
        std::thread::sleep(Duration::from_millis(100));
    }
    drop((over_tcp, silent));
}

#[test]
fn a_dashboard_and_alerts_are_printed() {
    let run = |word: &str| text(&Command::new(KVBM).arg(word).output().unwrap().stdout);
    let dashboard: Value = serde_json::from_str(&run("dashboard")).unwrap();
    assert_eq!(dashboard["title"], "kvbm");
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);
    let alerts = run("alerts");
    assert!(alerts.contains("- alert: KvbmRankLost") && alerts.contains("kvbm_rank_lost"), "{alerts}");
}
