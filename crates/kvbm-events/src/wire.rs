//! The wire form of a batch, in MessagePack (<https://github.com/msgpack/msgpack/blob/master/spec.md>).
//!
//! ```text
//! batch  = [version, source, epoch, shard, next_sequence, [event, ...]]
//! event  = [sequence, 0 store | 1 remove, extra | nil, namespace, group, hash, parent | nil, position,
//!           prefix_hash, block_bytes, block_tokens, tier 0..3, node, volume | nil]
//!        | [sequence, 2 cleared, extra | nil]
//! extra  = [[key, value], ...]
//! ```
//!
//! Hashes are 16-byte `bin`, the rest are unsigned integers and strings. An event takes about 90
//! bytes. A later minor revision may append elements to a batch or an event: they are skipped. A change of meaning
//! gets a new version, which is refused. Input is untrusted: its length is bounded before anything is read, the
//! number of events and of extra pairs while they are read.

use crate::{EventBatch, EventBlock, EventKind, KvEvent, SourceId, StreamId};
use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, Tier, VolumeId};
use serde::de::{Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::marker::PhantomData;

/// Version that this crate writes and the only one that it reads.
pub const VERSION: u16 = 1;

/// Largest batch in bytes.
pub const MAX_BYTES: usize = 4 << 20;

/// Deepest nesting that is read: what we write is 5 deep.
const MAX_DEPTH: usize = 16;

/// Most bytes that an event without extra metadata takes.
pub const MAX_PLAIN_EVENT_BYTES: usize = 1 + 9 + 1 + 1 + 5 + 3 + 18 + 18 + 5 + 18 + 9 + 5 + 1 + 5 + 5;

/// Most bytes around the events of a batch.
pub const MAX_HEADER_BYTES: usize = 1 + 3 + 9 + 9 + 3 + 9 + 5;

/// Bytes that are not a batch of ours.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Longer than any batch.
    #[error("event batch of {len} bytes exceeds {MAX_BYTES}: refused unread")]
    TooLong {
        /// Length received.
        len: usize,
    },
    /// Written by another version.
    #[error("event batch of version {found}, this build reads {VERSION}: upgrade the older side")]
    Version {
        /// Version found.
        found: u16,
    },
    /// Not MessagePack, or not this shape.
    #[error("malformed event batch: {0}; dropped")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// Numbers that do not increase, or are not below `next_sequence`.
    #[error("event batch of {stream} has its events out of order; dropped")]
    Disordered {
        /// Its stream.
        stream: StreamId,
    },
    /// Bytes after the batch.
    #[error("{extra} bytes follow the event batch; dropped")]
    Trailing {
        /// How many.
        extra: usize,
    },
}

/// A batch that the receiver would refuse, so it is not written.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// Too many events, too many bytes.
    #[error("event batch of {stream} has {found} {what}, at most {max} are allowed: publish smaller batches")]
    TooLarge {
        /// Its stream.
        stream: StreamId,
        /// Events or bytes.
        what: &'static str,
        /// How many.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// Extra metadata beyond its limits.
    #[error(
        "event {sequence}: extra metadata exceeds {} pairs of {} bytes: shorten it",
        KvEvent::MAX_EXTRA,
        KvEvent::MAX_EXTRA_BYTES
    )]
    Extra {
        /// Number of the event.
        sequence: u64,
    },
    /// Numbers that do not increase, or are not below `next_sequence`.
    #[error("event batch of {stream} has its events out of order: the source must hand them out in order")]
    Disordered {
        /// Its stream.
        stream: StreamId,
    },
    /// Serialization failed.
    #[error("event batch cannot be encoded: {0}")]
    Encode(#[from] rmp_serde::encode::Error),
}

/// Most bytes that `event` takes in a batch.
pub fn max_encoded_len(event: &KvEvent) -> usize {
    let extra: usize = event.extra.iter().map(|(key, value)| 1 + 5 + key.len() + 5 + value.len()).sum();
    MAX_PLAIN_EVENT_BYTES + 5 + extra
}

