//! The journal: an append-only log of what slots hold. Its bytes are drawn in `docs/formats.md`.

mod format;
mod replay;
mod writer;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) use format::{HEADER_BYTES, MAGIC, RECORD_BYTES, RecordError};
pub(crate) use format::{Header, MAX_GEOMETRY_BYTES, Record, RecordState};
pub(crate) use replay::{ReplayError, Replayed, replay};
pub(crate) use writer::{JOURNAL_FILE, JOURNAL_TEMP_FILE, Journal};
