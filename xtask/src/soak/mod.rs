//! `cargo xtask soak`: a node daemon and its engines at work for hours, with accidents; what the
//! processes use must stay flat.
//!
//! The work is done by `crates/kvbm-node/examples/node`; this builds it, judges its samples and
//! draws them.

mod report;

use crate::json_report;
use crate::node_programs::NodePrograms;
use crate::workspace::Workspace;
use anyhow::Context;
use report::Trend;
use serde_json::Value;
use std::path::PathBuf;

/// Largest change that is flat, as a share.
const FLAT: f64 = 0.02;

/// How long, with which accidents, and where the reports go.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    hours: f64,
    seed: u64,
    json: Option<PathBuf>,
    html: Option<PathBuf>,
}

impl Options {
    /// Reads `[--hours N] [--seed N] [--json FILE] [--html FILE]`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { hours: 2.0, seed: 1, json: None, html: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("`{name}` of `soak` needs a value"))?;
            let bad = |_| format!("{name} {value}: expected a number");
            match name.as_str() {
                "--hours" => {
                    options.hours =
                        value.parse().map_err(|_| format!("{name} {value}: expected a number"))?;
                }
                "--seed" => options.seed = value.parse().map_err(bad)?,
                "--json" => options.json = Some(value.into()),
                "--html" => options.html = Some(value.into()),
                other => return Err(format!("unknown argument `{other}` of `soak`")),
            }
        }
        // 360 samples need time between them; a week is enough for anybody.
        if !(0.02..=168.0).contains(&options.hours) {
            return Err(format!("--hours {}: expected 0.02 to 168", options.hours));
        }
        Ok(options)
    }
}

/// Runs it; whether nothing was wrong and nothing grew.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let programs = NodePrograms::build(&Workspace::load()?, "soak")?;
    let seconds = (options.hours * 3600.0) as u64;
    println!("soak for {seconds} s, seed {}", options.seed);
    let (ended_well, found) =
        programs.run("soak", &[("--seconds", seconds), ("--seed", options.seed), ("--pause-ms", 2)])?;
    let trends = report::trends(&found["series"]);
    let is_flat = !trends.is_empty() && trends.iter().all(|trend| trend.is_flat(FLAT));
    write(options, &found, &trends)?;
    Ok(ended_well && is_flat)
}

/// Writes both reports, and a line for each thing that was sampled.
fn write(options: &Options, found: &Value, trends: &[Trend]) -> anyhow::Result<()> {
    for trend in trends {
        println!("{}", trend.line(FLAT));
    }
    let mut summary = found.clone();
    summary["trends"] = trends.iter().map(|trend| trend.to_json(FLAT)).collect();
    summary.as_object_mut().map(|object| object.remove("series"));
    json_report::deliver(options.json.as_deref(), &summary)?;
    let Some(file) = &options.html else { return Ok(()) };
    let page = report::page(&summary, trends, FLAT);
    std::fs::write(file, page).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_defaults_and_bounds() {
        let parse =
            |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(parse("").unwrap(), Options { hours: 2.0, seed: 1, json: None, html: None });
        let options = parse("--hours 0.5 --json r.json --seed 9 --html r.html").unwrap();
        assert!((options.hours - 0.5).abs() < 1e-9 && options.seed == 9);
        assert_eq!(options.html, Some("r.html".into()));
        assert!(parse("--hours").unwrap_err().contains("needs a value"));
        assert!(parse("--hours 0").unwrap_err().contains("0.02 to 168"));
        assert!(parse("--hours NaN").unwrap_err().contains("0.02 to 168"));
        assert!(parse("--days 1").unwrap_err().contains("unknown argument"));
    }
}
