//! What cargo says about the workspace, and how to call it.

use anyhow::{Context, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace as it is on disk.
pub(crate) struct Workspace {
    /// Folder of the root Cargo.toml.
    pub(crate) root: PathBuf,
    /// Folder of build outputs.
    pub(crate) target: PathBuf,
    /// The crates in `crates/`, by name.
    pub(crate) crates: Vec<Crate>,
}

/// A crate of ours.
#[derive(Clone, Debug)]
pub(crate) struct Crate {
    pub(crate) name: String,
    /// Folder of its Cargo.toml.
    pub(crate) folder: PathBuf,
    /// Crates of the workspace that it uses when it is built or run; those of its tests are not
    /// listed.
    pub(crate) uses: Vec<String>,
    /// Names of its features.
    pub(crate) features: Vec<String>,
    /// Root source file of its library, where it has one.
    pub(crate) library: Option<PathBuf>,
}

impl Workspace {
    /// Asks cargo.
    pub(crate) fn load() -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies in a folder of the workspace")?
            .to_owned();
        let output = cargo(&root)
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
        }
        Self::from_metadata(root, &serde_json::from_slice(&output.stdout)?)
    }

    fn from_metadata(root: PathBuf, metadata: &Value) -> anyhow::Result<Self> {
        let target =
            metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
        let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
        let in_crates = |package: &&Value| {
            let manifest = package["manifest_path"].as_str().unwrap_or_default();
            Path::new(manifest).starts_with(root.join("crates"))
        };
        let mut crates: Vec<Crate> = packages.iter().filter(in_crates).map(Crate::from_metadata).collect();
        crates.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<String> = crates.iter().map(|c| c.name.clone()).collect();
        for member in &mut crates {
            member.uses.retain(|used| names.contains(used));
        }
        Ok(Self { target: PathBuf::from(target), root, crates })
    }

    /// The crate called `name`.
    pub(crate) fn find(&self, name: &str) -> Option<&Crate> {
        self.crates.iter().find(|member| member.name == name)
    }

    /// `path` relative to the root, for messages.
    pub(crate) fn relative<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}

impl Crate {
    fn from_metadata(package: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let is_library = |target: &&Value| list(&target["kind"]).iter().any(|kind| kind == "lib");
        let mut uses: Vec<String> = list(&package["dependencies"])
            .iter()
            .filter(|dependency| dependency["kind"] != "dev")
            .map(|dependency| text(&dependency["name"]))
            .collect();
        uses.sort();
        uses.dedup();
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        Self {
            name: text(&package["name"]),
            folder: manifest.parent().unwrap_or(Path::new("")).to_owned(),
            uses,
            features: package["features"]
                .as_object()
                .map(|f| f.keys().cloned().collect())
                .unwrap_or_default(),
            library: list(&package["targets"]).iter().find(is_library).map(|t| text(&t["src_path"]).into()),
        }
    }
}

/// Features of every build of tests and lints: one set, so that no crate is compiled twice. The
/// Python package has those of its wheel.
pub(crate) const FEATURES: &str = "kvbm-cli/compress,kvbm-cli/nats,kvbm-cli/zmq,kvbm-cli/s3,kvbm-cli/tls,\
     kvbm-python/compress,kvbm-python/nats,kvbm-python/zmq,kvbm-python/s3,kvbm-python/tls";

/// How programs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// As the step `test` builds them.
    Dev,
    /// As users build them: for figures.
    Release,
}

impl Profile {
    /// The folder of what is built, below the target folder.
    pub(crate) const fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds programs or libraries (`--bin NAME`, `--lib`) with the features of the step `test`. With
/// its profile too, what it compiled is not compiled again. The folder with what was built.
pub(crate) fn compile(workspace: &Workspace, profile: Profile, what: &[&str]) -> anyhow::Result<PathBuf> {
    let mut build = cargo(&workspace.root);
    build.args(["build", "--quiet", "--workspace", "--features", FEATURES]).args(what);
    build.args((profile == Profile::Release).then_some("--release"));
    succeed(&mut build)?;
    Ok(workspace.target.join(profile.folder()))
}

/// Cargo, in the workspace's root.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    without_package(&mut command);
    command
}

/// `cargo run` hands down the folder of xtask's own package; nothing below wants it. Build scripts
/// that look at it run again, and what depends on them is compiled again.
pub(crate) fn without_package(command: &mut Command) {
    command.env_remove("CARGO_MANIFEST_DIR");
}

/// Runs `command`, its output shown as it comes.
pub(crate) fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", line_of(command)))?;
    if !status.success() {
        bail!("`{}` failed with {status}", line_of(command));
    }
    Ok(())
}

/// Runs `command` and gives its standard output.
pub(crate) fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot start {}", line_of(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed with {}:\n{}", line_of(command), output.status, errors.trim_end());
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of {} is not UTF-8", line_of(command)))
}

/// The command as one would type it.
pub(crate) fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let mut line = program.to_string_lossy().into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_gives_the_crates_their_arrows_and_features() {
        let metadata = serde_json::json!({
            "target_directory": "/w/target",
            "packages": [
                { "name": "b", "manifest_path": "/w/crates/b/Cargo.toml", "features": { "worker": [] },
                  "dependencies": [
                      { "name": "a", "kind": null }, { "name": "serde", "kind": null }, { "name": "c", "kind": "dev" }
                  ],
                  "targets": [{ "kind": ["lib"], "src_path": "/w/crates/b/src/lib.rs" }] },
                { "name": "a", "manifest_path": "/w/crates/a/Cargo.toml", "features": {}, "dependencies": [],
                  "targets": [{ "kind": ["bin"], "src_path": "/w/crates/a/src/main.rs" }] },
                { "name": "c", "manifest_path": "/w/crates/c/Cargo.toml", "features": {}, "dependencies": [],
                  "targets": [] },
                { "name": "xtask", "manifest_path": "/w/xtask/Cargo.toml", "features": {}, "dependencies": [],
                  "targets": [] },
            ],
        });
        let workspace = Workspace::from_metadata("/w".into(), &metadata).unwrap();
        let names: Vec<&str> = workspace.crates.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        let b = workspace.find("b").unwrap();
        assert_eq!(
            (b.uses.as_slice(), b.features.as_slice()),
            (&["a".to_owned()][..], &["worker".to_owned()][..])
        );
        assert_eq!(b.library.as_deref(), Some(Path::new("/w/crates/b/src/lib.rs")));
        assert_eq!(workspace.find("a").unwrap().library, None);
        assert_eq!(workspace.relative(&b.folder), Path::new("crates/b"));
    }

    #[test]
    fn a_failing_command_is_named_with_its_arguments() {
        let error = succeed(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert!(error.to_string().contains("sh -c exit 3"), "{error}");
        assert!(
            output_of(Command::new("sh").args(["-c", "echo why >&2; false"]))
                .unwrap_err()
                .to_string()
                .contains("why")
        );
        assert_eq!(output_of(Command::new("sh").args(["-c", "echo yes"])).unwrap(), "yes\n");
    }
}
