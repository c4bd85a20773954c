//! The process that writes, seen from outside: what it says, and when it is killed.

use crate::support::{PATIENCE, Random};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// What a writer says once its directory is open.
pub(crate) const READY: &str = "ready";
/// What it says when a flush has succeeded.
pub(crate) const FLUSHED: &str = "flushed";

/// The longest time from the moment that an end waits for to the end itself, in microseconds.
const LATEST: u64 = 120_000;
/// The same from the start of the process on: many of these ends meet an opening.
const LATEST_IN_AN_OPENING: u64 = 8_000;
const SIGKILL: i32 = 9;

pub(crate) struct Process {
    child: Child,
    /// Of a thread that reads, so that a writer that says much goes on.
    lines: Receiver<String>,
    output: String,
}

/// A life that is over.
pub(crate) struct Ended {
    /// All that the writer said. The last line may be cut.
    pub(crate) output: String,
    /// It was killed; it had not ended before.
    pub(crate) by_the_kill: bool,
}

impl Process {
    pub(crate) fn start(dir: &Path, seed: u64, engine: &str, errors: Stdio) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("write")
            .arg(dir)
            .args([&seed.to_string(), engine])
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            while out.read_line(&mut line).unwrap() > 0 && tell.send(std::mem::take(&mut line)).is_ok() {}
        });
        Self { child, lines, output: String::new() }
    }

    /// Waits until it has said `what`; a panic where it ends before, or never says it.
    fn wait_for(&mut self, what: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line
                .unwrap_or_else(|error| panic!("the writer did not say `{what}`: {error}; {}", self.output));
            self.output += &line;
            if line.trim_end() == what {
                return;
            }
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(mut self) -> Ended {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        self.output.extend(self.lines.iter());
        Ended { output: self.output, by_the_kill: status.signal() == Some(SIGKILL) }
    }
}

/// What the end of a life comes after, by a random time.
#[derive(Clone, Copy)]
pub(crate) enum After {
    /// The start of the process.
    Start,
    /// Its opening.
    Ready,
    /// Its first flush, so that something was acknowledged however slow the machine is.
    Flush,
}

impl After {
    /// Half of the lives flush, and three quarters write.
    pub(crate) fn of_round(round: u64) -> Self {
        match round % 4 {
            0 | 2 => Self::Flush,
            1 => Self::Ready,
            _ => Self::Start,
        }
    }

    pub(crate) fn wait(self, process: &mut Process, random: &mut Random) {
        let latest = match self {
            Self::Start => LATEST_IN_AN_OPENING,
            Self::Ready | Self::Flush => LATEST,
        };
        match self {
            Self::Start => {}
            Self::Ready => process.wait_for(READY),
            Self::Flush => process.wait_for(FLUSHED),
        }
        std::thread::sleep(Duration::from_micros(random.below(latest)));
    }
}
