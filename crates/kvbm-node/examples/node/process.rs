//! A process of the test: its lines are read as they come.

use crate::Options;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a process has printed so far.
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) verified: u64,
    pub(crate) wrong: u64,
    /// Requests that did not get all that they were promised, and computed it.
    pub(crate) not_kept: u64,
    pub(crate) hangs: Vec<String>,
    /// Blocks that an engine found as it began.
    pub(crate) found: Option<u64>,
    /// The last line of a daemon: blocks kept, blocks that are busy, slots that are lost.
    pub(crate) slots: Option<[u64; 3]>,
    /// Movers that are processes of their own.
    pub(crate) movers: Vec<Pid>,
    pub(crate) last: Instant,
}

pub(crate) struct TestProcess {
    child: Child,
    pub(crate) progress: Arc<Mutex<Progress>>,
}

impl TestProcess {
    pub(crate) fn start(role: &str, options: &Options, name: &str, seed: u64) -> Self {
        let mut command = options.process(role, name, seed);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let progress = Progress {
            verified: 0,
            wrong: 0,
            not_kept: 0,
            hangs: Vec::new(),
            found: None,
            slots: None,
            movers: Vec::new(),
            last: Instant::now(),
        };
        let progress = Arc::new(Mutex::new(progress));
        let (lines, own) = (BufReader::new(child.stdout.take().unwrap()).lines(), Arc::clone(&progress));
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                own.lock().unwrap().take(&line);
            }
        });
        Self { child, progress }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Kills it, and returns when it is gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its exit status, where it has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<String> {
        self.child.try_wait().unwrap().map(|status| status.to_string())
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        // One that was killed is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Progress {
    fn take(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(u64::MAX);
        self.last = Instant::now();
        match words[0] {
            "done" => {
                self.verified += number(1);
                self.wrong += number(2);
                self.not_kept += number(3);
            }
            "found" => self.found = Some(number(1)),
            "movers" => {
                let pids = words[1..].iter().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
                self.movers = pids.collect();
            }
            "slots" => self.slots = Some([number(1), number(2), number(3)]),
            _ => self.hangs.push(line.to_owned()),
        }
    }
}
