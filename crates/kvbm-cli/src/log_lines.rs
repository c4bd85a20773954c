//! The log of a command that runs for long: lines on standard error.

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::note::note;

/// Writes events of level `INFO` and above, each as one line.
struct LogLines;

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
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO
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
