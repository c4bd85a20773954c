//! `cargo xtask test-gpu`: the tests that need a CUDA device, which fail where there is none;
//! `gpu-bundle`: what such a machine needs to run them without Rust.

mod bundle;

use crate::steps::Outcome;
use crate::test::counted_to;
use crate::workspace::{Workspace, cargo};
use std::io::Write;

pub(crate) use bundle::{Mode, driver, run as bundle};

/// Packages and the tests of them that use a device: the real one if there is one.
const RUNS: &[(&str, &[&str])] =
    &[("kvbm-device", &["--test", "gpu"]), ("kvbm-kernels", &["--test", "kernels", "gpu"])];

/// What a test says that finds no device, before the reason.
const NOT_FOUND: &str = "no CUDA device was found: ";

/// Shows what is written and keeps it.
#[derive(Default)]
struct Shown(Vec<u8>);

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        std::io::stdout().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stdout().flush()
    }
}

/// Why the tests failed: the reason stands between compiler messages and traces, so it is said once
/// more.
fn reason(why: &str, output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    let missing = output.lines().find_map(|line| line.split_once(NOT_FOUND));
    match missing {
        Some((_, missing)) => format!("no device was found: {missing}"),
        None => format!("the tests that need a CUDA device failed; their output stands above: {why}"),
    }
}

/// Runs them all; whether all passed.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<bool> {
    let mut passed = 0;
    for (package, args) in RUNS {
        let mut command = cargo(&workspace.root);
        command.args(["test", "--release", "-p", package]).args(*args).env("KVBM_REQUIRE_GPU", "1");
        let mut shown = Shown::default();
        match counted_to(&mut command, &mut shown, std::io::stderr()) {
            Outcome::Passed { tests: 0 } => {
                anyhow::bail!("{package} ran no test: correct xtask/src/gpu/mod.rs")
            }
            Outcome::Passed { tests } => passed += tests,
            Outcome::Failed { why, .. } | Outcome::Skipped(why) => anyhow::bail!(reason(&why, &shown.0)),
        }
    }
    println!("{passed} tests passed on a CUDA device");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_distinguished_from_a_failed_test() {
        let output = b"running 1 test\nno CUDA device was found: no CUDA driver\ntest x ... FAILED\n";
        assert_eq!(reason("1 failed", output), "no device was found: no CUDA driver");
        let other = reason("1 failed", b"test x ... FAILED\n");
        assert!(other.ends_with("1 failed") && !other.contains("no device"), "{other}");
    }

    #[test]
    fn the_tests_are_where_the_table_says() {
        let workspace = Workspace::load().unwrap();
        for (package, args) in RUNS {
            let folder = &workspace.find(package).unwrap_or_else(|| panic!("no crate {package}")).folder;
            let tests = folder.join("tests");
            let (file, main) = (tests.join(format!("{}.rs", args[1])), tests.join(args[1]).join("main.rs"));
            assert!(file.is_file() || main.is_file(), "{package}: no test program {}", args[1]);
        }
    }
}
