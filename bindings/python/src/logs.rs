//! The ring of log records: kvbm's threads write to it, Python drains it.
//!
//! A thread of kvbm never takes the GIL: a destructor may hold it while it waits for that very
//! thread.

use kvbm::plan::deadline_after;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Records that wait for Python, at most.
const CAPACITY: usize = 4096;

/// Bytes of one message, at most; the rest is cut.
const MAX_MESSAGE: usize = 4096;

/// `(level, target, message)`, the level as Python's `logging` numbers it.
type LogRecord = (u8, String, String);

#[derive(Default)]
struct Waiting {
    records: VecDeque<LogRecord>,
    /// Records that were dropped because nobody drained.
    dropped: u64,
}

static WAITING: LazyLock<Mutex<Waiting>> = LazyLock::new(Mutex::default);
static ARRIVED: Condvar = Condvar::new();

/// The lowest level that is kept: 10 debug, 20 info, 30 warning, 40 error.
static LEVEL: AtomicU8 = AtomicU8::new(20);

static NEXT_SPAN: AtomicU64 = AtomicU64::new(1);

fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

struct Ring;

impl Subscriber for Ring {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        number(*metadata.level()) >= LEVEL.load(Ordering::Relaxed)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(NEXT_SPAN.fetch_add(1, Ordering::Relaxed).max(1))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        let record = (number(*metadata.level()), metadata.target().to_owned(), line.text());
        let mut waiting = WAITING.lock();
        if waiting.records.len() == CAPACITY {
            waiting.records.pop_front();
            waiting.dropped += 1;
        }
        waiting.records.push_back(record);
        drop(waiting);
        ARRIVED.notify_one();
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message first, then `key=value` for each field.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Line {
    fn text(self) -> String {
        let mut text = self.message;
        text.push_str(&self.fields);
        if text.len() > MAX_MESSAGE {
            let mut end = MAX_MESSAGE;
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            text.truncate(end);
        }
        text
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Makes the ring the process's subscriber, unless there is one. Starts no thread.
pub(crate) fn install() {
    // A second import in another interpreter finds the first one's: they share the ring.
    let _ = tracing::subscriber::set_global_default(Ring);
}

/// Takes the waiting records: `[(level, target, message)]`, and how many were dropped since the
/// last call.
#[pyfunction]
pub(crate) fn drain_logs() -> (Vec<LogRecord>, u64) {
    let mut waiting = WAITING.lock();
    let dropped = std::mem::take(&mut waiting.dropped);
    (waiting.records.drain(..).collect(), dropped)
}

/// Waits until a record is there or `timeout` seconds are over; whether one is there. Releases the
/// GIL.
#[pyfunction]
pub(crate) fn wait_logs(py: Python<'_>, timeout: f64) -> bool {
    let timeout =
        Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO).min(Duration::from_secs(3600));
    py.detach(|| {
        let deadline = deadline_after(Instant::now(), timeout);
        let mut waiting = WAITING.lock();
        while waiting.records.is_empty() {
            if ARRIVED.wait_until(&mut waiting, deadline).timed_out() {
                break;
            }
        }
        !waiting.records.is_empty()
    })
}

/// Sets the lowest level that is kept, as `logging` numbers levels.
#[pyfunction]
pub(crate) fn set_log_level(level: u8) {
    LEVEL.store(level, Ordering::Relaxed);
    tracing::callsite::rebuild_interest_cache();
}