/// Whether `event` keeps the limits of extra metadata.
pub(crate) fn extra_is_bounded(event: &KvEvent) -> bool {
    event.extra.len() <= KvEvent::MAX_EXTRA
        && event.extra.iter().all(|(key, value)| key.len() + value.len() <= KvEvent::MAX_EXTRA_BYTES)
}

/// Encodes a batch.
pub fn encode(batch: &EventBatch) -> Result<Vec<u8>, EncodeError> {
    let stream = batch.stream;
    if !batch.is_ordered() {
        return Err(EncodeError::Disordered { stream });
    }
    let too_large = |what, found, max| Err(EncodeError::TooLarge { stream, what, found, max });
    if batch.events.len() > EventBatch::MAX_EVENTS {
        return too_large("events", batch.events.len(), EventBatch::MAX_EVENTS);
    }
    if let Some(event) = batch.events.iter().find(|event| !extra_is_bounded(event)) {
        return Err(EncodeError::Extra { sequence: event.sequence });
    }
    let mut bytes = Vec::with_capacity(MAX_HEADER_BYTES + batch.events.len() * 96);
    batch.serialize(&mut rmp_serde::Serializer::new(&mut bytes))?;
    if bytes.len() > MAX_BYTES {
        return too_large("bytes", bytes.len(), MAX_BYTES);
    }
    Ok(bytes)
}

/// Decodes and checks a batch.
pub fn decode(bytes: &[u8]) -> Result<EventBatch, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLong { len: bytes.len() });
    }
    let mut decoder = rmp_serde::Deserializer::new(bytes);
    decoder.set_max_depth(MAX_DEPTH);
    let batch = match Versioned::deserialize(&mut decoder)? {
        Versioned::Known(batch) => batch,
        Versioned::Unknown(found) => return Err(DecodeError::Version { found }),
    };
    match decoder.get_ref().len() {
        0 => {}
        extra => return Err(DecodeError::Trailing { extra }),
    }
    if !batch.is_ordered() {
        return Err(DecodeError::Disordered { stream: batch.stream });
    }
    Ok(batch)
}

impl Serialize for EventBatch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(6)?;
        tuple.serialize_element(&VERSION)?;
        tuple.serialize_element(&self.stream.source.0)?;
        tuple.serialize_element(&self.stream.epoch)?;
        tuple.serialize_element(&self.stream.shard)?;
        tuple.serialize_element(&self.next_sequence)?;
        tuple.serialize_element(&self.events)?;
        tuple.end()
    }
}

impl Serialize for KvEvent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (kind, block) = match &self.kind {
            EventKind::Store(block) => (0u8, Some(block)),
            EventKind::Remove(block) => (1, Some(block)),
            EventKind::Cleared => (2, None),
        };
        let mut tuple = serializer.serialize_tuple(if block.is_some() { 14 } else { 3 })?;
        tuple.serialize_element(&self.sequence)?;
        tuple.serialize_element(&kind)?;
        tuple.serialize_element(&(!self.extra.is_empty()).then_some(&self.extra))?;
        if let Some(block) = block {
            tuple.serialize_element(&block.identity.namespace)?;
            tuple.serialize_element(&block.identity.group)?;
            tuple.serialize_element(&block.identity.hash)?;
            tuple.serialize_element(&block.identity.parent)?;
            tuple.serialize_element(&block.identity.position)?;
            tuple.serialize_element(&block.prefix_hash)?;
            tuple.serialize_element(&block.block_bytes)?;
            tuple.serialize_element(&block.block_tokens)?;
            tuple.serialize_element(&(block.location.tier.index() as u8))?;
            tuple.serialize_element(&block.location.node)?;
            tuple.serialize_element(&block.location.volume)?;
        }
        tuple.end()
    }
}

/// The next element of `seq`, or an error that names it.
fn field<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
    seq: &mut A,
    name: &'static str,
) -> Result<T, A::Error> {
    seq.next_element()?.ok_or_else(|| A::Error::missing_field(name))
}

