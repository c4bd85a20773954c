//! A `kvbm serve`, and who asks it how it is.

use crate::{Options, RANKS, support};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{Error, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a daemon that is asked to stop: it saves what only memory has.
const STOP: Duration = Duration::from_secs(60);
/// Time for an answer over HTTP.
const ANSWER: Duration = Duration::from_secs(30);

pub(crate) struct Served {
    pub(crate) child: Child,
    pub(crate) admin: PathBuf,
    pub(crate) metrics: SocketAddr,
    program: PathBuf,
}

impl Served {
    /// Starts it with these settings beside the model's.
    pub(crate) fn start(options: &Options, settings: &str) -> Self {
        let run = options.dir.join("run");
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&run).unwrap();
        let file = options.dir.join("kvbm.toml");
        std::fs::write(&file, support::config_text(u32::from(RANKS), settings)).unwrap();
        let (admin, metrics) = (run.join("admin.sock"), free_address());
        let mut command = Command::new(&options.program);
        command.arg("serve").arg("--config").arg(file).arg("--socket").arg(options.socket());
        command.arg("--admin").arg(&admin).args(["--metrics", &metrics.to_string()]);
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        Self { child, admin, metrics, program: options.program.clone() }
    }

    /// The answer of `kvbm ctl` over the socket.
    pub(crate) fn ctl(&self, call: &[&str]) -> Result<Value, String> {
        self.ctl_to(&["--socket", &self.admin.display().to_string()], call)
    }

    /// The answer of `kvbm ctl` with these options.
    pub(crate) fn ctl_to(&self, to: &[&str], call: &[&str]) -> Result<Value, String> {
        let mut command = Command::new(&self.program);
        command.arg("ctl").args(to).arg("--json").args(call);
        let output = command.output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(format!("ctl {call:?}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| format!("ctl {call:?}: {error}"))
    }

    /// Whether the metrics are there.
    pub(crate) fn scrape(&self) -> Result<(), String> {
        let text = get(self.metrics, "/metrics", "")?;
        text.contains("kvbm_lookup_blocks_total").then_some(()).ok_or(text)
    }

    /// Asks it to stop: how it ended.
    pub(crate) fn stop(mut self) -> String {
        // One that is gone already has its status.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let until = Instant::now() + STOP;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.to_string();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        format!("it did not stop within {STOP:?}")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // One that has stopped is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address on loopback that nobody listens at.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The answer to a GET, head and body; `header` is one more line, or empty.
pub(crate) fn get(address: SocketAddr, path: &str, header: &str) -> Result<String, String> {
    let ask = || -> Result<String, Error> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: kvbm\r\nconnection: close\r\n{header}\r\n");
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    ask().map_err(|error| format!("GET {path}: {error}"))
}
