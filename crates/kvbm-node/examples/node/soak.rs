//! Engines at work for hours, with accidents: what the processes use must not grow.
//!
//! A `kvbm serve` with host memory, disk, volume, administration and metrics lives from the
//! beginning to the end, and so does the first of two engines. Both are stopped for a while now and
//! then. The second engine is killed and started again. Host memory and disk hold less than the
//! engines compute, so blocks are evicted and loaded all the time.
//!
//! The last line is JSON: `seconds, accidents, verified, wrong_bytes, hangs, leaked_slots,
//! exit_status` and `series`, one list of samples for each thing that must stay flat.

use crate::process::TestProcess;
use crate::sampling::{Series, bytes_below};
use crate::served::Served;
use crate::{Options, Random};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Samples of a run.
const SAMPLES: u64 = 360;
/// A stop after which the other side gives up, and the longest of the short ones.
const GIVEN_UP: Duration = Duration::from_millis(4500);
const SHORT: Duration = Duration::from_millis(60);
/// Longest time between two accidents, in milliseconds, and the time before the first one.
const QUIET: u64 = 5000;
const START: Duration = Duration::from_secs(5);
/// An engine that does nothing for so long hangs, on the busiest machine.
const HANG: Duration = Duration::from_secs(60);
/// Slots of engines that are gone are free after this time.
const LEAK: Duration = Duration::from_secs(5);

struct Soak<'a> {
    options: &'a Options,
    random: Random,
    daemon: Served,
    engines: [TestProcess; 2],
    series: Series,
    verified: u64,
    wrong: u64,
    hangs: Vec<String>,
    accidents: u64,
}

pub(crate) fn run(options: &Options) -> ExitCode {
    std::fs::create_dir_all(options.dir.join("volume")).unwrap();
    // The budget of writes would let eight blocks an hour onto this small disk, and their number
    // would grow for a day.
    let settings = format!(
        "[host]\ncapacity = \"128 blocks\"\n[disk]\ndir = \"{0}/disk\"\ncapacity = \"192 blocks\"\ndrive_writes_per_day = 0\n\
         [volume]\nuri = \"dir://{0}/volume\"\n",
        options.dir.display()
    );
    let start = |name| TestProcess::start("engine", options, name, options.seed);
    let mut soak = Soak {
        options,
        random: Random(options.seed),
        daemon: Served::start(options, &settings),
        engines: [start("first"), start("second")],
        series: Series::default(),
        verified: 0,
        wrong: 0,
        hangs: Vec::new(),
        accidents: 0,
    };
    let begun = Instant::now();
    let every = Duration::from_secs(options.seconds) / SAMPLES as u32;
    let (mut accident, mut sample) = (begun + START, begun + every);
    while begun.elapsed() < Duration::from_secs(options.seconds) {
        std::thread::sleep(Duration::from_millis(20));
        if Instant::now() > accident {
            soak.accident();
            accident = Instant::now() + Duration::from_millis(soak.random.below(QUIET));
        }
        if Instant::now() > sample {
            soak.sample();
            sample += every;
        }
        if soak.daemon.child.try_wait().unwrap().is_some() {
            soak.hangs.push("the daemon ended by itself".to_owned());
            break;
        }
    }
    soak.end(begun.elapsed())
}

