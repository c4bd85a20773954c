//! A daemon and engines that are killed, stopped and started again at random, for `cargo xtask
//! node-test` and `cargo xtask soak`.
//!
//! `node test --rounds N --take-overs M --seed S --dir DIR` starts a daemon and three engines of
//! two ranks, each a process of its own. The movers of the third engine are further processes.
//! After the rounds, M daemons take over from each other under load. It prints one line of JSON:
//! `rounds, verified, wrong_bytes, hangs, leaked_slots, found_again, take_overs, lost_blocks,
//! recomputed`. The last are the requests that computed what they were promised while daemons took
//! over. Its exit status is 0 where nothing is wrong.
//!
//! `node soak --seconds N --seed S --dir DIR --program KVBM` does the same to the engines of a
//! `kvbm serve` with disk and volume, for a long time, and prints what its processes use
//! ([`soak`]). `node hostile --seconds N --rate N --seed S --dir DIR --program KVBM` sends random
//! bytes to every socket that listens ([`hostile`]).
#![allow(clippy::unwrap_used)] // A step that fails fails the test.

#[path = "../../../kvbm-link/tests/support/authority.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod authority;
mod daemon;
mod engine;
mod hostile;
mod movers;
mod process;
mod sampling;
mod served;
mod soak;
mod strangers;
mod test;

#[path = "../../tests/support/mod.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod support;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Blocks of host memory.
const HOST_BLOCKS: u32 = 512;
/// Sequences that engines compute, and blocks of each. Host memory holds them all in each model.
const SEQUENCES: u32 = 32;
const BLOCKS: usize = 8;
/// Name of a daemon that takes over from the one before it.
const TAKE_OVER: &str = "take-over";
/// Models by number, in the order of `NodeTestModel` of xtask.
const MODELS: [support::Model; 3] =
    [support::Model::OneGroup, support::Model::Latent, support::Model::ThreeGroups];
/// Name of an engine whose blocks lie on emulated devices; those of others are in host memory.
const ON_DEVICES: &str = "on-devices";
/// Name of an engine whose movers are processes of their own.
const MOVERS_APART: &str = "movers-apart";
/// Blocks of each engine.
const G1_BLOCKS: u32 = 64;
/// Ranks of each engine.
const RANKS: u16 = 2;

/// What every process is told.
#[derive(Clone, Debug)]
struct Options {
    dir: PathBuf,
    rounds: u64,
    take_overs: u64,
    seed: u64,
    name: String,
    /// Time between two requests of an engine.
    pause: Duration,
    /// Length of a soak.
    seconds: u64,
    /// The program `kvbm`.
    program: PathBuf,
    /// Connections of strangers to each socket in a second.
    rate: u64,
    /// What engines compute in the test.
    model: support::Model,
    /// Of a mover: its rank, and the descriptor of its memory.
    rank: u16,
    memory: i32,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Self {
        let mut options = Self {
            dir: PathBuf::new(),
            rounds: 1,
            take_overs: 0,
            seed: 1,
            name: String::new(),
            pause: Duration::ZERO,
            seconds: 60,
            program: PathBuf::new(),
            rate: 1000,
            model: support::Model::OneGroup,
            rank: 0,
            memory: -1,
        };
        let mut args = args;
        while let Some(name) = args.next() {
            let value = args.next().unwrap_or_else(|| panic!("{name} needs a value"));
            match name.as_str() {
                "--dir" => options.dir = value.into(),
                "--rounds" => options.rounds = value.parse().expect("a number"),
                "--take-overs" => options.take_overs = value.parse().expect("a number"),
                "--seed" => options.seed = value.parse().expect("a number"),
                "--name" => options.name = value,
                "--pause-ms" => options.pause = Duration::from_millis(value.parse().expect("a number")),
                "--seconds" => options.seconds = value.parse().expect("a number"),
                "--rate" => options.rate = value.parse().expect("a number"),
                "--rank" => options.rank = value.parse().expect("a number"),
                "--memory" => options.memory = value.parse().expect("a number"),
                "--program" => options.program = value.into(),
                "--model" => options.model = MODELS[value.parse::<usize>().expect("a number")],
                other => panic!("unknown option {other}"),
            }
        }
        options
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("run").join("kvbm.sock")
    }

    /// This program in another role.
    fn process(&self, role: &str, name: &str, seed: u64) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let model = MODELS.iter().position(|model| *model == self.model).expect("one of them");
        command.arg(role).arg("--dir").arg(&self.dir).args(["--name", name]);
        command.args(["--seed", &seed.to_string(), "--model", &model.to_string()]);
        command.args(["--pause-ms", &self.pause.as_millis().to_string()]);
        command
    }

    /// What the daemon keeps.
    fn config(&self) -> kvbm::config::Config {
        let host = format!("[host]\ncapacity = \"{HOST_BLOCKS} blocks\"\n");
        self.model.config(u32::from(RANKS), &host)
    }
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let role = args.next().unwrap_or_default();
    let options = Options::parse(args);
    match role.as_str() {
        "daemon" => daemon::run(&options),
        "engine" => engine::run(&options),
        "mover" => movers::run(&options),
        "test" => return test::run(&options),
        "soak" => return soak::run(&options),
        "hostile" => return hostile::run(&options),
        other => panic!("unknown role {other:?}: test, soak, hostile, daemon, engine or mover"),
    }
    ExitCode::SUCCESS
}

/// A line for whoever started this process.
fn say(line: &str) {
    // Who started it is gone.
    if std::io::stdout().write_all(format!("{line}\n").as_bytes()).is_err() {
        std::process::exit(0);
    }
}

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
