//! The wire form of a batch, in MessagePack
//! (<https://github.com/msgpack/msgpack/blob/master/spec.md>).
//!
//! ```text
//! batch  = [version, source, epoch, shard, next_sequence, [event, ...], published_us | nil, ...]
//! event  = [sequence, 0 store | 1 remove, extra | nil, namespace, group, hash, parent | nil, position,
//!           prefix_hash, block_bytes, block_tokens, tier 0..3, node, volume | nil, local_hash | nil, ...]
//!        | [sequence, 2 cleared, extra | nil, ...]
//! extra  = [[key, value], ...]
//! ```
//!
//! Hashes are 16-byte `bin`, the rest (`local_hash` too) are unsigned integers and strings. An
//! event takes about 90 bytes. A `local_hash` or a time that is not known and stands last is left
//! out. A later minor revision may append elements to a batch or an event: they are kept as they
//! are ([`Unknown`]) and written back behind the known ones. A change of meaning gets a new
//! version, which is refused. Input is untrusted: its length is bounded before anything is read,
//! the number of events, of extra pairs and of unknown bytes while they are read.

use crate::msgpack::{Reader, write_array, write_bin, write_nil, write_str, write_uint};
use crate::{EventBatch, EventBlock, EventKind, KvEvent, Malformed, SourceId, StreamId, Unknown};
use kvbm_plan::{
    BlockIdentity, Epoch, GroupId, LocalHash, Location, NamespaceId, NodeId, SequenceHash, Tier, VolumeId,
};

/// Version that this crate writes and the only one that it reads.
pub const VERSION: u16 = 1;

/// Largest batch in bytes.
pub const MAX_BYTES: usize = 4 << 20;

/// Most bytes that an event without extra metadata takes.
pub const MAX_PLAIN_EVENT_BYTES: usize = 1 + 9 + 1 + 1 + 5 + 3 + 18 + 18 + 5 + 18 + 9 + 5 + 1 + 5 + 5 + 9;

/// Most bytes around the events of a batch.
pub const MAX_HEADER_BYTES: usize = 1 + 3 + 9 + 9 + 3 + 9 + 5 + 9;

/// Bytes that are not a batch of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    Malformed(Malformed),
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

/// Not as its source: the message says it all.
impl From<Malformed> for DecodeError {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// A batch that the receiver would refuse, so it is not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
}

/// Most bytes that `event` takes in a batch.
pub fn max_encoded_len(event: &KvEvent) -> usize {
    let extra: usize = event.extra.iter().map(|(key, value)| 1 + 5 + key.len() + 5 + value.len()).sum();
    // An array of more than 15 elements has a head of 3 or 5 bytes.
    MAX_PLAIN_EVENT_BYTES + 5 + 4 + extra + event.unknown.bytes().len()
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
    let mut out = Vec::with_capacity(MAX_HEADER_BYTES + batch.events.len() * 96);
    let unknown = batch.unknown.values() as usize;
    // Something stands behind the time, so its place has to be kept.
    write_array(&mut out, 6 + usize::from(batch.published_us.is_some() || unknown > 0) + unknown);
    write_uint(&mut out, u64::from(VERSION));
    write_uint(&mut out, stream.source.0);
    write_uint(&mut out, stream.epoch.0);
    write_uint(&mut out, u64::from(stream.shard));
    write_uint(&mut out, batch.next_sequence);
    write_array(&mut out, batch.events.len());
    for event in &batch.events {
        write_event(&mut out, event);
    }
    match batch.published_us {
        Some(time) => write_uint(&mut out, time),
        None if unknown > 0 => write_nil(&mut out),
        None => {}
    }
    out.extend_from_slice(batch.unknown.bytes());
    if out.len() > MAX_BYTES {
        return too_large("bytes", out.len(), MAX_BYTES);
    }
    Ok(out)
}

fn write_event(out: &mut Vec<u8>, event: &KvEvent) {
    let (kind, block) = match &event.kind {
        EventKind::Store(block) => (0, Some(block)),
        EventKind::Remove(block) => (1, Some(block)),
        EventKind::Cleared => (2, None),
    };
    let unknown = event.unknown.values() as usize;
    let known = match block {
        None => 3,
        // Something stands behind it, so its place has to be kept.
        Some(block) => 14 + usize::from(block.local_hash.is_some() || unknown > 0),
    };
    write_array(out, known + unknown);
    write_uint(out, event.sequence);
    write_uint(out, kind);
    if event.extra.is_empty() {
        write_nil(out);
    } else {
        write_array(out, event.extra.len());
        for (key, value) in &event.extra {
            write_array(out, 2);
            write_str(out, key);
            write_str(out, value);
        }
    }
    if let Some(block) = block {
        write_block(out, block);
        match block.local_hash {
            Some(LocalHash(hash)) => write_uint(out, hash),
            None if unknown > 0 => write_nil(out),
            None => {}
        }
    }
    out.extend_from_slice(event.unknown.bytes());
}

/// Everything of a block but its local hash.
pub(crate) fn write_block(out: &mut Vec<u8>, block: &EventBlock) {
    write_uint(out, u64::from(block.identity.namespace.0));
    write_uint(out, u64::from(block.identity.group.0));
    write_bin(out, block.identity.hash.as_bytes());
    match block.identity.parent {
        Some(parent) => write_bin(out, parent.as_bytes()),
        None => write_nil(out),
    }
    write_uint(out, u64::from(block.identity.position));
    write_bin(out, block.prefix_hash.as_bytes());
    write_uint(out, block.block_bytes);
    write_uint(out, u64::from(block.block_tokens));
    write_uint(out, block.location.tier.index() as u64);
    write_uint(out, u64::from(block.location.node.0));
    match block.location.volume {
        Some(volume) => write_uint(out, u64::from(volume.0)),
        None => write_nil(out),
    }
}