impl Soak<'_> {
    fn accident(&mut self) {
        self.accidents += 1;
        let pause = match self.random.below(8) {
            0 => GIVEN_UP,
            _ => SHORT.mul_f64(self.random.below(1000) as f64 / 1000.0),
        };
        match self.random.below(8) {
            0..=2 => self.restart(1),
            3 => stop_for(self.engines[0].id(), pause),
            4 => stop_for(self.engines[1].id(), pause),
            5 => stop_for(self.daemon.child.id(), pause),
            6 => self.noise(),
            _ => {
                self.ctl(&["clear", "g2"]);
            }
        }
    }

    fn restart(&mut self, at: usize) {
        self.engines[at].kill();
        self.add(at);
        let name = ["first", "second"][at];
        let seed = self.random.below(u64::MAX);
        self.engines[at] = TestProcess::start("engine", self.options, name, seed);
    }

    /// Bytes that mean nothing, at every socket.
    fn noise(&mut self) {
        let bytes: Vec<u8> = (0..self.random.below(4096)).map(|_| self.random.below(256) as u8).collect();
        for socket in [self.options.socket(), self.daemon.admin.clone()] {
            // Who listens may close the line before all is written.
            if let Ok(mut stream) = UnixStream::connect(socket) {
                let _ = stream.write_all(&bytes);
            }
        }
        if let Ok(mut stream) = TcpStream::connect(self.daemon.metrics) {
            let _ = stream.write_all(&bytes);
        }
    }

    /// The answer of `kvbm ctl`; an error is kept.
    fn ctl(&mut self, call: &[&str]) -> Option<Value> {
        self.daemon.ctl(call).map_err(|error| self.hangs.push(error)).ok()
    }

    fn sample(&mut self) {
        self.series.process("daemon", self.daemon.child.id());
        self.series.process("engine", self.engines[0].id());
        for name in ["disk", "volume"] {
            self.series.push(format!("{name}_bytes"), bytes_below(&self.options.dir.join(name)));
        }
        if let Some(status) = self.ctl(&["status"]) {
            for tier in status["tiers"].as_array().into_iter().flatten() {
                let number = |key: &str| tier[key].as_u64().unwrap_or(0);
                if number("capacity") > 0 {
                    let name = tier["tier"].as_str().unwrap_or_default();
                    self.series.push(format!("{name}_used_slots"), number("used"));
                    self.series.push(format!("{name}_quarantined_slots"), number("quarantined"));
                }
            }
        }
        if let Err(error) = self.daemon.scrape() {
            self.hangs.push(error);
        }
        for at in 0..2 {
            if let Some(status) = self.engines[at].ended() {
                self.hangs.push(format!("engine {at} ended by itself: {status}"));
                self.restart(at);
            }
            let silent = self.engines[at].progress.lock().unwrap().last.elapsed();
            if silent > HANG {
                self.hangs.push(format!("engine {at}: nothing for {silent:?}"));
            }
        }
    }

    fn add(&mut self, at: usize) {
        let progress = self.engines[at].progress.lock().unwrap();
        self.verified += progress.verified;
        self.wrong += progress.wrong;
        self.hangs.extend(progress.hangs.iter().cloned());
    }

    /// Slots that are neither free nor hold a block, 5 s after the last engine is gone.
    fn leaked(&mut self) -> u64 {
        std::thread::sleep(LEAK);
        let Some(status) = self.ctl(&["status"]) else { return 0 };
        let tiers = status["tiers"].as_array().into_iter().flatten();
        let leaked = tiers.map(|tier| {
            let number = |key: &str| tier[key].as_u64().unwrap_or(0);
            let busy = number("arriving") + number("active") + number("transfer_pins");
            busy + number("capacity").saturating_sub(number("free") + number("used"))
        });
        leaked.sum()
    }

    fn end(mut self, elapsed: Duration) -> ExitCode {
        self.engines.iter_mut().for_each(TestProcess::kill);
        (0..2).for_each(|at| self.add(at));
        let leaked = self.leaked();
        let exit_status = self.daemon.stop();
        for hang in &self.hangs {
            eprintln!("{hang}");
        }
        let is_well = self.wrong == 0 && self.hangs.is_empty() && leaked == 0 && self.verified > 0;
        let report = json!({
            "seconds": elapsed.as_secs(),
            "accidents": self.accidents,
            "verified": self.verified,
            "wrong_bytes": self.wrong,
            "hangs": self.hangs.len(),
            "leaked_slots": leaked,
            "exit_status": exit_status,
            "series": self.series.into_json(),
        });
        println!("{report}");
        if is_well && exit_status == "exit status: 0" { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Stops a process, and lets it go on after `pause`.
fn stop_for(id: u32, pause: Duration) {
    let process = Pid::from_raw(id.cast_signed()).unwrap();
    // One that has ended is found by the next sample.
    let _ = kill_process(process, Signal::STOP);
    std::thread::sleep(pause);
    let _ = kill_process(process, Signal::CONT);
}
