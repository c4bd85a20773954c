//! G4, and replays over it, against a real S3-compatible server, built into the target folder.

use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{Workspace, cargo, succeed};
use std::path::{Path, PathBuf};

/// A server over a directory, from the crate registry.
const PACKAGE: &str = "s3s-fs";
const VERSION: &str = "0.14.1";

/// Lints what the feature adds and runs its tests; skipped where the server cannot be built.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let server = match install(workspace) {
        Ok(server) => server,
        Err(error) => {
            return Outcome::Skipped(format!(
                "no S3 server: {PACKAGE} {VERSION} cannot be installed ({error:#})"
            ));
        }
    };
    for package in ["kvbm-volume", "kvbm-cli"] {
        let clippy = ["clippy", "-p", package, "--features", "s3", "--all-targets", "--", "-D", "warnings"];
        if let Err(error) = succeed(cargo(&workspace.root).args(clippy)) {
            return Err(error).into();
        }
    }
    let mut tests = cargo(&workspace.root);
    tests.args(["test", "-p", "kvbm-volume", "-p", "kvbm-cli", "--features", "kvbm-volume/s3,kvbm-cli/s3"]);
    tests.args(["--test", "s3", "--test", "replay_volume"]);
    counted(tests.env("KVBM_S3_SERVER", server))
}

/// The server's program; built unless it is there.
fn install(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("tools").join(format!("{PACKAGE}-{VERSION}"));
    let server = folder.join("bin").join(PACKAGE);
    if !server.is_file() {
        println!("installing {PACKAGE} {VERSION}: some minutes, once");
        succeed(&mut install_command(workspace, &folder))?;
    }
    Ok(server)
}

fn install_command(workspace: &Workspace, folder: &Path) -> std::process::Command {
    let mut command = cargo(&workspace.root);
    command.args(["install", PACKAGE, "--version", VERSION, "--features", "binary", "--locked", "--root"]);
    command.arg(folder);
    // Beside ours, so that neither build throws away what the other has compiled.
    command.env("CARGO_TARGET_DIR", workspace.target.join("tools-build"));
    command
}
