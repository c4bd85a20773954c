//! `cargo xtask test-gpu`: the tests that need a CUDA device, which fail where there is none; `gpu-bundle`: what such a
//! machine needs to run them without Rust.

mod bundle;

use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo};

pub(crate) use bundle::{Mode, run as bundle};

/// Packages and the tests of them that use a device: the real one if there is one.
const RUNS: &[(&str, &[&str])] =
    &[("kvbm-device", &["--test", "gpu"]), ("kvbm-kernels", &["--test", "kernels", "gpu"])];

/// Runs them all; whether all passed.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<bool> {
    let mut passed = 0;
    for (package, args) in RUNS {
        let mut command = cargo(&workspace.root);
        command.args(["test", "--release", "-p", package]).args(*args).env("KVBM_REQUIRE_GPU", "1");
        match counted(&mut command) {
            Outcome::Passed { tests: 0 } => anyhow::bail!("{package} ran no test: correct xtask/src/gpu.rs"),
            Outcome::Passed { tests } => passed += tests,
            Outcome::Failed { why, .. } | Outcome::Skipped(why) => {
                anyhow::bail!("the tests that need a CUDA device failed; what is missing stands above: {why}")
            }
        }
    }
    println!("{passed} tests passed on a CUDA device");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

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
