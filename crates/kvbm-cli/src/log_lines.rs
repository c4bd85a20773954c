//! The log of a command that runs for long: lines on standard error.

use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::note::note;

/// Writes events of the level and above, each as one line.
struct LogLines;

/// The levels, the most important one first.
const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];

/// The lowest level that is written, as its place in [`LEVELS`]: `INFO`.
static LOWEST: AtomicUsize = AtomicUsize::new(2);

/// The lowest level that is written.
pub(crate) fn level() -> Level {
    LEVELS[LOWEST.load(Ordering::Relaxed).min(LEVELS.len() - 1)]
}

/// From now on, events of `level` and above are written.
pub(crate) fn set_level(level: Level) {
    let place = LEVELS.iter().position(|known| *known == level).unwrap_or(2);
    LOWEST.store(place, Ordering::Relaxed);
}

/// The text of an event: its message, then its fields.
#[derive(Default)]
struct LineText {
    message: String,
    fields: String,
}

/// From now on the log is written, unless the process has one already.
pub(crate) fn install() {
    // A process that has a log keeps it.
    let _kept = tracing::subscriber::set_global_default(LogLines);
}

impl Visit for LineText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Subscriber for LogLines {
    /// The level may change, so no answer is kept.
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if metadata.is_event() { Interest::sometimes() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= level()
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = LineText::default();
        event.record(&mut text);
        let (level, LineText { message, fields }) = (event.metadata().level(), text);
        // One event, one line: an error of a peer does not forge another.
        note(&format!("{level} {message}{fields}").replace(['\n', '\r'], " "));
    }

    // Spans are not written.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
