//! How a batch becomes payloads.

use crate::{EventBatch, wire};

/// Writes batches. What it appends is sent in that order, each payload until the transport has
/// taken it.
pub trait BatchEncoder: Send {
    /// Appends the payloads that say what `batch` says; none where there is nothing to say. Batches
    /// of a stream come in order, a heartbeat is one without events, and a number that was skipped
    /// is a loss.
    fn encode(&mut self, batch: &EventBatch, out: &mut Vec<Vec<u8>>) -> Result<(), wire::EncodeError>;

    /// The transport will never take `payload`: what is to be sent instead, before all that follows
    /// it.
    fn refused(&mut self, payload: &[u8]) -> Replacement {
        let _ = payload;
        Replacement::Nothing { events: u64::MAX }
    }

    /// Whether a batch may be encoded again in smaller pieces when a transport refuses it. It may
    /// not if the format remembers what it has published.
    fn is_repeatable(&self) -> bool;
}

/// What is sent instead of a payload that a transport refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// Smaller ones that say the same, in this order.
    Smaller(Vec<Vec<u8>>),
    /// It cannot be said over this transport.
    Nothing {
        /// How many events are not published; at most as many as were encoded.
        events: u64,
    },
}

/// The format of [`wire`].
pub(crate) struct NativeEncoder;

impl BatchEncoder for NativeEncoder {
    fn encode(&mut self, batch: &EventBatch, out: &mut Vec<Vec<u8>>) -> Result<(), wire::EncodeError> {
        out.push(wire::encode(batch)?);
        Ok(())
    }

    fn is_repeatable(&self) -> bool {
        true
    }
}