/// Skips what a later revision appended.
fn skip_rest<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<(), A::Error> {
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

/// A batch of our version, or the number of another version, whose shape is not ours to know.
enum Versioned {
    Known(EventBatch),
    Unknown(u16),
}

impl<'de> Deserialize<'de> for Versioned {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BatchVisitor;
        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = Versioned;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event batch")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Versioned, A::Error> {
                let version: u16 = field(&mut seq, "version")?;
                let known = if version == VERSION {
                    Versioned::Known(batch(&mut seq)?)
                } else {
                    Versioned::Unknown(version)
                };
                skip_rest(&mut seq)?;
                Ok(known)
            }
        }
        deserializer.deserialize_seq(BatchVisitor)
    }
}

fn batch<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<EventBatch, A::Error> {
    let source = SourceId(field(seq, "source")?);
    let epoch = Epoch(field(seq, "epoch")?);
    let shard = field(seq, "shard")?;
    let next_sequence = field(seq, "next_sequence")?;
    let Bounded::<KvEvent, { EventBatch::MAX_EVENTS }>(events) = field(seq, "events")?;
    let stream = StreamId { source, epoch, shard };
    Ok(EventBatch { stream, next_sequence, events })
}

impl<'de> Deserialize<'de> for KvEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EventVisitor;
        impl<'de> Visitor<'de> for EventVisitor {
            type Value = KvEvent;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<KvEvent, A::Error> {
                let sequence = field(&mut seq, "sequence")?;
                let kind: u8 = field(&mut seq, "kind")?;
                let extra: Option<Bounded<(String, String), { KvEvent::MAX_EXTRA }>> =
                    field(&mut seq, "extra")?;
                let kind = match kind {
                    0 => EventKind::Store(block(&mut seq)?),
                    1 => EventKind::Remove(block(&mut seq)?),
                    2 => EventKind::Cleared,
                    other => return Err(A::Error::custom(format_args!("unknown kind of event: {other}"))),
                };
                skip_rest(&mut seq)?;
                let event = KvEvent { sequence, kind, extra: extra.map(|extra| extra.0).unwrap_or_default() };
                if !extra_is_bounded(&event) {
                    return Err(A::Error::custom(format_args!(
                        "extra metadata of event {sequence} is too long"
                    )));
                }
                Ok(event)
            }
        }
        deserializer.deserialize_seq(EventVisitor)
    }
}

fn block<'de, A: SeqAccess<'de>>(seq: &mut A) -> Result<EventBlock, A::Error> {
    let identity = BlockIdentity {
        namespace: NamespaceId(field(seq, "namespace")?),
        group: GroupId(field(seq, "group")?),
        hash: field(seq, "hash")?,
        parent: field(seq, "parent")?,
        position: field(seq, "position")?,
    };
    let prefix_hash = field(seq, "prefix_hash")?;
    let block_bytes = field(seq, "block_bytes")?;
    let block_tokens = field(seq, "block_tokens")?;
    let tier: u8 = field(seq, "tier")?;
    let tier = *Tier::ALL
        .get(usize::from(tier))
        .ok_or_else(|| A::Error::custom(format_args!("unknown tier: {tier}, expected 0 to 3")))?;
    let node = NodeId(field(seq, "node")?);
    let volume: Option<VolumeId> = field(seq, "volume")?;
    let location = Location { tier, node, volume };
    Ok(EventBlock { identity, prefix_hash, block_bytes, block_tokens, location })
}

/// A list of at most `MAX` elements, refused at the first one too many.
struct Bounded<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = Bounded<T, MAX>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                // The claimed length is not trusted: the list grows with what is really there.
                let mut list = Vec::new();
                while let Some(element) = seq.next_element()? {
                    if list.len() == MAX {
                        return Err(A::Error::invalid_length(MAX + 1, &self));
                    }
                    list.push(element);
                }
                Ok(Bounded(list))
            }
        }
        deserializer.deserialize_seq(ListVisitor::<T, MAX>(PhantomData))
    }
}
