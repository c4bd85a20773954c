//! Running named steps one after the other, with times and a summary.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Runs the parts of a step, as many at a time as the machine has processors: for programs that use
/// one each.
pub(crate) fn side_by_side<T: Sync>(parts: &[T], run: impl Fn(&T) -> Outcome + Sync) -> Outcome {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let (waiting, found) = (Mutex::new(parts.iter()), Mutex::new(Outcome::Passed { tests: 0 }));
    let work = || {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = next else { return };
            let outcome = run(part);
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            *found = std::mem::replace(&mut *found, Outcome::Passed { tests: 0 }).and(outcome);
        }
    };
    std::thread::scope(|scope| (0..jobs.min(parts.len())).for_each(|_| drop(scope.spawn(work))));
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

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

impl Outcome {
    /// What it and another part of the same step come to: neither hides what the other found.
    pub(crate) fn and(self, other: Self) -> Self {
        use Outcome::{Failed, Passed, Skipped};
        match (self, other) {
            (Passed { tests: one }, Passed { tests: two }) => Passed { tests: one + two },
            (Skipped(why), Passed { .. }) | (Passed { .. }, Skipped(why)) => Skipped(why),
            (Skipped(one), Skipped(two)) => Skipped(format!("{one}; {two}")),
            (Failed { why, tests, failed }, Passed { tests: more })
            | (Passed { tests: more }, Failed { why, tests, failed }) => {
                Failed { why, tests: tests + more, failed }
            }
            (Failed { why, tests, failed }, Skipped(other))
            | (Skipped(other), Failed { why, tests, failed }) => {
                Failed { why: format!("{why}\nskipped: {other}"), tests, failed }
            }
            (Failed { why, tests, failed }, Failed { why: other, tests: more, failed: others }) => {
                // A part without tests counts as one that failed.
                let failed = failed.max(1) + others.max(1);
                Failed { why: format!("{why}\n{other}"), tests: tests + more, failed }
            }
        }
    }
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
    /// Runs a step and notes how it ended; whether it did not fail.
    pub(crate) fn run(&mut self, name: &'static str, about: &str, step: impl FnOnce() -> Outcome) -> bool {
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
        let is_good = !matches!(outcome, Outcome::Failed { .. });
        self.ended.push((name, outcome, took));
        is_good
    }

    /// Whether nothing failed.
    pub(crate) fn is_ok(&self) -> bool {
        !self.ended.iter().any(|(_, outcome, _)| matches!(outcome, Outcome::Failed { .. }))
    }

    /// A table of the steps, what failed in them, and as the last line the counts: each test is one
    /// check, and so is each step without tests.
    pub(crate) fn summary(&self) -> String {
        let (mut lines, mut reasons) = (Vec::new(), Vec::new());
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
                Outcome::Failed { why, tests, failed: broken } => {
                    reasons.push(String::new());
                    reasons.extend(why.lines().map(|line| format!("{name}: {line}")));
                    passed += tests;
                    failed += (*broken).max(1);
                    "FAILED".to_owned()
                }
            };
            lines.push(format!("{name:<14} {:>7.1} s  {word}", took.as_secs_f64()));
        }
        let note =
            if skipped.is_empty() { String::new() } else { format!(", skipped: {}", skipped.join(", ")) };
        lines.append(&mut reasons);
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
        assert!(report.run("fmt", "", || Outcome::from(Ok(()))));
        report.run("test", "", || Outcome::Passed { tests: 40 });
        assert!(report.is_ok());
        assert!(report.run("miri", "", || Outcome::Skipped("no nightly".into())));
        assert!(report.is_ok());
        assert!(!report.run("doc", "", || Outcome::from(Err(anyhow::anyhow!("broken link")))));
        report.run("doctest", "", || Outcome::Failed { why: "two".into(), tests: 5, failed: 2 });
        assert!(!report.is_ok());
        let summary = report.summary();
        assert_eq!(summary.lines().last(), Some("46 passed, 3 failed, skipped: miri"));
        assert!(summary.contains("SKIPPED: no nightly"), "{summary}");
        assert!(summary.contains("\ndoc: broken link\n\ndoctest: two\n\n"), "{summary}");
    }

    #[test]
    fn parts_side_by_side_all_run_and_add_up() {
        let parts: Vec<u64> = (0..100).collect();
        let run = |part: &u64| match part {
            42 => Outcome::Failed { why: "forty-two".into(), tests: 0, failed: 1 },
            part => Outcome::Passed { tests: *part },
        };
        let tests = parts.iter().sum::<u64>() - 42;
        let failed = Outcome::Failed { why: "forty-two".into(), tests, failed: 1 };
        assert_eq!(side_by_side(&parts, run), failed);
        assert_eq!(side_by_side(&parts[..0], run), Outcome::Passed { tests: 0 });
    }

    #[test]
    fn parts_of_a_step_add_up() {
        let passed = |tests| Outcome::Passed { tests };
        let failed = |why: &str, tests, failed| Outcome::Failed { why: why.into(), tests, failed };
        assert_eq!(passed(3).and(passed(4)), passed(7));
        assert_eq!(passed(3).and(Outcome::Skipped("x".into())), Outcome::Skipped("x".into()));
        assert_eq!(passed(3).and(failed("a", 1, 2)), failed("a", 4, 2));
        assert_eq!(failed("a", 1, 0).and(failed("b", 2, 3)), failed("a\nb", 3, 4));
        assert_eq!(Outcome::Skipped("x".into()).and(failed("a", 1, 1)), failed("a\nskipped: x", 1, 1));
    }
}
