//! `kvbm doctor`: what this machine offers, what is missing, and the command that fixes it. Missing parts are no failure: everything
//! optional has a substitute.

mod cuda;
mod library;
mod machine;
mod storage;

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;

use crate::args::DoctorArgs;

/// How a part was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Usable, but slower or smaller than it could be.
    Limited,
    /// Not there.
    Missing,
}

/// One part of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The part.
    pub name: &'static str,
    /// How it was found.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What kvbm does without it, or with it as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<&'static str>,
    /// The command or setting that improves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), effect: None, fix: None }
    }

    fn short(
        name: &'static str,
        status: Status,
        found: impl Into<String>,
        effect: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self { name, status, found: found.into(), effect: Some(effect), fix: Some(fix.into()) }
    }
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Part by part.
    pub findings: Vec<Finding>,
}

/// Looks at everything.
pub fn examine(args: &DoctorArgs) -> Report {
    let mut findings = machine::examine();
    findings.push(storage::examine(&args.dir));
    findings.extend(cuda::examine());
    findings.push(library::nixl());
    Report { findings }
}

impl Report {
    /// As text for people.
    pub fn render(&self) -> String {
        let width = self.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
        let mut out = String::new();
        for finding in &self.findings {
            let mark = match finding.status {
                Status::Ok => "ok     ",
                Status::Limited => "limited",
                Status::Missing => "missing",
            };
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(out, "[{mark}] {:width$}  {}", finding.name, finding.found);
            let indent = " ".repeat(width + 12);
            if let Some(effect) = finding.effect {
                let _ = writeln!(out, "{indent}{effect}");
            }
            if let Some(fix) = &finding.fix {
                let _ = writeln!(out, "{indent}fix: {fix}");
            }
        }
        out += "\nkvbm runs on this machine: every part that is missing has a substitute.\n";
        out
    }

    /// As JSON.
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shortcoming_says_what_it_means_and_what_fixes_it() {
        let dir = tempfile::tempdir().unwrap();
        let report = examine(&DoctorArgs { dir: dir.path().to_owned(), json: None });
        for name in ["CPU", "memory", "memlock limit", "huge pages", "disk", "CUDA", "NIXL"] {
            assert!(report.findings.iter().any(|finding| finding.name == name), "{name}: {report:?}");
        }
        for finding in &report.findings {
            assert!(!finding.found.is_empty(), "{finding:?}");
            let short = finding.status != Status::Ok;
            assert_eq!((finding.effect.is_some(), finding.fix.is_some()), (short, short), "{finding:?}");
        }
        let json: serde_json::Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        assert_eq!(json["findings"].as_array().unwrap().len(), report.findings.len());
        assert!(report.render().contains("kvbm runs on this machine"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_a_finding_not_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        let report = examine(&DoctorArgs { dir: file, json: None });
        let disk = report.findings.iter().find(|finding| finding.name == "disk").unwrap();
        assert_eq!(disk.status, Status::Missing, "{disk:?}");
    }
}
