//! What a report says, and how it looks.

use std::fmt::Write as _;

use serde::Serialize;

use crate::events::joining::conflicting_epochs;
use crate::human::count;
use crate::table::Table;

/// One report: the last interval, and sums since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Report {
    /// Events per second in the interval.
    pub events_per_s: f64,
    /// Bytes per second in the interval.
    pub bytes_per_s: f64,
    /// Batches with events per second in the interval.
    pub batches_per_s: f64,
    /// Events since the start.
    pub events: u64,
    /// Times that events were missing, since the start.
    pub gaps: u64,
    /// Events that were missing, since the start; of engines messages, whose events nobody can
    /// count.
    pub missing: u64,
    /// Events, of engines messages, that came again, since the start.
    pub duplicates: u64,
    /// Payloads that were no batch, since the start.
    pub malformed: u64,
    /// Batches that this reader was too slow for, since the start.
    pub dropped: u64,
    /// Batches that were ignored since the start because they came of lives that are over; see
    /// [`Source::ignored_epoch`].
    pub stale_batches: u64,
    /// Batches that were ignored since the start because there are too many streams.
    pub untracked_batches: u64,
    /// Batches that wait to be read: how far this reader is behind.
    pub lag_batches: usize,
    /// Longest time in the interval from publishing a batch to reading it, in seconds by both
    /// clocks, where batches say when they were published.
    pub lag_s: Option<f64>,
    /// Who publishes.
    pub sources: Vec<Source>,
}

/// One publisher.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Source {
    /// Its name in events; of an engine its address.
    #[serde(rename = "source")]
    pub name: String,
    /// Its life. Engines have no number for that: times that it started anew while it was followed.
    pub epoch: u64,
    /// A lower life that publishes at the same time and is ignored: two processes have this name.
    pub ignored_epoch: Option<u64>,
    /// Events per second in the interval.
    pub events_per_s: f64,
    /// Blocks stored since the start.
    pub stores: u64,
    /// Blocks removed since the start.
    pub removes: u64,
    /// Events that were missing, since the start; of an engine messages.
    pub missing: u64,
    /// Number that it was joined at in this life, 0 for its beginning: what came before is not
    /// missing. Of several streams of a source, each with numbers of its own, that of the first,
    /// which is its pool's.
    pub joined_at: u64,
    /// Number of its next event, of the same stream; of an engine of its next message.
    pub next_sequence: u64,
    /// Seconds since it was last heard of; a heartbeat comes every second unless configured
    /// otherwise. Engines have none.
    pub silent_s: f64,
    /// As in the sum.
    pub lag_s: Option<f64>,
}

/// For people.
pub(super) fn render(report: &Report) -> String {
    let mut text = format!(
        "{} events/s, {} batches/s, {}/s; in all {} events, {} missing in {} gaps, {} repeated; {} batches behind\n",
        count(report.events_per_s as u64),
        count(report.batches_per_s as u64),
        crate::human::bytes(report.bytes_per_s as u64),
        count(report.events),
        count(report.missing),
        count(report.gaps),
        count(report.duplicates),
        count(report.lag_batches as u64),
    );
    if let Some(lag) = report.lag_s {
        text.truncate(text.trim_end().len());
        // Writing to a string cannot fail.
        let _ = writeln!(text, ", {:.1} ms old at most", 1000.0 * lag);
    }
    if report.malformed + report.dropped > 0 {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {} payloads were not valid batches, {} were dropped by a full queue",
            report.malformed, report.dropped
        );
    }
    if report.stale_batches + report.untracked_batches > 0 {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {} batches of older epochs, {} of too many streams",
            report.stale_batches, report.untracked_batches
        );
    }
    for source in &report.sources {
        if let Some(ignored) = source.ignored_epoch {
            let line = conflicting_epochs(&source.name, source.epoch, ignored);
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {line}");
        }
    }
    let mut table = Table::new(["source", "events/s", "stored", "removed", "missing", "silent"]);
    for source in &report.sources {
        table.row([
            source.name.clone(),
            count(source.events_per_s as u64),
            count(source.stores),
            count(source.removes),
            count(source.missing),
            format!("{:.1} s", source.silent_s),
        ]);
    }
    if !report.sources.is_empty() {
        text += &table.render();
    }
    text
}
