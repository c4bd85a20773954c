//! The wire form: `[version u16, body]` in MessagePack, structs as arrays, enums as tagged maps.
//!
//! A newer version may append fields; a decoder refuses a version that it does not know, with both
//! numbers. A message is written in the oldest version that has all of its fields.
//!
//! | version | what it added |
//! |---|---|
//! | 3 | - |
//! | 4 | [`TransferPlan::tag`] |
//! | 5 | [`TransferPlan::compare`] |
//! | 6 | [`Message::Keys`] |

use crate::{
    BlockOutcome, Command, Failure, FlushOutcome, Message, PlanError, TransferPlan, VolumeAnswer,
    VolumePlace, VolumeRequest,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Oldest version that this crate reads, and the one of all messages without newer fields.
pub const VERSION: u16 = 3;

/// Newest version that this crate writes and reads.
pub const NEWEST: u16 = 6;

/// Largest message in bytes: a full plan takes less than half of it, a report of nothing but
/// failures two thirds.
pub const MAX_BYTES: usize = 4 << 20;

/// What is on the wire around a body.
#[derive(Debug, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// [`VERSION`] to [`NEWEST`] of the sender.
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
        "message version {found}, this build reads {VERSION} to {NEWEST}: run the same kvbm version on leader and workers"
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
    /// A list or text longer than its bound.
    #[error("{what}: {len}, at most {max} are allowed")]
    TooMany {
        /// Items of what, or bytes of which text.
        what: &'static str,
        /// How many there are.
        len: usize,
        /// How many are allowed.
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
    /// A list or text longer than its bound.
    #[error("{what}: {len}, at most {max} are allowed: send it in parts")]
    TooMany {
        /// Items of what, or bytes of which text.
        what: &'static str,
        /// How many there are.
        len: usize,
        /// How many are allowed.
        max: usize,
    },
}

/// Encodes a command.
pub fn encode_command(command: &Command) -> Result<Vec<u8>, EncodeError> {
    if let Command::Transfer(plan) = command {
        plan.validate()?;
    }
    check_command(command)?;
    let version = match command {
        Command::Transfer(plan) if plan.compare.is_some() => 5,
        Command::Transfer(plan) if plan.tag != 0 => 4,
        _ => VERSION,
    };
    encode(command, version)
}

/// Decodes and checks a command.
pub fn decode_command(bytes: &[u8]) -> Result<Command, DecodeError> {
    let command: Command = decode(bytes)?;
    if let Command::Transfer(plan) = &command {
        plan.validate()?;
    }
    check_command(&command)?;
    Ok(command)
}

/// Encodes a message.
pub fn encode_message(message: &Message) -> Result<Vec<u8>, EncodeError> {
    check_message(message)?;
    let version = if matches!(message, Message::Keys { .. }) { 6 } else { VERSION };
    encode(message, version)
}

/// Decodes and checks a message.
pub fn decode_message(bytes: &[u8]) -> Result<Message, DecodeError> {
    let message: Message = decode(bytes)?;
    check_message(&message)?;
    Ok(message)
}

/// What is too long: the same for who writes and who reads.
struct Excess {
    what: &'static str,
    len: usize,
    max: usize,
}

impl From<Excess> for EncodeError {
    fn from(Excess { what, len, max }: Excess) -> Self {
        Self::TooMany { what, len, max }
    }
}

impl From<Excess> for DecodeError {
    fn from(Excess { what, len, max }: Excess) -> Self {
        Self::TooMany { what, len, max }
    }
}

fn check_command(command: &Command) -> Result<(), Excess> {
    match command {
        Command::Release { blocks, .. } => bound("released blocks", blocks.len(), Command::MAX_RELEASE),
        Command::Volume {
            request:
                VolumeRequest::Probe(blocks)
                | VolumeRequest::Discard(blocks)
                | VolumeRequest::DiscardDamaged(blocks),
            ..
        } => bound("blocks of a volume's request", blocks.len(), Command::MAX_VOLUME_BLOCKS),
        Command::Volume { request: VolumeRequest::Register(place), .. } => {
            bound("bytes of a volume's URI", place.uri.len(), VolumePlace::MAX_URI)
        }
        Command::Volume {
            request: VolumeRequest::Purge(_) | VolumeRequest::List(_) | VolumeRequest::Unregister,
            ..
        }
        | Command::Transfer(_)
        | Command::Cancel { .. }
        | Command::Advance { .. }
        | Command::Forget { .. }
        | Command::Flush { .. } => Ok(()),
    }
}

fn check_message(message: &Message) -> Result<(), Excess> {
    match message {
        Message::Transfer(report) => {
            bound("reported blocks", report.blocks.len(), TransferPlan::MAX_BLOCKS)?;
            report.blocks.iter().try_for_each(|outcome| match outcome {
                BlockOutcome::Failed(failure) => check_failure(failure),
                BlockOutcome::Done { .. } => Ok(()),
            })
        }
        Message::Recovered { blocks, unusable, .. } => {
            bound("recovered blocks", blocks.len(), Message::MAX_RECOVERED)?;
            bound("unusable slots", unusable.len(), Message::MAX_RECOVERED)
        }
        Message::Flushed { outcome: FlushOutcome::Failed(failure), .. }
        | Message::Damaged { failure, .. } => check_failure(failure),
        Message::Flushed { outcome: FlushOutcome::Durable { .. }, .. } | Message::Ready { .. } => Ok(()),
        Message::Keys { keys, .. } => bound("data keys", keys.len(), Message::MAX_KEYS),
        Message::Volume { answer, .. } => match answer {
            VolumeAnswer::Present(there) => {
                bound("blocks of a volume's answer", there.len(), Command::MAX_VOLUME_BLOCKS)
            }
            VolumeAnswer::Listed(blocks) => {
                bound("blocks of a volume's list", blocks.len(), Command::MAX_VOLUME_BLOCKS)
            }
            VolumeAnswer::Removed(_) | VolumeAnswer::Done => Ok(()),
            VolumeAnswer::Failed(failure) => check_failure(failure),
        },
    }
}

fn check_failure(failure: &Failure) -> Result<(), Excess> {
    bound("bytes of a failure's detail", failure.detail.len(), Failure::MAX_DETAIL)
}

fn bound(what: &'static str, len: usize, max: usize) -> Result<(), Excess> {
    if len > max { Err(Excess { what, len, max }) } else { Ok(()) }
}

fn encode<T: Serialize>(body: &T, version: u16) -> Result<Vec<u8>, EncodeError> {
    Ok(rmp_serde::to_vec(&Envelope { version, body })?)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLong { len: bytes.len() });
    }
    let VersionOnly(found, _) = rmp_serde::from_slice(bytes)?;
    if !(VERSION..=NEWEST).contains(&found) {
        return Err(DecodeError::Version { found });
    }
    let mut rest = bytes;
    let envelope: Envelope<T> = rmp_serde::from_read(&mut rest)?;
    if !rest.is_empty() {
        return Err(DecodeError::Trailing { extra: rest.len() });
    }
    Ok(envelope.body)
}
