//! Events over `ZeroMQ` with libzmq on the other side, which pyzmq brings along.

use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo, succeed};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the other side needs of the Python package index.
const PACKAGES: &[&str] = &["pyzmq==27.1.0", "msgpack==1.1.2"];

/// Lints what the feature adds and runs its tests; those with libzmq are skipped where it cannot be fetched.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let clippy =
        ["clippy", "-p", "kvbm-events", "--features", "zmq", "--all-targets", "--", "-D", "warnings"];
    if let Err(error) = succeed(cargo(&workspace.root).args(clippy)) {
        return Err(error).into();
    }
    let python = match fetch(&workspace.target.join("tools")) {
        Ok(python) => python,
        Err(error) => return Outcome::Skipped(format!("no libzmq: pyzmq cannot be fetched ({error:#})")),
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
        "libzmq",
    ]);
    counted(tests.env("KVBM_PYZMQ", python))
}

/// A Python with the packages, in a virtual environment; made unless it is there.
fn fetch(tools: &Path) -> anyhow::Result<PathBuf> {
    let folder = tools.join(format!("zmq-{}", PACKAGES.join("-").replace("==", "-")));
    let python = folder.join("bin").join("python");
    let complete = folder.join("complete");
    if complete.is_file() {
        return Ok(python);
    }
    println!("fetching {}", PACKAGES.join(", "));
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--timeout", "30", "--retries", "1", "--only-binary=:all:"]).args(PACKAGES);
    succeed(&mut pip)?;
    std::fs::write(&complete, "").context("the virtual environment cannot be marked as complete")?;
    Ok(python)
}
