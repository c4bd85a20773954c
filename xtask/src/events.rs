//! The event plane from end to end: races, replays that are followed, the programs that follow
//! them.

use crate::nats;
use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo};

/// Rounds of registration racing the last drop.
const ROUNDS: &str = "100000";

/// Runs the tests that need more time, or a server, than `cargo test` has. What needs a server is
/// skipped where none can be fetched.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let mut race = cargo(&workspace.root);
    race.args(["test", "-p", "kvbm", "--features", "nats,zmq", "--test", "event_race"]);
    race.env("KVBM_RACE_ROUNDS", ROUNDS);
    let mut faults = cargo(&workspace.root);
    // A few rounds, and no limit by the clock: `cargo xtask event-faults` runs as many as are
    // wanted, and holds them to it.
    faults.args([
        "test",
        "-p",
        "kvbm",
        "--features",
        "nats,zmq",
        "--test",
        "event_faults",
        "--",
        "--nocapture",
    ]);
    let mut follow = cargo(&workspace.root);
    follow.args(["test", "-p", "kvbm-cli", "--test", "follow"]);
    let without = match nats::fetch(&workspace.target.join("tools")) {
        Ok(server) => {
            for tests in [&mut faults, &mut follow] {
                tests.env("KVBM_NATS_SERVER", &server);
            }
            None
        }
        Err(error) => Some(format!("{error:#}")),
    };
    let outcome =
        [race, faults, follow].iter_mut().map(counted).fold(Outcome::Passed { tests: 0 }, Outcome::and);
    match (outcome, without) {
        (Outcome::Passed { tests }, Some(why)) => {
            Outcome::Skipped(format!("what needs a nats-server ({why}); {tests} tests without one passed"))
        }
        (outcome, _) => outcome,
    }
}