/// Decodes and checks a batch.
pub fn decode(bytes: &[u8]) -> Result<EventBatch, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLong { len: bytes.len() });
    }
    let mut reader = Reader::new(bytes);
    let elements = reader.array("an event batch")?;
    let found = reader.uint("a version")?;
    if found != VERSION {
        return Err(DecodeError::Version { found });
    }
    let source = SourceId(reader.uint("a source")?);
    let epoch = Epoch(reader.uint("an epoch")?);
    let stream = StreamId { source, epoch, shard: reader.uint("a shard")? };
    let next_sequence = reader.uint("the next sequence")?;
    let events = read_events(&mut reader)?;
    let says_when = elements > 6 && !reader.nil();
    let published_us = says_when.then(|| reader.uint("a time")).transpose()?;
    let unknown = read_unknown(&mut reader, elements, elements.clamp(6, 7))?;
    match reader.left() {
        0 => {}
        extra => return Err(DecodeError::Trailing { extra }),
    }
    let batch = EventBatch { stream, next_sequence, events, published_us, unknown };
    if batch.is_ordered() { Ok(batch) } else { Err(DecodeError::Disordered { stream }) }
}

fn read_events(reader: &mut Reader<'_>) -> Result<Vec<KvEvent>, Malformed> {
    let start = reader.malformed("at most 4096 events");
    let count = reader.array("a list of events")? as usize;
    if count > EventBatch::MAX_EVENTS {
        return Err(start);
    }
    // The claimed length is not trusted: a real event takes at least four bytes.
    let mut events = Vec::with_capacity(count.min(reader.left() / 4));
    for _ in 0..count {
        events.push(read_event(reader)?);
    }
    Ok(events)
}

fn read_event(reader: &mut Reader<'_>) -> Result<KvEvent, Malformed> {
    let elements = reader.array("an event")?;
    let sequence = reader.uint("a sequence number")?;
    let unknown_kind = reader.malformed("a kind of event, 0 to 2");
    let kind: u8 = reader.uint("a kind of event")?;
    let extra = read_extra(reader)?;
    let (kind, known) = match kind {
        2 => (EventKind::Cleared, 3),
        0 | 1 => {
            let mut block = read_block(reader)?;
            if elements > 14 && !reader.nil() {
                block.local_hash = Some(LocalHash(reader.uint("a local hash")?));
            }
            (
                if kind == 0 { EventKind::Store(block) } else { EventKind::Remove(block) },
                elements.clamp(14, 15),
            )
        }
        _ => return Err(unknown_kind),
    };
    let unknown = read_unknown(reader, elements, known)?;
    Ok(KvEvent { sequence, kind, extra, unknown })
}

/// The elements behind the `known` ones.
fn read_unknown(reader: &mut Reader<'_>, elements: u32, known: u32) -> Result<Unknown, Malformed> {
    let Some(values) = elements.checked_sub(known) else {
        return Err(reader.malformed("more elements"));
    };
    if values == 0 {
        return Ok(Unknown::NONE);
    }
    let too_long = reader.malformed("at most 1024 bytes of unknown fields");
    let bytes = reader.raw(u64::from(values))?;
    if bytes.len() > Unknown::MAX_BYTES { Err(too_long) } else { Ok(Unknown::new(values, bytes)) }
}

fn read_extra(reader: &mut Reader<'_>) -> Result<Vec<(String, String)>, Malformed> {
    if reader.nil() {
        return Ok(Vec::new());
    }
    let start = reader.malformed("extra metadata of at most 16 pairs of 1024 bytes");
    let count = reader.array("extra metadata")? as usize;
    if count > KvEvent::MAX_EXTRA {
        return Err(start);
    }
    let mut extra = Vec::with_capacity(count);
    for _ in 0..count {
        let pair = reader.malformed("a pair of key and value");
        if reader.array("a pair of key and value")? != 2 {
            return Err(pair);
        }
        let (key, value) = (reader.str("a key")?, reader.str("a value")?);
        if key.len() + value.len() > KvEvent::MAX_EXTRA_BYTES {
            return Err(start);
        }
        extra.push((key.to_owned(), value.to_owned()));
    }
    Ok(extra)
}

/// Everything of a block but its local hash.
pub(crate) fn read_block(reader: &mut Reader<'_>) -> Result<EventBlock, Malformed> {
    let hash = |reader: &mut Reader<'_>| reader.bin("a hash of 16 bytes").map(SequenceHash::from_bytes);
    let identity = BlockIdentity {
        namespace: NamespaceId(reader.uint("a namespace")?),
        group: GroupId(reader.uint("a group")?),
        hash: hash(reader)?,
        parent: if reader.nil() { None } else { Some(hash(reader)?) },
        position: reader.uint("a position")?,
    };
    let prefix_hash = hash(reader)?;
    let block_bytes = reader.uint("bytes of a block")?;
    let block_tokens = reader.uint("tokens of a block")?;
    let unknown_tier = reader.malformed("a tier, 0 to 3");
    let tier: u8 = reader.uint("a tier")?;
    let tier = *Tier::ALL.get(usize::from(tier)).ok_or(unknown_tier)?;
    let node = NodeId(reader.uint("a node")?);
    let volume = if reader.nil() { None } else { Some(VolumeId(reader.uint("a volume")?)) };
    let location = Location { tier, node, volume };
    Ok(EventBlock { identity, prefix_hash, local_hash: None, block_bytes, block_tokens, location })
}
