//! A process of the deployment, as who starts it sees it.

use super::{MEMBER, SLACK};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Long enough for any machine to start a process.
const PATIENCE: Duration = Duration::from_secs(90);

pub(super) struct Process {
    id: u32,
    child: Child,
    output: Receiver<String>,
}

impl Process {
    /// A node that finds others on the server at `address`.
    pub(super) fn start(id: u32, address: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "kills::a_member_of_a_deployment", "--nocapture"]);
        // That a peer is gone is no news here.
        command.env("NIXL_LOG_LEVEL", "FATAL");
        command.env(MEMBER, format!("{id} {address}")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (said, output) = mpsc::channel();
        // Ends with the process, or when nobody listens any more.
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| said.send(line)));
        let process = Self { id, child, output };
        process.hear("ready");
        process
    }

    pub(super) fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// What the next line that begins with `first` says behind it, within `patience`.
    pub(super) fn hear_within(&self, first: &str, patience: Duration) -> String {
        let until = Instant::now() + patience;
        loop {
            let heard = self.output.recv_timeout(until.saturating_duration_since(Instant::now()));
            let line = heard.unwrap_or_else(|error| panic!("node {} never said {first}: {error}", self.id));
            if let Some(rest) = line.strip_prefix(first) {
                return rest.trim().to_owned();
            }
        }
    }

    pub(super) fn hear(&self, first: &str) -> String {
        self.hear_within(first, PATIENCE)
    }

    /// Gives an order and waits until it is done.
    pub(super) fn order(&mut self, line: &str) {
        self.say(line);
        self.hear(&format!("done {}", line.split(' ').next().unwrap()));
    }

    pub(super) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends in order: no crash at exit, and no hang.
    pub(super) fn end(&mut self) {
        drop(self.child.stdin.take());
        let until = Instant::now() + SLACK + Duration::from_secs(10);
        loop {
            if let Some(ended) = self.child.try_wait().unwrap() {
                return assert!(ended.success(), "node {} ended with {ended}", self.id);
            }
            assert!(Instant::now() < until, "node {} does not end", self.id);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
