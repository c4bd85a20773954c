//! The test: rounds of accidents, and what must hold after each.

use crate::process::TestProcess;
use crate::{BLOCKS, MOVERS_APART, ON_DEVICES, Options, Random, TAKE_OVER};
use rustix::process::{Signal, kill_process};
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// An engine whose daemon runs does something at least so often, on the busiest machine.
const QUIET: Duration = Duration::from_secs(60);
/// A side that is silent for so long is given up by the other.
const GIVEN_UP: Duration = Duration::from_millis(4500);
/// Slots of an engine that is gone are free after this time.
const LEAK: Duration = Duration::from_secs(5);
/// Least share of what was in host memory that the next life finds, in thousandths.
const FOUND: u64 = 990;

struct Test<'a> {
    options: &'a Options,
    random: Random,
    daemon: TestProcess,
    engines: [TestProcess; NAMES.len()],
    sums: Sums,
    /// Thousandths of what was in host memory that an engine's next life found.
    found_again: Vec<u64>,
    leaked: u64,
    /// Blocks of host memory that the next daemon did not have.
    lost: u64,
    /// Requests that computed what they were promised while daemons took over.
    recomputed: u64,
}

/// What processes that are gone have said.
#[derive(Default)]
struct Sums {
    verified: u64,
    wrong: u64,
    not_kept: u64,
    hangs: Vec<String>,
}

/// The engines: one on devices, one in host memory, and one whose movers are other processes.
const NAMES: [&str; 3] = [ON_DEVICES, "in-host-memory", MOVERS_APART];
/// The last of them.
const APART: usize = 2;

pub(crate) fn run(options: &Options) -> ExitCode {
    std::fs::create_dir_all(&options.dir).unwrap();
    let engines =
        [0, 1, 2].map(|at| TestProcess::start("engine", options, NAMES[at], options.seed + at as u64));
    let mut test = Test {
        options,
        random: Random(options.seed),
        daemon: TestProcess::start("daemon", options, "daemon", 0),
        engines,
        sums: Sums::default(),
        found_again: Vec::new(),
        leaked: 0,
        lost: 0,
        recomputed: 0,
    };
    for round in 0..options.rounds {
        test.round(round);
    }
    test.next_life();
    let before = test.not_kept();
    for turn in 0..options.take_overs {
        test.take_over(turn);
    }
    test.recomputed = test.not_kept() - before;
    if options.take_overs > 0 {
        test.next_life();
    }
    test.end()
}

