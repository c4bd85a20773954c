//! G4, and replays over it, against real S3-compatible servers that have nothing to do with each other: one built into the target
//! folder, one fetched there.

use crate::fetch::with_retries;
use crate::python;
use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo, clippy, succeed};
use std::path::{Path, PathBuf};

/// A server over a directory, from the crate registry.
const PACKAGE: &str = "s3s-fs";
const VERSION: &str = "0.14.1";

/// A server that keeps objects in memory and wants requests to be signed, from the Python package index.
const IN_MEMORY: &[&str] = &["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"];

/// Lints what the feature adds and runs its tests; skipped where the server cannot be built.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let server = match install(workspace) {
        Ok(server) => server,
        Err(error) => {
            return Outcome::Skipped(format!("no S3 server: {error:#}"));
        }
    };
    let lints =
        ["kvbm-volume", "kvbm-cli"].map(|package| Outcome::from(clippy(&workspace.root, package, "s3")));
    let mut tests = cargo(&workspace.root);
    tests.args(["test", "-p", "kvbm-volume", "-p", "kvbm-cli", "--features", "kvbm-volume/s3,kvbm-cli/s3"]);
    tests.args(["--test", "s3", "--test", "replay_volume"]);
    tests.env("KVBM_S3_SERVER", server);
    let without = match python::environment(workspace, "moto", IN_MEMORY) {
        Ok(python) => {
            tests.env("KVBM_MOTO_SERVER", python.with_file_name("moto_server"));
            // It takes any credentials.
            tests.envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")]);
            None
        }
        Err(error) => Some(Outcome::Skipped(format!("the second of two servers: {error:#}"))),
    };
    lints.into_iter().chain(without).fold(counted(&mut tests), Outcome::and)
}

/// The server's program; built unless it is there.
fn install(workspace: &Workspace) -> anyhow::Result<PathBuf> {
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
    // Beside ours, so that neither build throws away what the other has compiled.
    command.env("CARGO_TARGET_DIR", building(workspace));
    command
}

/// Where the server is built.
fn building(workspace: &Workspace) -> PathBuf {
    workspace.target.join("tools-build")
}
