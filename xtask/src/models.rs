//! The locks under model checkers, in builds of their own: `--cfg kvbm_NAME` puts the checker's lock in the place of ours.

use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo};

/// Package, checker and the test that runs under it.
const RUNS: &[(&str, &str)] = &[("kvbm-pool", "loom"), ("kvbm-pool", "shuttle")];

pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let run = |(package, checker): &(&str, &str)| {
        let mut command = cargo(&workspace.root);
        command.args(["test", "--release", "-p", package, "--test", checker]);
        command.env("RUSTFLAGS", format!("--cfg kvbm_{checker}"));
        command.env("CARGO_TARGET_DIR", workspace.target.join("models").join(checker));
        match counted(&mut command) {
            Outcome::Passed { tests: 0 } => {
                Err(anyhow::anyhow!("no test of {package} runs under {checker}: correct xtask/src/models.rs"))
                    .into()
            }
            outcome => outcome,
        }
    };
    RUNS.iter().map(run).fold(Outcome::Passed { tests: 0 }, Outcome::and)
}