impl Test<'_> {
    fn round(&mut self, round: u64) {
        self.progress(&format!("round {round}"));
        // Some stops last longer than the silence after which the other side gives up.
        let pause = match self.random.below(16) {
            0 => GIVEN_UP,
            _ => Duration::from_millis(self.random.below(60)),
        };
        let at = self.random.below(NAMES.len() as u64) as usize;
        match self.random.below(12) {
            0..=2 => {
                self.engines[at].kill();
                self.start_engine(at);
            }
            3 | 4 => {
                self.engines[at].signal(Signal::STOP);
                std::thread::sleep(pause);
                if self.random.below(2) == 0 {
                    self.engines[at].signal(Signal::CONT);
                } else {
                    self.engines[at].kill();
                    self.start_engine(at);
                }
            }
            5 | 6 => {
                self.daemon.signal(Signal::STOP);
                std::thread::sleep(pause);
                self.daemon.signal(Signal::CONT);
            }
            7 | 8 => {
                self.daemon.kill();
                std::thread::sleep(pause);
                self.add_daemon();
                self.daemon = TestProcess::start("daemon", self.options, "daemon", 0);
            }
            9 => self.next_life(),
            mover => self.hit_mover(mover == 10, pause),
        }
    }

    /// Kills a mover that is a process of its own, or stops it, and the engine stays.
    fn hit_mover(&mut self, kills: bool, pause: Duration) {
        let movers = self.engines[APART].progress.lock().unwrap().movers.clone();
        let Some(mover) = movers.get(self.random.below(movers.len().max(1) as u64) as usize) else { return };
        // One that has ended is gone until its engine starts it again.
        let send = |signal| kill_process(*mover, signal).is_ok();
        if !kills && send(Signal::STOP) {
            std::thread::sleep(pause);
            send(Signal::CONT);
        }
        if kills {
            send(Signal::KILL);
        }
    }

    fn start_engine(&mut self, at: usize) {
        self.add_engine(at);
        self.engines[at] = TestProcess::start("engine", self.options, NAMES[at], self.random.below(u64::MAX));
    }

    /// All engines go: no slot may be lost, and the next life finds what is there.
    fn next_life(&mut self) {
        self.progress("before a next life");
        self.engines.iter_mut().for_each(TestProcess::kill);
        let until = Instant::now() + LEAK;
        let kept = loop {
            std::thread::sleep(Duration::from_millis(250));
            let slots = self.daemon.progress.lock().unwrap().slots;
            match slots {
                Some([kept, 0, 0]) => break kept,
                Some([kept, busy, lost]) if Instant::now() > until => {
                    eprintln!("{busy} slots busy, {lost} lost after {LEAK:?}");
                    self.leaked += busy + lost;
                    break kept;
                }
                _ => assert!(Instant::now() < until + QUIET, "the daemon says nothing"),
            }
        };
        self.start_engine(0);
        let found = self.wait(0, "found", |progress| progress.found).unwrap_or(0);
        // Of several cache groups a killed engine leaves blocks that no prefix has in all groups,
        // until the sequence is computed again: each engine saves one sequence at a time.
        let incomplete = match self.options.model.full() {
            0 => 0,
            _ => NAMES.len() * self.options.model.needed(BLOCKS).iter().map(Range::len).sum::<usize>(),
        };
        let whole = kept.min(found + incomplete as u64);
        self.found_again.extend((whole * 1000).checked_div(kept));
        (1..NAMES.len()).for_each(|at| self.start_engine(at));
    }

    /// A daemon takes over from the one that is there, while all engines are at work.
    fn take_over(&mut self, turn: u64) {
        self.progress(&format!("before take-over {turn}"));
        let slots = |daemon: &TestProcess| daemon.progress.lock().unwrap().slots;
        let until = Instant::now() + QUIET;
        // The engines compute no more than fits: nothing is evicted.
        let before = loop {
            if let Some([kept, ..]) = slots(&self.daemon) {
                break kept;
            }
            assert!(Instant::now() < until, "the daemon says nothing");
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut next = TestProcess::start("daemon", self.options, TAKE_OVER, 0);
        let after = loop {
            if let Some([kept, ..]) = slots(&next) {
                break Some(kept);
            }
            if let Some(status) = next.ended() {
                self.sums.hangs.push(format!("take-over {turn}: the new daemon ended: {status}"));
                break None;
            }
            if Instant::now() > until {
                self.sums.hangs.push(format!("take-over {turn}: nothing for {QUIET:?}"));
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let Some(after) = after else { return };
        match self.daemon.ended() {
            Some(status) if status == "exit status: 0" => {}
            other => self.sums.hangs.push(format!("take-over {turn}: the old daemon: {other:?}")),
        }
        if after < before {
            eprintln!("take-over {turn}: {after} blocks of {before}");
            self.lost += before - after;
        }
        self.add_daemon();
        self.daemon = next;
    }

    /// All engines do something.
    fn progress(&mut self, when: &str) {
        for at in 0..NAMES.len() {
            let before = self.engines[at].progress.lock().unwrap().verified;
            self.wait(at, when, |progress| {
                (progress.verified > before || !progress.hangs.is_empty()).then_some(0)
            });
        }
    }

    fn wait(
        &mut self,
        at: usize,
        what: &str,
        is_there: impl Fn(&crate::process::Progress) -> Option<u64>,
    ) -> Option<u64> {
        let until = Instant::now() + QUIET;
        loop {
            if let Some(number) = is_there(&self.engines[at].progress.lock().unwrap()) {
                return Some(number);
            }
            if let Some(status) = self.engines[at].ended() {
                self.sums.hangs.push(format!("engine {} ended by itself: {status}", NAMES[at]));
                self.start_engine(at);
                return None;
            }
            if Instant::now() > until {
                self.sums.hangs.push(format!("engine {}: {what}: nothing for {QUIET:?}", NAMES[at]));
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Requests so far that did not get all that they were promised.
    fn not_kept(&self) -> u64 {
        let now = |engine: &TestProcess| engine.progress.lock().unwrap().not_kept;
        self.sums.not_kept + self.engines.iter().map(now).sum::<u64>()
    }

    fn add_engine(&mut self, at: usize) {
        let progress = self.engines[at].progress.lock().unwrap();
        self.sums.verified += progress.verified;
        self.sums.wrong += progress.wrong;
        self.sums.not_kept += progress.not_kept;
        self.sums.hangs.extend(progress.hangs.iter().cloned());
    }

    fn add_daemon(&mut self) {
        let progress = self.daemon.progress.lock().unwrap();
        self.sums.hangs.extend(progress.hangs.iter().cloned());
    }

    fn end(mut self) -> ExitCode {
        self.engines.iter_mut().for_each(TestProcess::kill);
        (0..NAMES.len()).for_each(|at| self.add_engine(at));
        self.add_daemon();
        let Sums { verified, wrong, hangs, .. } = &self.sums;
        let found = self.found_again.iter().copied().min().unwrap_or(0);
        for hang in hangs {
            eprintln!("{hang}");
        }
        println!(
            "{{\"rounds\":{},\"verified\":{verified},\"wrong_bytes\":{wrong},\"hangs\":{},\"leaked_slots\":{},\
             \"found_again\":{}.{:03},\"take_overs\":{},\"lost_blocks\":{},\
             \"recomputed\":{}}}",
            self.options.rounds,
            hangs.len(),
            self.leaked,
            found / 1000,
            found % 1000,
            self.options.take_overs,
            self.lost,
            self.recomputed
        );
        let nothing_lost = self.leaked == 0 && self.lost == 0 && found >= FOUND;
        // Each engine has one request at a time.
        let kept_promises = self.recomputed <= NAMES.len() as u64 * self.options.take_overs;
        let is_well = *wrong == 0 && hangs.is_empty() && nothing_lost && kept_promises && *verified > 0;
        if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
