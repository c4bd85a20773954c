//! The wheel, built and installed as a user does it.

use crate::python;
use crate::steps::Outcome;
use crate::wheel;
use crate::workspace::{Profile, Workspace, succeed, without_package};
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What builds a wheel for this machine's libraries.
const MATURIN: &[&str] = &["maturin==1.16.0"];

/// The step `wheel`: what the wheel has, and that it works where pip has installed it alone.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let prepared = || {
        let wheel = build(workspace, Profile::Dev)?;
        let python = python::environment(workspace, "binding", wheel::TEST_PACKAGES)?;
        let environment = workspace.target.join("wheel-test");
        let installed = install(&python, &environment, std::slice::from_ref(&wheel))?;
        anyhow::Ok((python, wheel, installed))
    };
    match prepared() {
        Ok((python, wheel, installed)) => {
            let environment = [("WHEEL", wheel.as_path()), ("WHEEL_PYTHON", &installed)];
            wheel::tests(workspace, &python, &[], &["wheel_tests"], &environment)
        }
        Err(error) => Err(error).into(),
    }
}

/// Builds the wheel below the target folder. It shares the build of the workspace but for the
/// extension itself.
pub(crate) fn build(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    let python = python::environment(workspace, "maturin", MATURIN)?;
    let name = match profile {
        Profile::Dev => "dev",
        Profile::Release => "release",
    };
    let folder = workspace.target.join(profile.folder()).join("wheels");
    remove(&folder)?;
    let mut maturin = Command::new(python);
    maturin.args(["-m", "maturin", "build", "--locked", "--profile", name, "--out"]).arg(&folder);
    without_package(&mut maturin);
    succeed(maturin.current_dir(workspace.root.join("bindings/python")))?;
    only_file(&folder)
}

/// A fresh virtual environment with these wheels. pip asks no index. `python` is an interpreter
/// that has pip; the environment has none. Its interpreter.
pub(crate) fn install(python: &Path, environment: &Path, wheels: &[PathBuf]) -> anyhow::Result<PathBuf> {
    remove(environment)?;
    succeed(Command::new(python).args(["-m", "venv", "--without-pip"]).arg(environment))?;
    let interpreter = environment.join("bin").join("python");
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "--python"]).arg(&interpreter);
    pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-index"]).args(wheels);
    succeed(&mut pip)?;
    Ok(interpreter)
}

/// The one file of a folder.
pub(crate) fn only_file(folder: &Path) -> anyhow::Result<PathBuf> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    let files = entries.map(|entry| anyhow::Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    let [file] = files.as_slice() else {
        bail!("{} has {} files, not one", folder.display(), files.len());
    };
    Ok(file.clone())
}

/// Removes a folder that may be there.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_one_file_has_it() {
        let folder = std::env::temp_dir().join(format!("xtask-installed-{}", std::process::id()));
        remove(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        assert!(only_file(&folder).unwrap_err().to_string().contains("0 files"));
        std::fs::write(folder.join("a.whl"), "").unwrap();
        assert_eq!(only_file(&folder).unwrap(), folder.join("a.whl"));
        std::fs::write(folder.join("b.whl"), "").unwrap();
        assert!(only_file(&folder).unwrap_err().to_string().contains("2 files"));
        remove(&folder).unwrap();
        remove(&folder).unwrap();
        assert!(!folder.exists());
    }
}
