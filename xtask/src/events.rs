//! The event plane from end to end: races, replays that are followed, the programs that follow them.

use crate::nats;
use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo};
use std::process::Command;

/// Rounds of registration racing the last drop.
const ROUNDS: &str = "100000";

/// Runs the tests that need more time, or a server, than `cargo test` has. What needs a server is skipped where none can be fetched.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let mut race = cargo(&workspace.root);
    race.args(["test", "-p", "kvbm", "--features", "nats,zmq", "--test", "event_race"]);
    let mut follow = cargo(&workspace.root);
    follow.args(["test", "-p", "kvbm-cli", "--test", "follow"]);
    match nats::fetch(&workspace.target.join("tools")) {
        Ok(server) => drop(follow.env("KVBM_NATS_SERVER", server)),
        Err(error) => println!("without a nats-server: {error:#}"),
    }
    both(race.env("KVBM_RACE_ROUNDS", ROUNDS), &mut follow)
}

fn both(first: &mut Command, second: &mut Command) -> Outcome {
    match (counted(first), counted(second)) {
        (Outcome::Passed { tests }, Outcome::Passed { tests: more }) => {
            Outcome::Passed { tests: tests + more }
        }
        (Outcome::Passed { .. }, failed) | (failed, _) => failed,
    }
}
