//! The unsafe parts under Miri, which finds undefined behaviour that tests survive.

use crate::steps::{Outcome, side_by_side};
use crate::test::counted;
use crate::workspace::{Workspace, line_of, succeed};
use std::process::Command;

/// Crates with `unsafe` and the tests of it that Miri can run: no mapped files, no io_uring, no
/// memfd, no thousands of random cases. A single test that cannot run there says so itself:
/// `#[cfg_attr(miri, ignore = "why")]`.
const RUNS: &[(&str, &[&str])] = &[
    ("kvbm-device", &["--lib"]),
    ("kvbm-storage", &["--test", "host"]),
    ("kvbm-storage", &["--test", "bound", "--", "--skip", "fragments_are_the_payload"]),
    ("kvbm-storage", &["--test", "conformance"]),
    ("kvbm-disk", &["--lib", "buffer"]),
];

/// Real clocks and files are wanted, not simulated ones; `parking_lot` keeps pointers in integers.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-permissive-provenance";

pub(crate) fn check(workspace: &Workspace) -> Outcome {
    if let Err(why) = ready() {
        return Outcome::Skipped(why);
    }
    let run = |(package, args): &(&str, &[&str])| {
        let mut command = nightly(&["miri", "test", "-p", package]);
        command.args(*args).current_dir(&workspace.root);
        command.env("MIRIFLAGS", FLAGS).env("PROPTEST_CASES", "2");
        command.env("CARGO_TARGET_DIR", workspace.target.join("miri"));
        match counted(&mut command) {
            Outcome::Passed { tests: 0 } => {
                Err(anyhow::anyhow!("`{}` ran no test: correct xtask/src/miri.rs", line_of(&command))).into()
            }
            outcome => outcome,
        }
    };
    // What all runs need is made once.
    if let Err(error) = succeed(&mut nightly(&["miri", "setup"])) {
        return Err(error).into();
    }
    // Miri uses one processor; cargo builds for one run after the other.
    side_by_side(RUNS, run)
}

/// Finds Miri, or installs it into an installed nightly; says why there is none.
fn ready() -> Result<(), String> {
    let has_miri = || nightly(&["miri", "--version"]).output().is_ok_and(|output| output.status.success());
    if has_miri() && has_sources() {
        return Ok(());
    }
    let has_nightly = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_nightly {
        return Err("no nightly toolchain is installed (`rustup toolchain install nightly`)".into());
    }
    let add = Command::new("rustup")
        .args(["component", "add", "--toolchain", "nightly", "miri", "rust-src"])
        .output();
    match add {
        Ok(output) if output.status.success() && has_miri() => Ok(()),
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            let why = errors.lines().last().unwrap_or("rustup printed no error");
            Err(format!(
                "Miri cannot be installed (`rustup component add --toolchain nightly miri rust-src`): {why}"
            ))
        }
        Err(error) => Err(format!("rustup cannot be started: {error}")),
    }
}

/// Whether the nightly has the standard library's sources, which Miri builds.
fn has_sources() -> bool {
    let sysroot = Command::new("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]).output();
    sysroot.is_ok_and(|output| {
        let sysroot = String::from_utf8_lossy(&output.stdout);
        std::path::Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library").is_dir()
    })
}

/// Cargo of the nightly toolchain, free of what the running cargo has put into the environment.
fn nightly(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(args);
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "CARGO_MANIFEST_DIR"] {
        command.env_remove(variable);
    }
    command
}
