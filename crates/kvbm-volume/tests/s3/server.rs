//! Real servers.

use crate::ports::free_port;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Which program a server is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// s3s-fs: objects are files, requests need no signature.
    Files,
    /// moto: objects are in its memory, requests are signed.
    Memory,
}

/// A server, killed when it is dropped.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    child: Child,
    addr: SocketAddr,
    root: tempfile::TempDir,
}

impl Server {
    /// Of every program there is: `cargo xtask test --only test --only s3` fetches them.
    pub(crate) fn each() -> Vec<Self> {
        let programs = [(Kind::Files, "TEST_S3_SERVER"), (Kind::Memory, "TEST_MOTO_SERVER")];
        let server = |(kind, variable)| {
            let program = std::env::var_os(variable);
            if program.is_none() {
                eprintln!("skipped: {variable} names no server");
            }
            Some(Self::start(kind, &program?))
        };
        programs.into_iter().filter_map(server).collect()
    }

    /// The one whose objects are files.
    pub(crate) fn of_files() -> Option<Self> {
        Self::each().into_iter().find(|server| server.kind == Kind::Files)
    }

    fn start(kind: Kind, program: &OsStr) -> Self {
        let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let root = tempfile::tempdir().expect("the test's own set-up");
        std::fs::create_dir(root.path().join("bucket")).expect("the test's own set-up");
        let child = Self::spawn(kind, program, addr, root.path());
        let server = Self { kind, child, addr, root };
        server.wait();
        server
    }

    fn spawn(kind: Kind, program: &OsStr, addr: SocketAddr, root: &Path) -> Child {
        let mut command = Command::new(program);
        command.args(["--host", "127.0.0.1", "--port", &addr.port().to_string()]);
        if kind == Kind::Files {
            command.arg(root);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the test's own set-up")
    }

    fn wait(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(self.addr).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.kind == Kind::Memory {
            assert_eq!(self.request("PUT", "bucket", &[]).0, 200, "a bucket");
        }
    }

    /// What it is called in messages.
    pub(crate) fn name(&self) -> &'static str {
        if self.kind == Kind::Files { "s3s-fs" } else { "moto" }
    }

    /// Where the objects of a prefix lie, where they are files.
    pub(crate) fn folder(&self, prefix: &str) -> PathBuf {
        self.root.path().join("bucket").join(prefix)
    }

    /// Sends its process a signal.
    pub(crate) fn signal(&self, name: &str) {
        let mut kill = Command::new("kill");
        let sent = kill.args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(sent.expect("kill").success(), "SIG{name}");
    }

    /// Starts again where it was.
    pub(crate) fn start_again(&mut self) {
        let variable = if self.kind == Kind::Files { "TEST_S3_SERVER" } else { "TEST_MOTO_SERVER" };
        let program = std::env::var_os(variable).expect("it was started before");
        self.child = Self::spawn(self.kind, &program, self.addr, self.root.path());
        self.wait();
    }

    pub(crate) fn uri(&self, prefix: &str) -> String {
        let anonymous = self.kind == Kind::Files;
        let options = format!("endpoint=http://{}&anonymous={anonymous}&part_bytes=5242880", self.addr);
        format!("s3://bucket/{prefix}?{options}")
    }

    pub(crate) fn stop(&mut self) {
        // Gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Status and body of a request that the client under test has no part in. The signature is for
    /// show: moto does not look.
    pub(crate) fn request(&self, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.addr).expect("a server");
        let scope = "Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
        write!(
            stream,
            "{method} /{path} HTTP/1.0\r\nHost: {}\r\nAuthorization: AWS4-HMAC-SHA256 {scope}\r\nContent-Length: {}\r\n\r\n",
            self.addr,
            body.len(),
        )
        .expect("a server");
        stream.write_all(body).expect("a server");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("a server");
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("an answer");
        let status = String::from_utf8_lossy(&answer[9..12]).parse().expect("a status");
        (status, answer.split_off(end + 4))
    }

    /// Changes an object behind the volume's back.
    pub(crate) fn tamper(&self, name: &str, change: &mut dyn FnMut(&mut Vec<u8>)) {
        let path = format!("bucket/{name}");
        match self.kind {
            Kind::Files => {
                let file = self.root.path().join(path);
                let mut object = std::fs::read(&file).expect("an object");
                change(&mut object);
                std::fs::write(&file, object).expect("a writable object");
            }
            Kind::Memory => {
                let (status, mut object) = self.request("GET", &path, &[]);
                assert_eq!(status, 200, "an object");
                change(&mut object);
                assert_eq!(self.request("PUT", &path, &object).0, 200, "a writable object");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
