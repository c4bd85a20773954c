//! How a batch becomes payloads.

use crate::{EventBatch, wire};

/// Writes batches. What it appends is sent in that order, each payload until the transport has taken it.
pub trait Format: Send {
    /// Appends the payloads that say what `batch` says; none where there is nothing to say. Batches of a stream come in
    /// order, a heartbeat is one without events, and a number that was skipped is a loss.
    fn encode(&mut self, batch: &EventBatch, out: &mut Vec<Vec<u8>>) -> Result<(), wire::EncodeError>;

    /// Whether a batch may be encoded again in smaller pieces when a transport refuses it. Not if the format remembers
    /// what it has said.
    fn is_repeatable(&self) -> bool;
}

/// The format of [`wire`].
pub(crate) struct Native;

impl Format for Native {
    fn encode(&mut self, batch: &EventBatch, out: &mut Vec<Vec<u8>>) -> Result<(), wire::EncodeError> {
        out.push(wire::encode(batch)?);
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        true
    }
}
