//! A real nats-server for tests: `KVBM_NATS_SERVER` names its program. Tests of other crates use it
//! by its path.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use super::ports::Port;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Long enough for any machine to start a server.
const PATIENCE: Duration = Duration::from_secs(60);

/// All that streams in files, and all that streams in memory, may reserve of a server: less than a
/// single one of the default size, so that a test which needs more fails on every machine and not
/// only on one with a full disk.
const STORAGE: u64 = 256 << 20;

/// Its configuration, in its folder.
const CONFIG: &str = "server.conf";

/// Most bytes of a stream of a test.
pub(crate) const STREAM_BYTES: u64 = 16 << 20;

/// A server of our own, with its files in a folder of its own.
pub(crate) struct NatsServer {
    /// The program, behind whatever starts it.
    line: Vec<OsString>,
    host: &'static str,
    /// Kept while the server is down, for its restart.
    port: Port,
    folder: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl NatsServer {
    /// On this machine's own address. `None` where there is no server to run.
    pub(crate) fn start(arguments: &[&str]) -> Option<Self> {
        Self::launch("127.0.0.1", &[], arguments, "")
    }

    /// The same with more lines of its configuration.
    pub(crate) fn configured(lines: &str) -> Option<Self> {
        Self::launch("127.0.0.1", &[], &[], lines)
    }

    /// At the address `host`, where `behind` starts programs there. `None` where there is no server
    /// to run.
    pub(crate) fn start_at(host: &'static str, behind: &[String]) -> Option<Self> {
        Self::launch(host, behind, &[], "")
    }

    fn launch(host: &'static str, behind: &[String], arguments: &[&str], lines: &str) -> Option<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let Some(program) = std::env::var_os("KVBM_NATS_SERVER") else {
            println!("skipped: KVBM_NATS_SERVER names no nats-server");
            return None;
        };
        let line = behind.iter().map(OsString::from).chain([program]).collect();
        let port = Port::claim();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("kvbm-nats-{}-{number}", process::id()));
        let arguments = arguments.iter().map(|text| (*text).to_owned()).collect();
        std::fs::create_dir_all(&folder).unwrap();
        let mut server = Self { line, host, port, folder, arguments, child: None };
        server.configure(lines);
        server.restart();
        Some(server)
    }

    /// Has these lines in its configuration from its next start on.
    pub(crate) fn configure(&self, lines: &str) {
        let kept = self.folder.join("kept").display().to_string();
        let storage = format!("max_file_store: {STORAGE}, max_memory_store: {STORAGE}");
        let config = format!("jetstream: {{ store_dir: {kept:?}, {storage} }}\n{lines}\n");
        std::fs::write(self.folder.join(CONFIG), config).unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        let mut command = Command::new(&self.line[0]);
        command.args(&self.line[1..]);
        command.args(["-a", self.host, "-p", &self.port().to_string(), "-c"]).arg(self.folder.join(CONFIG));
        command.args(&self.arguments).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((self.host, self.port())).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// As a power cut does it to the process: without a goodbye.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port.number()
    }

    /// `HOST:PORT`.
    pub(crate) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port())
    }

    /// Deletes a stream as an operator does.
    pub(crate) fn delete_stream(&self, name: &str) {
        assert!(self.request(&format!("STREAM.DELETE.{name}"), "").contains("\"success\":true"));
    }

    /// Creates a stream as an operator does.
    pub(crate) fn create_stream(&self, name: &str, subjects: &[&str], max_msg_size: i64) {
        let subjects = subjects.iter().map(|subject| format!("{subject:?}")).collect::<Vec<_>>().join(",");
        let config = format!(
            "{{\"name\":{name:?},\"subjects\":[{subjects}],\"max_msg_size\":{max_msg_size},\"max_bytes\":{STREAM_BYTES}}}"
        );
        let said = self.request(&format!("STREAM.CREATE.{name}"), &config);
        assert!(!said.contains("\"error\""), "{said}");
    }

    /// What `JetStream` says to a request.
    fn request(&self, subject: &str, body: &str) -> String {
        let mut client = TcpStream::connect(self.address()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let bytes = body.len();
        write!(client, "CONNECT {{}}\r\nSUB answer 1\r\nPUB $JS.API.{subject} answer {bytes}\r\n{body}\r\n")
            .unwrap();
        let mut lines = BufReader::new(client).lines().map(Result::unwrap);
        lines.find(|line| line.contains("\"type\":\"io.nats")).unwrap()
    }

    /// Stops the process for a while, as an overloaded machine does.
    pub(crate) fn stall(&self, pause: Duration) {
        let Some(child) = &self.child else { return };
        for signal in ["-STOP", "-CONT"] {
            let status = Command::new("kill").arg(signal).arg(child.id().to_string()).status();
            assert!(status.unwrap().success());
            std::thread::sleep(pause);
        }
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
