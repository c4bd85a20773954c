//! An inference engine beside kvbm: its Python environment is asked what it has of both.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use kvbm::config::Config;
use serde::Deserialize;

use super::{Finding, Status, storage};

/// Engines that kvbm has a connector for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// vLLM.
    Vllm,
    /// `SGLang`.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
}

impl EngineName {
    /// As `kvbm_rs.doctor` calls it.
    const fn key(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Trtllm => "trtllm",
        }
    }
}

/// Names of findings, or what they begin with: nothing stands in for these.
pub(super) const NAMED: [&str; 5] = ["Python (", BINDING, "vLLM", "SGLang", "TensorRT-LLM"];
const BINDING: &str = "kvbm-rs (Python)";

/// Time that Python has to answer: the modules of an engine take a while to import.
const DEADLINE: Duration = Duration::from_secs(300);
/// Most bytes of its answer, and of what it says beside.
const MAX_ANSWER: u64 = 1 << 20;

/// Asks the package. Its arguments are those of `kvbm_rs.doctor.examine`. Engines print while they
/// are imported: that goes to the standard error.
const SCRIPT: &str = "\
import json, os, sys
sys.path[:] = [path for path in sys.path if path]
answer_to = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)
answer = {}
try:
    import kvbm_rs
    answer['binding'] = kvbm_rs.__version__
    from kvbm_rs import doctor
    answer.update(doctor.examine(*sys.argv[1:]))
except Exception as error:
    answer['error'] = f'{type(error).__name__}: {error}'
json.dump(answer, answer_to)
answer_to.close()
";

/// What Python answers.
#[derive(Debug, Default, Deserialize)]
struct Answer {
    /// The version of the package.
    binding: Option<String>,
    /// What went wrong while it was asked.
    error: Option<String>,
    #[serde(default)]
    findings: Vec<PackageFinding>,
    /// The settings that a manager would have, as TOML.
    settings: Option<String>,
}

/// A finding of the package.
#[derive(Debug, Deserialize)]
struct PackageFinding {
    name: String,
    status: Status,
    found: String,
    effect: Option<String>,
    fix: Option<String>,
}

impl From<PackageFinding> for Finding {
    fn from(finding: PackageFinding) -> Self {
        let PackageFinding { name, status, found, effect, fix } = finding;
        Self { name, status, found, effect: effect.map(Into::into), fix }
    }
}

/// What `python` has for `engine`, with the engine's option `kv_transfer_config`.
pub(super) fn examine(engine: EngineName, python: &Path, kv_transfer_config: Option<&str>) -> Vec<Finding> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, engine.key()]).args(kv_transfer_config);
    let name = format!("Python ({})", python.display());
    match ask(command, DEADLINE) {
        Err(error) => {
            let effect = "the engine's packages were not looked at";
            let fix = "give the interpreter of the engine's environment with --python";
            vec![Finding::short(name, Status::Missing, error, effect, fix)]
        }
        Ok(answer) => {
            let mut findings = vec![Finding::ok(name, "answers"), binding(&answer)];
            findings.extend(answer.findings.into_iter().map(Finding::from));
            findings.extend(answer.settings.iter().flat_map(|settings| directories(settings)));
            findings
        }
    }
}

fn binding(answer: &Answer) -> Finding {
    let ours = env!("CARGO_PKG_VERSION");
    let Answer { binding, error, .. } = answer;
    match (binding.as_deref(), error) {
        (Some(version), None) if version == ours => Finding::ok(BINDING, version),
        (Some(version), None) => {
            let effect = "its version is not that of this program";
            let fix = format!("install version {ours} of both");
            Finding::short(BINDING, Status::Limited, version, effect, fix)
        }
        (Some(version), Some(error)) => {
            let effect = "the engine was not looked at";
            let fix = format!("install version {ours} of kvbm-rs, which has kvbm_rs.doctor");
            Finding::short(BINDING, Status::Missing, format!("{version}: {error}"), effect, fix)
        }
        (None, error) => {
            let error = error.clone().unwrap_or_else(|| "not installed".into());
            let effect = "the engine cannot load the connector, and was not looked at";
            Finding::short(BINDING, Status::Missing, error, effect, "pip install ./bindings/python")
        }
    }
}

/// The directories of the settings that a manager would have. One that is made by the manager is
/// looked at in the directory above.
fn directories(settings: &str) -> Vec<Finding> {
    let Ok(config) = Config::from_toml(settings, "the connector's settings") else { return Vec::new() };
    let dirs = config.disk.dir.iter().chain(config.disk.more_dirs.as_slice());
    let there = dirs.map(|dir| dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(dir));
    there.map(storage::examine).collect()
}

/// Runs the interpreter until `deadline` from now.
fn ask(mut command: Command, deadline: Duration) -> Result<Answer, String> {
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| format!("cannot be started: {error}"))?;
    let deadline = kvbm::plan::deadline_after(Instant::now(), deadline);
    let (answer, errors) = (read(child.stdout.take()), read(child.stderr.take()));
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
                    Ok(_) => "did not answer in time: it was ended".to_owned(),
                });
            }
        }
    };
    // A process that it has left behind may keep the pipes open.
    let text = |pipe: mpsc::Receiver<String>| {
        pipe.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap_or_default()
    };
    if !status.success() {
        return Err(failure(status, &text(errors)));
    }
    let answer = text(answer);
    serde_json::from_str(&answer).map_err(|error| format!("its answer is not understood: {error}"))
}

