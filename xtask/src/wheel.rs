//! The Python package: its tests, and its wheel.

use crate::gpu::driver;
use crate::python;
use crate::steps::{Outcome, side_by_side};
use crate::workspace::{Profile, Workspace, compile, line_of, succeed, without_package};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the tests need beside the package.
pub(crate) const TEST_PACKAGES: &[&str] = &["pytest==9.2.0", "mypy==2.4.1", "numpy==2.2.6", "ruff==0.17.6"];

/// What builds wheels. `ziglang` links against an old glibc, so that one wheel runs on all of
/// manylinux.
const BUILD_PACKAGES: &[&str] = &["maturin==1.16.0", "ziglang==0.16.0"];

/// The step `python`: type checks and tests of the package, over the extension of the workspace's
/// own build.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    match prepared(workspace) {
        Ok((python, package)) => {
            let checks = || stubs(workspace, &python, &package).and(types(workspace, &python));
            let tests = || tests(workspace, &python, std::slice::from_ref(&package), &["tests"], &[]);
            // Tests wait much of their time.
            let parts: [&(dyn Fn() -> Outcome + Sync); 2] = [&tests, &checks];
            side_by_side(&parts, |part| part())
        }
        Err(error) => Err(error).into(),
    }
}

fn prepared(workspace: &Workspace) -> anyhow::Result<(PathBuf, PathBuf)> {
    let package = assemble(workspace, Profile::Dev)?;
    Ok((python::environment(workspace, "binding", TEST_PACKAGES)?, package))
}

/// Builds the extension and lays it beside the Python sources, below the target folder. The folder
/// that holds the package.
pub(crate) fn assemble(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    let built = compile(workspace, profile, &["--lib"])?;
    let folder = built.join("python");
    let package = folder.join("kvbm_rs");
    if package.exists() {
        std::fs::remove_dir_all(&package).context("the old package cannot be removed")?;
    }
    copy(&workspace.root.join("bindings/python/python/kvbm_rs"), &package)?;
    let extension = built.join("libkvbm_python.so");
    std::fs::copy(&extension, package.join("_core.abi3.so"))
        .with_context(|| format!("{} cannot be copied", extension.display()))?;
    Ok(folder)
}

/// Copies a folder of sources.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("{} cannot be made", to.display()))?;
    for entry in std::fs::read_dir(from).with_context(|| format!("{} cannot be read", from.display()))? {
        let path = entry?.path();
        let (Some(name), extension) = (path.file_name(), path.extension().unwrap_or_default()) else {
            continue;
        };
        if path.is_dir() && name != "__pycache__" {
            copy(&path, &to.join(name))?;
        } else if extension == "py" || extension == "pyi" || extension == "typed" {
            std::fs::copy(&path, to.join(name))
                .with_context(|| format!("{} cannot be copied", path.display()))?;
        }
    }
    Ok(())
}

/// Types, lints and formatting.
fn types(workspace: &Workspace, python: &Path) -> Outcome {
    let module = |arguments: &[&str]| {
        let mut command = Command::new(python);
        command.arg("-m").args(arguments).current_dir(workspace.root.join("bindings/python"));
        Outcome::from(succeed(&mut command))
    };
    module(&["mypy"]).and(module(&["ruff", "check"])).and(module(&["ruff", "format", "--check"]))
}

/// Compares the stubs of the extension with the extension.
fn stubs(workspace: &Workspace, python: &Path, package: &Path) -> Outcome {
    let mut command = Command::new(python);
    command.args(["-m", "mypy.stubtest", "kvbm_rs._core", "--allowlist", "stubtest-allowed.txt"]);
    command.current_dir(workspace.root.join("bindings/python"));
    Outcome::from(succeed(command.env("PYTHONPATH", package).env("PYTHONDONTWRITEBYTECODE", "1")))
}

