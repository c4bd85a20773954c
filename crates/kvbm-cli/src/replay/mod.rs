//! `kvbm replay`: requests through a real block manager.

use anyhow::Result;

use crate::args::ReplayArgs;
use crate::summary::ReplayResult;

/// Replays what `args` ask for.
pub fn run(args: &ReplayArgs) -> Result<ReplayResult> {
    anyhow::bail!("this build has no replay engine yet, so {args:?} cannot be run")
}
