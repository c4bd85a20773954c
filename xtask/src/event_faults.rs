//! `cargo xtask event-faults`: random kills, partitions, stalls and restarts under the event plane, as many as are asked for.

use crate::nats;
use crate::workspace::{Workspace, cargo, succeed};
use anyhow::Context;

/// How many rounds, and with which numbers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    rounds: u64,
    seed: u64,
}

/// How long snapshots over core NATS may take to set the index right when the last fault is over, in milliseconds.
const WITHIN_MS: &str = "5000";

impl Options {
    /// Reads the arguments behind `event-faults`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { rounds: 200, seed: 1 };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let field = match name.as_str() {
                "--rounds" => &mut options.rounds,
                "--seed" => &mut options.seed,
                other => return Err(format!("unknown argument `{other}` of `event-faults`")),
            };
            let value = args.next().and_then(|value| value.parse().ok()).filter(|value| *value > 0);
            *field = value.ok_or(format!("`{name}` needs a number from 1 on"))?;
        }
        Ok(options)
    }
}

/// Runs them; an index that is not right after one of them is an error.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let workspace = Workspace::load()?;
    let server = nats::fetch(&workspace.target.join("tools")).context("there is no nats-server")?;
    let mut tests = cargo(&workspace.root);
    tests.args([
        "test",
        "-p",
        "kvbm-events",
        "--features",
        "nats,zmq",
        "--test",
        "faults",
        "--",
        "--nocapture",
    ]);
    tests.env("KVBM_NATS_SERVER", server).env("KVBM_FAULT_WITHIN_MS", WITHIN_MS);
    tests.env("KVBM_FAULT_ROUNDS", options.rounds.to_string());
    tests.env("KVBM_FAULT_SEED", options.seed.to_string());
    succeed(&mut tests)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_and_seed_are_read() {
        let parse =
            |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(parse(""), Ok(Options { rounds: 200, seed: 1 }));
        assert_eq!(parse("--seed 7 --rounds 5"), Ok(Options { rounds: 5, seed: 7 }));
        for wrong in ["--rounds", "--rounds 0", "--rounds many", "now"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
