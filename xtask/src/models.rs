//! The locks under model checkers, in builds of their own: `--cfg kvbm_NAME` puts the checker's
//! lock in the place of ours. Then the long form of the comparison with a naive model.

use crate::steps::{Outcome, side_by_side};
use crate::test::{counted, workspace_tests};
use crate::workspace::{Workspace, cargo};

/// Package, checker and the test that runs under it.
const RUNS: &[(&str, &str)] = &[("kvbm-pool", "loom"), ("kvbm-pool", "shuttle")];

/// Seeds of the pool's random operations against the naive model: with what it does for each, more
/// than two million.
const SEEDS: u32 = 400;

pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let run = |(package, checker): &(&str, &str)| {
        let mut command = cargo(&workspace.root);
        command.args(["test", "--release", "-p", package, "--test", checker]);
        command.env("RUSTFLAGS", format!("--cfg kvbm_{checker}"));
        command.env("CARGO_PROFILE_RELEASE_LTO", "off");
        command.env("CARGO_TARGET_DIR", workspace.target.join("models").join(checker));
        match counted(&mut command) {
            Outcome::Passed { tests: 0 } => {
                Err(anyhow::anyhow!("no test of {package} runs under {checker}: correct xtask/src/models.rs"))
                    .into()
            }
            outcome => outcome,
        }
    };
    let checked = side_by_side(RUNS, run);
    // As the step `test` built it.
    let mut model = workspace_tests(workspace);
    model.args(["--test", "model"]).env("KVBM_POOL_SEEDS", SEEDS.to_string());
    checked.and(counted(&mut model))
}
