//! `cargo xtask sim`: the leader and its ranks under seeds.
//!
//! The work is done by `crates/kvbm-sim/examples/sim`, in a build of its own: `--cfg kvbm_sim`
//! gives it a clock and planted bugs that no other build has.

use crate::steps::Outcome;
use crate::workspace::{Workspace, cargo, output_of, succeed};
use anyhow::{Context, bail};
use std::path::PathBuf;
use std::process::Command;

/// Seeds of the step of `cargo xtask test` that are the same each time, and every planted bug.
const FIXED: [&str; 3] = ["--seeds", "500", "--mutants"];
/// Time in which new seeds are begun. They follow from the commit, so that a failure can be
/// repeated.
const NEW_SECONDS: &str = "120";

/// The same for nodes that read from each other: a few of them, and their planted bugs.
const NODES: [&str; 7] = ["--nodes", "40", "--seeds", "4", "--steps", "60", "--mutants"];

/// Arguments with a value, and those without.
const VALUES: &[&str] =
    &["--seeds", "--first-seed", "--seed", "--steps", "--nodes", "--jobs", "--seconds", "--plant", "--json"];
const FLAGS: &[&str] = &["--trace", "--mutants"];

/// Arguments for the program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options(Vec<String>);

impl Options {
    /// Reads the arguments behind `sim`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut rest = args.iter();
        while let Some(name) = rest.next() {
            let takes_value = VALUES.contains(&name.as_str());
            if !takes_value && !FLAGS.contains(&name.as_str()) {
                return Err(format!("unknown argument `{name}` of `sim`"));
            }
            if takes_value {
                let value = rest.next().ok_or_else(|| format!("`{name}` of `sim` needs a value"))?;
                let is_number = value.parse::<u64>().is_ok();
                if !is_number && !matches!(name.as_str(), "--plant" | "--json") {
                    return Err(format!("{name} {value}: expected a number"));
                }
            }
        }
        Ok(Self(args.to_vec()))
    }
}

/// Builds the program: optimised, because a run is millions of steps, with the checks of a debug
/// build.
fn build(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let target = workspace.target.join("sim");
    let mut command = cargo(&workspace.root);
    command.args(["build", "--release", "-p", "kvbm-sim", "--example", "sim"]);
    command.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    command.env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true");
    // Inlining across units takes a fifth of the build.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off");
    command.env("RUSTFLAGS", "--cfg kvbm_sim").env("CARGO_TARGET_DIR", &target);
    succeed(&mut command)?;
    Ok(target.join("release/examples/sim"))
}

/// Runs it; whether nothing was violated.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let program = build(&Workspace::load()?)?;
    let status = Command::new(&program).args(&options.0).status();
    Ok(status.with_context(|| format!("cannot start {}", program.display()))?.success())
}

/// The first seeds, and every planted bug, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let run = || {
        let program = build(workspace)?;
        let first = new_seed(workspace).to_string();
        println!("new seeds from {first} on");
        let new = ["--first-seed", &first, "--seeds", "1000000", "--seconds", NEW_SECONDS];
        for arguments in [&FIXED[..], &new, &NODES] {
            let output = Command::new(&program).args(arguments).output();
            let output = output.with_context(|| format!("cannot start {}", program.display()))?;
            if !output.status.success() {
                let errors = String::from_utf8_lossy(&output.stderr);
                bail!("{errors}\n`cargo xtask sim --seed N --trace` shows what seed N does, step for step")
            }
        }
        Ok(())
    };
    run().into()
}

/// The first of the new seeds: the name of the commit as a number; 1 where there is no commit.
fn new_seed(workspace: &Workspace) -> u64 {
    let mut git = Command::new("git");
    let commit = output_of(git.args(["rev-parse", "HEAD"]).current_dir(&workspace.root)).unwrap_or_default();
    commit.get(..12).and_then(|name| u64::from_str_radix(name, 16).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_checked_before_anything_is_built() {
        let line = "--seed 7 --trace --json - --plant HideGap";
        let Options(args) = parse(line).expect("right");
        assert_eq!(args.join(" "), line);
        assert!(parse("--seeds").is_err_and(|error| error.contains("needs a value")));
        assert!(parse("--seeds many").is_err_and(|error| error.contains("expected a number")));
        assert!(parse("--speed 1").is_err_and(|error| error.contains("--speed")));
    }
}
