//! Running named steps one after the other, with times and a summary.

use std::time::{Duration, Instant};

/// How a step ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All right; for steps that run tests, how many.
    Passed { tests: u64 },
    /// Not run, and why. Only for what the machine lacks, never for what is broken.
    Skipped(String),
    /// Broken, and how; for steps that run tests, how many passed and failed.
    Failed { why: String, tests: u64, failed: u64 },
}

impl From<anyhow::Result<()>> for Outcome {
    fn from(result: anyhow::Result<()>) -> Self {
        match result {
            Ok(()) => Self::Passed { tests: 0 },
            Err(error) => Self::Failed { why: format!("{error:#}"), tests: 0, failed: 0 },
        }
    }
}

/// Steps that have ended.
#[derive(Default)]
pub(crate) struct Report {
    ended: Vec<(&'static str, Outcome, Duration)>,
}

impl Report {
    /// Runs a step and notes how it ended.
    pub(crate) fn run(&mut self, name: &'static str, about: &str, step: impl FnOnce() -> Outcome) {
        println!("==> {name}: {about}");
        let start = Instant::now();
        let outcome = step();
        let took = start.elapsed();
        match &outcome {
            Outcome::Passed { .. } => println!("<== {name}: ok ({:.1} s)\n", took.as_secs_f64()),
            Outcome::Skipped(why) => println!("<== {name}: SKIPPED: {why}\n"),
            Outcome::Failed { why, .. } => {
                println!("<== {name}: FAILED ({:.1} s)\n{why}\n", took.as_secs_f64());
            }
        }
        self.ended.push((name, outcome, took));
    }

    /// Whether nothing failed.
    pub(crate) fn is_ok(&self) -> bool {
        !self.ended.iter().any(|(_, outcome, _)| matches!(outcome, Outcome::Failed { .. }))
    }

    /// A table of the steps and, as the last line, the counts: each test is one check, and so is each step without
    /// tests.
    pub(crate) fn summary(&self) -> String {
        let mut lines = Vec::new();
        let (mut passed, mut failed, mut skipped) = (0, 0, Vec::new());
        for (name, outcome, took) in &self.ended {
            let word = match outcome {
                Outcome::Passed { tests } => {
                    passed += (*tests).max(1);
                    if *tests > 0 { format!("ok, {tests} tests") } else { "ok".to_owned() }
                }
                Outcome::Skipped(why) => {
                    skipped.push(*name);
                    format!("SKIPPED: {why}")
                }
                Outcome::Failed { tests, failed: broken, .. } => {
                    passed += tests;
                    failed += (*broken).max(1);
                    "FAILED".to_owned()
                }
            };
            lines.push(format!("{name:<14} {:>7.1} s  {word}", took.as_secs_f64()));
        }
        let note =
            if skipped.is_empty() { String::new() } else { format!(", skipped: {}", skipped.join(", ")) };
        lines.push(String::new());
        lines.push(format!("{passed} passed, {failed} failed{note}"));
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_tests_and_steps() {
        let mut report = Report::default();
        report.run("fmt", "", || Outcome::from(Ok(())));
        report.run("test", "", || Outcome::Passed { tests: 40 });
        assert!(report.is_ok());
        report.run("miri", "", || Outcome::Skipped("no nightly".into()));
        assert!(report.is_ok());
        report.run("doc", "", || Outcome::from(Err(anyhow::anyhow!("broken link"))));
        report.run("doctest", "", || Outcome::Failed { why: "two".into(), tests: 5, failed: 2 });
        assert!(!report.is_ok());
        let summary = report.summary();
        assert_eq!(summary.lines().last(), Some("46 passed, 3 failed, skipped: miri"));
        assert!(summary.contains("SKIPPED: no nightly"), "{summary}");
    }
}
