//! Python packages that tests need as the other side.

use crate::fetch::with_retries;
use crate::workspace::{Workspace, succeed};
use anyhow::Context;
use std::path::{Path, PathBuf};
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

/// A folder below the target folder with exactly these packages for `python`, none of their
/// requirements; made unless it is there.
pub(crate) fn folder(
    workspace: &Workspace,
    python: &Path,
    name: &str,
    packages: &[&str],
) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("tools").join(name);
    let complete = folder.join("complete");
    if std::fs::read_to_string(&complete).is_ok_and(|made| made == packages.join(" ")) {
        return Ok(folder);
    }
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("the old packages cannot be removed")?;
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--timeout", "30", "--retries", "3", "--only-binary=:all:", "--target"]);
    pip.arg(&folder).args(packages);
    with_retries(&packages.join(", "), || succeed(&mut pip))?;
    std::fs::write(&complete, packages.join(" ")).context("the packages cannot be marked as complete")?;
    Ok(folder)
}
