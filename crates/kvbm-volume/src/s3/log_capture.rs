//! Captures log lines, for tests.

use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

/// Lines, one an event: its fields.
#[derive(Default)]
struct Ear(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.extend([field.name(), "=", &format!("{value:?}"), " "]);
    }
}

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target() == "kvbm"
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().push(line.0);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// What this thread logs during `work`.
pub(super) fn captured_lines(work: impl FnOnce()) -> Vec<String> {
    let lines = Arc::<Mutex<Vec<String>>>::default();
    tracing::subscriber::with_default(Ear(Arc::clone(&lines)), work);
    lines.lock().clone()
}
