//! Python packages that tests need as the other side.

use crate::fetch::with_retries;
use crate::workspace::{Workspace, succeed};
use anyhow::Context;
use std::path::PathBuf;
use std::process::Command;

/// A Python with the packages, in a virtual environment below the target folder; made unless it is
/// there. Only wheels: nothing is compiled.
pub(crate) fn environment(workspace: &Workspace, name: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("tools");
    let folder = folder.join(format!("{name}-{}", packages.join("-").replace("==", "-")));
    let python = folder.join("bin").join("python");
    let complete = folder.join("complete");
    if complete.is_file() {
        return Ok(python);
    }
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--timeout", "30", "--retries", "3", "--only-binary=:all:"]).args(packages);
    with_retries(&packages.join(", "), || succeed(&mut pip))?;
    std::fs::write(&complete, "").context("the virtual environment cannot be marked as complete")?;
    Ok(python)
}
