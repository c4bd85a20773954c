//! How far a long command is: a bar on a terminal, now and then a line elsewhere. Always on
//! standard error.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use indicatif::{ProgressBar, ProgressStyle};

use crate::note::note;

/// Lines of a whole command when there is no terminal.
const LINES: u64 = 10;

/// Progress of one command. Shared between threads.
pub struct Progress {
    bar: Option<ProgressBar>,
    what: &'static str,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// Nothing done of `total` steps, which are called `what`.
    pub fn new(what: &'static str, total: u64) -> Self {
        Self::on(what, total, std::io::stderr().is_terminal())
    }

    fn on(what: &'static str, total: u64, terminal: bool) -> Self {
        let style = ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len} ({eta} left)")
            .map(|style| style.progress_chars("=> "));
        let bar = match style {
            Ok(style) if terminal => Some(ProgressBar::new(total).with_style(style).with_message(what)),
            _ => None,
        };
        Self { bar, what, total, done: AtomicU64::new(0) }
    }

    /// `steps` more are done.
    pub fn advance(&self, steps: u64) {
        match &self.bar {
            Some(bar) => bar.inc(steps),
            None => {
                if let Some(line) = self.count(steps) {
                    note(&line);
                }
            }
        }
    }

    /// The line to print after `steps` more, if a tenth was passed.
    fn count(&self, steps: u64) -> Option<String> {
        let before = self.done.fetch_add(steps, Relaxed);
        let now = before + steps;
        let tenth = |n: u64| u128::from(n) * u128::from(LINES) / u128::from(self.total.max(1));
        (tenth(now) > tenth(before)).then(|| format!("{}: {now} of {}", self.what, self.total))
    }

    /// Takes the bar away, so that results can be printed.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_ten_lines_are_enough() {
        let progress = Progress::on("requests", 1003, false);
        let lines: Vec<_> = (0..1003).filter_map(|_| progress.count(1)).collect();
        assert_eq!(lines.len(), 10);
        assert_eq!(lines[9], "requests: 1003 of 1003");
        assert_eq!(Progress::on("x", 0, false).count(0), None);
    }
}