/// Runs the Python tests of folders and files, with the packages in `path` and more variables.
pub(crate) fn tests(
    workspace: &Workspace,
    python: &Path,
    path: &[PathBuf],
    tests: &[&str],
    environment: &[(&str, &Path)],
) -> Outcome {
    let path = match std::env::join_paths(path) {
        Ok(path) => path,
        Err(error) => return Err(anyhow::Error::from(error)).into(),
    };
    let mut pytest = Command::new(python);
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).args(tests);
    pytest.current_dir(workspace.root.join("bindings/python")).env("PYTHONPATH", path);
    pytest.env("PYTHONDONTWRITEBYTECODE", "1").envs(environment.iter().copied());
    match driver(workspace) {
        Ok(driver) => drop(pytest.env("KVBM_CUDA_DRIVER", driver)),
        // Without it the tests of device memory skip themselves.
        Err(error) => return Err(error.context("cannot build the CUDA driver for tests")).into(),
    }
    let line = line_of(&pytest);
    let output = match pytest.output() {
        Ok(output) => output,
        Err(error) => return Err(anyhow::anyhow!("cannot start {line}: {error}")).into(),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    let (passed, failed) = counts(&text);
    if output.status.success() && passed > 0 {
        return Outcome::Passed { tests: passed };
    }
    let failures = failures(&text);
    Outcome::Failed { why: format!("`{line}` ended with {}{failures}", output.status), tests: passed, failed }
}

/// The lines of pytest's summary that name a failed test and its error, each on a line of its own.
fn failures(text: &str) -> String {
    let is_failure = |line: &&str| line.starts_with("FAILED ") || line.starts_with("ERROR ");
    text.lines().filter(is_failure).flat_map(|line| ["\n  ", line]).collect()
}

/// Passed and failed of a last line like `1 failed, 44 passed in 1.23s`.
fn counts(text: &str) -> (u64, u64) {
    let last = text.lines().rev().find(|line| line.contains(" in ")).unwrap_or_default();
    let words: Vec<&str> = last.split_whitespace().collect();
    let before = |label: &str| {
        let at = words.iter().position(|word| word.trim_end_matches(',') == label)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    (before("passed").unwrap_or(0), before("failed").unwrap_or(0) + before("errors").unwrap_or(0))
}

/// Runs `tests/stress.py`, which reads the arguments, over a release build.
pub(crate) fn stress(workspace: &Workspace, arguments: &[String]) -> anyhow::Result<()> {
    let package = assemble(workspace, Profile::Release)?;
    let python = python::environment(workspace, "binding", TEST_PACKAGES)?;
    let mut stress = Command::new(python);
    stress.arg(workspace.root.join("bindings/python/tests/stress.py")).args(arguments);
    stress.env("PYTHONPATH", package).env("PYTHONDONTWRITEBYTECODE", "1");
    succeed(&mut stress)
}

/// Builds the manylinux wheel into `target/wheels`.
pub(crate) fn build(workspace: &Workspace) -> anyhow::Result<()> {
    let python = python::environment(workspace, "wheel", BUILD_PACKAGES)?;
    let mut maturin = Command::new(&python);
    maturin.args(["-m", "maturin", "build", "--release", "--zig", "--compatibility", "manylinux_2_28"]);
    maturin.args(["--out"]).arg(workspace.target.join("wheels"));
    // maturin starts the zig of the first `python3` on the path.
    let tools = python.parent().map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(tools.into_iter().chain(std::env::split_paths(&path)));
    maturin.env("PATH", path.context("PATH cannot be extended")?);
    without_package(&mut maturin);
    succeed(maturin.current_dir(workspace.root.join("bindings/python")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_pytest_are_counted() {
        assert_eq!(counts("....\n45 passed in 1.01s\n"), (45, 0));
        assert_eq!(counts("x\n2 failed, 43 passed, 1 warning in 1.28s\n"), (43, 2));
        assert_eq!(counts("1 passed, 3 errors in 0.1s"), (1, 3));
        assert_eq!(counts("no tests ran"), (0, 0));
    }

    #[test]
    fn failed_tests_of_pytest_are_named() {
        let text = "..F\nE   assert 0\nFAILED t.py::a - assert 0\nERROR t.py::b\n1 failed, 1 error in 1s\n";
        assert_eq!(failures(text), "\n  FAILED t.py::a - assert 0\n  ERROR t.py::b");
        assert_eq!(failures("45 passed in 1.01s\n"), "");
    }
}
