//! An S3-compatible server that stores objects as files, compiled into the target folder.
//!
//! Its build takes minutes, so the step `test` uses moto, and the step `s3`, which runs before a
//! release, uses this server.

use crate::fetch::with_retries;
use crate::workspace::{Workspace, cargo, succeed};
use std::path::{Path, PathBuf};

const PACKAGE: &str = "s3s-fs";
const VERSION: &str = "0.14.1";

/// The server's program; built unless it is there.
pub(super) fn install(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("tools").join(format!("{PACKAGE}-{VERSION}"));
    let server = folder.join("bin").join(PACKAGE);
    if !server.is_file() {
        let mut install = install_command(workspace, &folder);
        with_retries(&format!("{PACKAGE} {VERSION}, which is built: some minutes, once"), || {
            succeed(&mut install)
        })?;
        // Only the program is needed any more. What stays would be in nobody's way but the disk's.
        let _ = std::fs::remove_dir_all(building(workspace));
    }
    Ok(server)
}

fn install_command(workspace: &Workspace, folder: &Path) -> std::process::Command {
    let mut command = cargo(&workspace.root);
    command.args(["install", PACKAGE, "--version", VERSION, "--features", "binary", "--locked", "--root"]);
    command.arg(folder);
    // Its speed tells nothing, and an optimised build takes longer.
    command.arg("--debug");
    // Beside ours, so that neither build throws away what the other has compiled.
    command.env("CARGO_TARGET_DIR", building(workspace));
    command
}

/// Where the server is built.
fn building(workspace: &Workspace) -> PathBuf {
    workspace.target.join("tools-build")
}
