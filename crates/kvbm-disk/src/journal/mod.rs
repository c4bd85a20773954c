//! The journal: an append-only log of what slots hold. Its bytes are drawn in `docs/formats.md`.

mod format;

pub(crate) use format::{
    HEADER_BYTES, Header, MAX_GEOMETRY_BYTES, RECORD_BYTES, Record, RecordState, VERSION,
};
