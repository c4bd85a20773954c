//! A network namespace with one link to it, which goes down and up.

use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

/// Whether this system lets us have one, and if not, why.
pub(crate) fn is_permitted() -> Result<(), String> {
    let tried = "ip link set lo up && unshare -n true && ip link add kvbm8 type veth peer name kvbm9 && nsenter --version";
    match Command::new("unshare").args(["-rn", "sh", "-ec", tried]).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")),
        Err(error) => Err(format!("unshare: {error}")),
    }
}

/// Lives inside a namespace of its own already; holds a second one and the link between the two.
pub(crate) struct Namespace {
    /// A process that does nothing but be there, until its input ends: at the latest with this
    /// process, however that ends.
    anchor: Child,
    up: bool,
}

fn ip(line: &str) {
    done(&Command::new("ip").args(line.split(' ')).output().unwrap(), line);
}

fn done(output: &Output, line: &str) {
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Namespace {
    /// The address at the other end.
    pub(crate) const THERE: &'static str = "10.99.0.2";

    pub(crate) fn new() -> Self {
        let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let ours = network(std::process::id());
        let mut command = Command::new("unshare");
        command.args(["-n", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let anchor = command.spawn().unwrap();
        let deadline = Instant::now() + super::PATIENCE;
        while network(anchor.id()) == ours {
            assert!(Instant::now() < deadline, "no second namespace");
            std::thread::yield_now();
        }
        let namespace = Self { anchor, up: true };
        ip("link set lo up");
        ip(&format!("link add kvbm0 type veth peer name kvbm1 netns {}", namespace.anchor.id()));
        ip("addr add 10.99.0.1/30 dev kvbm0");
        ip("link set kvbm0 up");
        namespace.ip_there(&format!("addr add {}/30 dev kvbm1", Self::THERE));
        namespace.ip_there("link set kvbm1 up");
        namespace
    }

    /// What starts a program at the other end.
    pub(crate) fn enter(&self) -> Vec<String> {
        ["nsenter", "-t", &self.anchor.id().to_string(), "-n", "--"].map(str::to_owned).to_vec()
    }

    fn ip_there(&self, line: &str) {
        let enter = self.enter();
        done(
            &Command::new(&enter[0]).args(&enter[1..]).arg("ip").args(line.split(' ')).output().unwrap(),
            line,
        );
    }

    /// Takes the link down, at the other end, so that nobody here is told, or at ours. Or puts it
    /// up again.
    pub(crate) fn set_up(&mut self, up: bool, silently: bool) {
        let state = if up { "up" } else { "down" };
        if up || silently {
            self.ip_there(&format!("link set kvbm1 {state}"));
        }
        if up || !silently {
            ip(&format!("link set kvbm0 {state}"));
        }
        self.up = up;
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // It may be gone already; the namespaces go with the last process.
        let _ = self.anchor.kill();
        let _ = self.anchor.wait();
    }
}
