//! `kvbm events stats`: rates, losses, lag.

#[cfg(feature = "zmq")]
mod engines;
mod kvbm;
mod report;

use ::kvbm::plan::deadline_after;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use super::follow::{self, FollowArgs, Source};
use crate::interrupt;
use crate::note::note;
use crate::number::whole;
use report::{Report, render};

/// Options of `kvbm events stats`.
#[derive(Clone, Debug, Args)]
pub struct StatsArgs {
    /// Whom to follow.
    #[command(flatten)]
    pub follow: FollowArgs,

    /// Seconds between two reports.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u32>(1..=3600))]
    pub interval: u32,

    /// Stop after N reports [default: on Ctrl-C].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u64>(1..=u64::MAX))]
    pub count: Option<u64>,

    /// One JSON value a line.
    #[arg(long)]
    pub json: bool,
}

/// Counts what comes.
trait Counting {
    /// Takes in what comes, waiting at most `wait` for it.
    fn poll(&mut self, wait: Duration) -> Result<()>;

    /// What came since the last report.
    fn report(&mut self, now: Instant) -> Report;
}

/// Prints to `out` until it was asked to stop.
pub(super) fn run(args: &StatsArgs, out: &mut dyn Write) -> Result<()> {
    interrupt::catch();
    let (url, source) = follow::open(&args.follow)?;
    let now = Instant::now();
    let mut counting: Box<dyn Counting> = match source {
        Source::Kvbm(_, receiver) => Box::new(kvbm::Stats::new(receiver, now)),
        #[cfg(feature = "zmq")]
        Source::Engines(engines) => Box::new(engines::Stats::new(engines, now)),
    };
    note(&format!("following {url}"));
    let interval = Duration::from_secs(u64::from(args.interval));
    let mut due = deadline_after(now, interval);
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 && !interrupt::asked() {
        counting.poll(due.saturating_duration_since(Instant::now()).min(follow::TICK))?;
        let now = Instant::now();
        if now >= due {
            let report = counting.report(now);
            if args.json {
                writeln!(out, "{}", serde_json::to_string(&report)?)?;
            } else {
                write!(out, "{}", render(&report))?;
            }
            out.flush()?;
            (due, left) = (deadline_after(now, interval), left - 1);
        }
    }
    Ok(())
}
