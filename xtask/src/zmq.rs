//! Events over `ZeroMQ` with libzmq on the other side, which pyzmq brings along.

use crate::python;
use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo, clippy};

/// What the other side needs of the Python package index.
const PACKAGES: &[&str] = &["pyzmq==27.1.0", "msgpack==1.1.2"];

/// Lints what the feature adds and runs its tests; those with libzmq are skipped where it cannot be
/// fetched.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let lints = Outcome::from(clippy(&workspace.root, "kvbm-events", "zmq"));
    let python = match python::environment(workspace, "zmq", PACKAGES) {
        Ok(python) => python,
        Err(error) => {
            return lints.and(Outcome::Skipped(format!("no libzmq: {error:#}")));
        }
    };
    let mut tests = cargo(&workspace.root);
    tests.args([
        "test",
        "-p",
        "kvbm-events",
        "--features",
        "zmq",
        "--lib",
        "--test",
        "zmq",
        "--test",
        "zmq_lives",
        "--test",
        "zmq_engine",
        "--test",
        "libzmq",
    ]);
    lints.and(counted(tests.env("KVBM_PYZMQ", python)))
}
