//! `kvbm doctor`: what this machine offers, what is missing, and the command that fixes it. Missing
//! parts are no failure: everything optional has a substitute.

mod compression;
mod cuda;
mod encryption;
mod engine;
mod library;
mod machine;
mod signatures;
mod storage;
mod volume;

use std::borrow::Cow;
use std::fmt::Write;

use anyhow::Result;
use kvbm::config::{Config, VolumeConfig};
use serde::{Deserialize, Serialize};

use crate::args::DoctorArgs;
pub use engine::EngineName;

/// How a part was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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
    pub name: String,
    /// How it was found.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What kvbm does without it, or with it as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<Cow<'static, str>>,
    /// The command or setting that improves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), status: Status::Ok, found: found.into(), effect: None, fix: None }
    }

    fn short(
        name: impl Into<String>,
        status: Status,
        found: impl Into<String>,
        effect: impl Into<Cow<'static, str>>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            status,
            found: found.into(),
            effect: Some(effect.into()),
            fix: Some(fix.into()),
        }
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
    let (configuration, config) = configured(args);
    let mut findings: Vec<Finding> = configuration.into_iter().chain(machine::examine()).collect();
    let mut dirs = args.dir.clone().map_or_else(Vec::new, |dir| vec![dir]);
    if dirs.is_empty() {
        dirs.extend(config.disk.dir.iter().chain(config.disk.more_dirs.as_slice()).cloned());
    }
    if dirs.is_empty() {
        dirs.push(".".into());
    }
    findings.extend(dirs.iter().map(|dir| storage::examine(dir)));
    findings.extend(config.volume_descriptors().iter().map(|of| volume::examine(&config, of)));
    findings.extend(cuda::examine());
    findings.extend(library::nixl(config.remote.library.as_deref()));
    let option = args.kv_transfer_config.as_deref();
    let engine = args.engine.map(|engine| engine::examine(engine, &args.python, option));
    findings.extend(engine.into_iter().flatten());
    Report { findings }
}

const CONFIGURATION: &str = "configuration";

/// The configuration that is looked at, and how it was found where a file names one, with what it
/// protects and compresses. Its volumes are joined by those that are named.
fn configured(args: &DoctorArgs) -> (Vec<Finding>, Config) {
    let (findings, mut config) = match args.config.as_deref().map(|path| (path, Config::load(Some(path)))) {
        None => (Vec::new(), Config::default()),
        Some((path, Ok(config))) => {
            let found = Finding::ok(CONFIGURATION, path.display().to_string());
            let protection = [signatures::examine(&config), encryption::examine(&config)];
            let findings = [found].into_iter().chain(protection).chain([compression::examine(&config)]);
            (findings.collect(), config)
        }
        Some((_, Err(error))) => {
            let fix = "mend what is named; docs/config.md has every setting";
            let effect = "no manager starts with it, and its directories and volumes were not looked at";
            let finding = Finding::short(CONFIGURATION, Status::Missing, error.to_string(), effect, fix);
            (vec![finding], Config::default())
        }
    };
    for uri in &args.volume {
        let id = config.volume.iter().map(|volume| volume.id.saturating_add(1)).max().unwrap_or(0);
        config.volume.push(VolumeConfig { uri: uri.clone(), id, ..VolumeConfig::default() });
    }
    (findings, config)
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
            if let Some(effect) = &finding.effect {
                let _ = writeln!(out, "{indent}{effect}");
            }
            if let Some(fix) = &finding.fix {
                let _ = writeln!(out, "{indent}fix: {fix}");
            }
        }
        out += "\nkvbm runs on this machine: every part that is missing has a substitute";
        let unusable: Vec<&str> = self.unusable().map(|finding| finding.name.as_str()).collect();
        if !unusable.is_empty() {
            let _ = write!(out, ", but what was named for {} cannot be used", unusable.join(", "));
        }
        out + ".\n"
    }

    /// What was named and nothing stands in for.
    fn unusable(&self) -> impl Iterator<Item = &Finding> {
        let named = |name: &str| {
            let is_of_engine = engine::NAMED.iter().any(|begin| name.starts_with(begin));
            name == CONFIGURATION || name == "disk" || name.starts_with("volume ") || is_of_engine
        };
        self.findings.iter().filter(move |finding| finding.status == Status::Missing && named(&finding.name))
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
        let report = examine(&DoctorArgs { dir: Some(dir.path().to_owned()), ..DoctorArgs::default() });
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
        let report = examine(&DoctorArgs { dir: Some(file), ..DoctorArgs::default() });
        let disk = report.findings.iter().find(|finding| finding.name == "disk").unwrap();
        assert_eq!(disk.status, Status::Missing, "{disk:?}");
    }

    #[test]
    fn what_a_configuration_names_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("kvbm.toml");
        let examine_with = |volumes: &str| {
            let text = format!(
                "[model]\nnum_layers = 2\nnum_kv_heads = 2\nhead_dim = 8\n[namespace]\nmodel = \"m\"\n\
                 [host]\ncapacity = 8\n[disk]\ndir = \"{}\"\ncapacity = 8\n{volumes}",
                dir.path().display()
            );
            std::fs::write(&file, text).unwrap();
            let volume = vec!["memory:".to_owned()];
            examine(&DoctorArgs { config: Some(file.clone()), volume, ..DoctorArgs::default() })
        };
        let status = |report: &Report, name: &str| {
            report.findings.iter().find(|finding| finding.name == name).map(|finding| finding.status)
        };
        let volumes =
            "[[volume]]\nuri = \"dir:///no/such/folder\"\nid = 4\n[[volume]]\nuri = \"memory:\"\nid = 2\n";
        let report = examine_with(volumes);
        for (name, expected) in [
            ("configuration", Some(Status::Ok)),
            ("volume 4", Some(Status::Missing)),
            ("volume 2", Some(Status::Ok)),
            ("volume 5", Some(Status::Ok)),
            ("volume 0", None),
        ] {
            assert_eq!(status(&report, name), expected, "{name}: {report:?}");
        }
        let disk = report.findings.iter().find(|finding| finding.name == "disk").unwrap();
        assert!(disk.found.contains(dir.path().to_str().unwrap()), "{disk:?}");

        let broken = examine_with("[volume]\nuri = \"memory:\"\nalignment = 3\n");
        let finding = &broken.findings[0];
        assert_eq!((finding.name.as_str(), finding.status), ("configuration", Status::Missing));
        assert!(finding.found.contains("volume.alignment = 3"), "{finding:?}");
        let end = "but what was named for configuration cannot be used.\n";
        assert!(broken.render().ends_with(end), "{}", broken.render());
        assert!(report.render().ends_with("but what was named for volume 4 cannot be used.\n"));
    }
}