/// Why it failed: the last line on its standard error.
fn failure(status: ExitStatus, errors: &str) -> String {
    let last = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it printed no error");
    format!("failed ({status}): {}", last.trim())
}

/// Reads a pipe to its end, so that nobody waits to write there; the first bytes of it are kept.
fn read(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let Some(mut pipe) = pipe else { return };
        let mut text = Vec::new();
        // What was read before an error is what there is.
        let _ = pipe.by_ref().take(MAX_ANSWER).read_to_end(&mut text);
        let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        // Nobody may wait for it any more.
        let _ = send.send(String::from_utf8_lossy(&text).into_owned());
    });
    receive
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in place of Python.
    fn python(folder: &Path, script: &str) -> std::path::PathBuf {
        let path = folder.join("python");
        // By another process: a descriptor of this one that is open for writing may be inherited by
        // what another test starts, and then the script cannot be started.
        let mut writes = Command::new("sh");
        writes.args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#, "sh", script]);
        assert!(writes.arg(&path).status().unwrap().success());
        path
    }

    fn findings(script: &str) -> Vec<Finding> {
        let folder = tempfile::tempdir().unwrap();
        let findings = examine(EngineName::Vllm, &python(folder.path(), script), Some("{}"));
        for finding in &findings {
            let short = finding.status != Status::Ok;
            assert_eq!((finding.effect.is_some(), finding.fix.is_some()), (short, short), "{finding:?}");
        }
        findings
    }

    #[test]
    fn what_the_package_says_is_shown() {
        let disk = tempfile::tempdir().unwrap();
        let ours = env!("CARGO_PKG_VERSION");
        let answer = serde_json::json!({
            "binding": ours,
            "findings": [
                {"name": "vLLM", "status": "ok", "found": "0.32.0"},
                {"name": "vLLM plugin", "status": "limited", "found": "f", "effect": "e", "fix": "x"},
            ],
            "settings": format!("[disk]\ndir = \"{}/not/yet\"\ncapacity = 8\n", disk.path().display()),
        });
        let found = findings(&format!("test \"$1 $3 $4\" = '-c vllm {{}}' && printf %s '{answer}'"));
        let shown: Vec<_> = found.iter().map(|finding| (finding.name.as_str(), finding.status)).collect();
        assert_eq!(
            shown[1..4],
            [(BINDING, Status::Ok), ("vLLM", Status::Ok), ("vLLM plugin", Status::Limited)]
        );
        assert_eq!(shown[4].0, "disk");
        assert!(found[4].found.contains(disk.path().to_str().unwrap()), "{:?}", found[4]);
        assert_eq!(std::fs::read_dir(disk.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_package_that_cannot_be_asked_is_a_finding() {
        let status = |answer: &str| {
            let found = findings(&format!("echo '{answer}'"));
            (found.len(), found[1].status, found[1].found.clone())
        };
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(status(r#"{"binding": "9.9"}"#), (2, Status::Limited, "9.9".into()));
        let old = format!(r#"{{"binding": "{ours}", "error": "ImportError: no doctor"}}"#);
        assert_eq!(status(&old), (2, Status::Missing, format!("{ours}: ImportError: no doctor")));
        let none = r#"{"error": "ModuleNotFoundError: No module named kvbm_rs"}"#;
        assert_eq!(status(none).1, Status::Missing);
        assert!(status(none).2.contains("kvbm_rs"));
    }

    #[test]
    fn an_interpreter_that_fails_is_a_finding() {
        for (script, text) in [
            ("echo first >&2; echo 'no such library' >&2; exit 3", "no such library"),
            ("exit 3", "it printed no error"),
            ("echo hello", "not understood"),
        ] {
            let found = findings(script);
            assert_eq!((found.len(), found[0].status), (1, Status::Missing), "{found:?}");
            assert!(found[0].found.contains(text), "{found:?}");
        }
        let found = examine(EngineName::Sglang, Path::new("/no/such/python"), None);
        assert_eq!((found.len(), found[0].status), (1, Status::Missing), "{found:?}");
    }

    #[test]
    fn an_interpreter_that_hangs_or_floods_is_ended_or_read() {
        let folder = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let hangs = ask(Command::new(python(folder.path(), "exec sleep 600")), Duration::from_millis(50));
        assert!(hangs.unwrap_err().contains("in time") && began.elapsed() < Duration::from_secs(300));
        let floods = "head -c 3000000 /dev/zero >&2; echo '{}'";
        let answer = ask(Command::new(python(folder.path(), floods)), Duration::from_secs(300)).unwrap();
        assert!(answer.binding.is_none() && answer.findings.is_empty());
    }

    #[test]
    fn the_engines_have_the_names_that_the_package_knows() {
        let package = include_str!("../../../../bindings/python/python/kvbm_rs/doctor.py");
        for engine in EngineName::value_variants() {
            assert!(package.contains(&format!("    \"{}\": _", engine.key())), "{engine:?}");
        }
    }
}
