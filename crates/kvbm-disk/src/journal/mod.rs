//! The journal: an append-only log of what slots hold. Its bytes are drawn in `docs/formats.md`.

mod replay;
mod writer;

pub(crate) use replay::{ReplayError, Replayed, replay};
pub(crate) use writer::{JOURNAL_FILE, JOURNAL_TEMP_FILE, Journal, write_again};
