//! The wire form: `[version u16, body]` in MessagePack, structs as arrays, enums as tagged maps.
//!
//! A newer version may append fields; a decoder refuses a version that it does not know, with both numbers.

use crate::{Command, Message, PlanError, TransferPlan};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version that this crate writes and the only one that it reads.
pub const VERSION: u16 = 1;

/// Largest message in bytes: a full plan or report takes less than half of it.
pub const MAX_BYTES: usize = 4 << 20;

/// What is on the wire around a body.
#[derive(Debug, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// [`VERSION`] of the sender.
    pub version: u16,
    /// The message.
    pub body: T,
}

/// The version alone, read before the body is trusted to have a known shape.
#[derive(Deserialize)]
struct VersionOnly(u16, serde::de::IgnoredAny);

/// Bytes that are not a message of ours.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than any message.
    #[error("message of {len} bytes exceeds {MAX_BYTES}: refused unread")]
    TooLong {
        /// Length received.
        len: usize,
    },
    /// Written by another version.
    #[error(
        "message version {found}, this build reads {VERSION}: run the same kvbm version on leader and workers"
    )]
    Version {
        /// Version found.
        found: u16,
    },
    /// Not MessagePack, or not this shape.
    #[error("malformed message: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// Bytes after the message.
    #[error("{extra} bytes follow the message: refused")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// Well formed, but it breaks a rule.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A list longer than its bound.
    #[error("{what} lists {len} items, more than {max}")]
    TooMany {
        /// Which list.
        what: &'static str,
        /// Items found.
        len: usize,
        /// Items allowed.
        max: usize,
    },
}

/// A message that cannot be written: it breaks a bound that the receiver would refuse.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// Serialization failed.
    #[error("message cannot be encoded: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
    /// A rule is broken.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Encodes a command.
pub fn encode_command(command: &Command) -> Result<Vec<u8>, EncodeError> {
    if let Command::Transfer(plan) = command {
        plan.validate()?;
    }
    encode(command)
}

/// Decodes and checks a command.
pub fn decode_command(bytes: &[u8]) -> Result<Command, DecodeError> {
    let command: Command = decode(bytes)?;
    match &command {
        Command::Transfer(plan) => plan.validate()?,
        Command::Release { blocks, .. } => bound("release", blocks.len(), Command::MAX_RELEASE)?,
        Command::Cancel { .. } | Command::Advance { .. } | Command::Flush { .. } => {}
    }
    Ok(command)
}

/// Encodes a message.
pub fn encode_message(message: &Message) -> Result<Vec<u8>, EncodeError> {
    encode(message)
}

/// Decodes and checks a message.
pub fn decode_message(bytes: &[u8]) -> Result<Message, DecodeError> {
    let message: Message = decode(bytes)?;
    match &message {
        Message::Transfer(report) => bound("report", report.blocks.len(), TransferPlan::MAX_BLOCKS)?,
        Message::Recovered { blocks, .. } => bound("recovered", blocks.len(), Message::MAX_RECOVERED)?,
        Message::Flushed { .. } => {}
    }
    Ok(message)
}

fn bound(what: &'static str, len: usize, max: usize) -> Result<(), DecodeError> {
    if len > max { Err(DecodeError::TooMany { what, len, max }) } else { Ok(()) }
}

fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, EncodeError> {
    Ok(rmp_serde::to_vec(&Envelope { version: VERSION, body })?)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLong { len: bytes.len() });
    }
    let VersionOnly(found, _) = rmp_serde::from_slice(bytes)?;
    if found != VERSION {
        return Err(DecodeError::Version { found });
    }
    let mut rest = bytes;
    let envelope: Envelope<T> = rmp_serde::from_read(&mut rest)?;
    if !rest.is_empty() {
        return Err(DecodeError::Trailing { extra: rest.len() });
    }
    Ok(envelope.body)
}
