//! The programs of runs with a node daemon, as copies in a folder of their own: a build
//! meanwhile must not change them.

use crate::workspace::{Profile, Workspace, compile};
use anyhow::{Context, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `kvbm`, and the program `node` of `kvbm-node`. The folder goes with this.
pub(crate) struct NodePrograms {
    dir: PathBuf,
    node: PathBuf,
    kvbm: PathBuf,
}

impl NodePrograms {
    /// Builds them for a run called `name`, with the features of every test build.
    pub(crate) fn build(workspace: &Workspace, name: &str) -> anyhow::Result<Self> {
        let built = compile(workspace, Profile::Dev, &["--bin", "kvbm", "--example", "node"])?;
        let dir = workspace.target.join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir).with_context(|| format!("cannot empty {}", dir.display()))?;
        }
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let copy = |from: &Path, name: &str| -> anyhow::Result<PathBuf> {
            let to = dir.join(name);
            std::fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
            Ok(to)
        };
        let node = copy(&built.join("examples").join("node"), "node")?;
        let kvbm = copy(&built.join("kvbm"), "kvbm")?;
        Ok(Self { dir, node, kvbm })
    }

    /// Runs `node ROLE` with these arguments: whether it ended well, and its report, which is the
    /// last line that it prints.
    pub(crate) fn run(&self, role: &str, arguments: &[(&str, u64)]) -> anyhow::Result<(bool, Value)> {
        let mut command = Command::new(&self.node);
        command.arg(role).arg("--dir").arg(self.dir.join("work")).arg("--program").arg(&self.kvbm);
        for (name, value) in arguments {
            command.arg(name).arg(value.to_string());
        }
        let output = command.stderr(Stdio::inherit()).output();
        let output = output.with_context(|| format!("cannot run {}", self.node.display()))?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let Some(Ok(report)) = stdout.lines().last().map(serde_json::from_str) else {
            bail!("`node {role}` ended without a report: {}", output.status);
        };
        Ok((output.status.success(), report))
    }
}

impl Drop for NodePrograms {
    fn drop(&mut self) {
        // What stays is removed by the next run.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
