//! Reading payloads of vLLM and its relatives.

use super::MAX_BYTES;
use super::event::{BlockRemoved, BlockStored, EngineBatch, EngineEvent, EngineHash, Raw};
use crate::Malformed;
use crate::msgpack::{Head, Reader};

/// A payload that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Longer than any payload.
    #[error("engine event payload of {len} bytes exceeds {MAX_BYTES}: refused unread")]
    TooLong {
        /// Length received.
        len: usize,
    },
    /// Not MessagePack, or not this shape.
    #[error("malformed engine event payload: {0}; is this the third frame of a KV event publisher?")]
    Malformed(Malformed),
    /// Bytes after the payload.
    #[error("{extra} bytes follow the engine event payload; dropped")]
    Trailing {
        /// How many.
        extra: usize,
    },
}

/// Not as its source: the message says it all.
impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Most events of a payload: far more than an engine has in one step. One of two bytes takes some
/// hundred in memory.
const MAX_EVENTS: u32 = 1 << 18;

/// Decodes a payload.
pub fn decode(bytes: &[u8]) -> Result<EngineBatch, Error> {
    if bytes.len() > MAX_BYTES {
        return Err(Error::TooLong { len: bytes.len() });
    }
    let mut reader = Reader::new(bytes);
    let batch = read_batch(&mut reader)?;
    match reader.left() {
        0 => Ok(batch),
        extra => Err(Error::Trailing { extra }),
    }
}

fn read_batch(reader: &mut Reader<'_>) -> Result<EngineBatch, Malformed> {
    let start = reader.malformed("a batch of at least a timestamp and events");
    let mut batch = EngineBatch { timestamp: 0.0, events: Vec::new(), data_parallel_rank: None };
    let mut seen = 0;
    let mut take = |reader: &mut Reader<'_>, name: &str| -> Result<(), Malformed> {
        match name {
            "ts" => {
                seen += 1;
                batch.timestamp = reader.float("a timestamp")?;
            }
            "events" => {
                seen += 1;
                let too_many = reader.malformed("at most 262144 events");
                if reader.clone().array("a list of events")? > MAX_EVENTS {
                    return Err(too_many);
                }
                batch.events = list(reader, "a list of events", read_event)?;
            }
            // SGLang calls its ranks by the kind of attention.
            "data_parallel_rank" | "attn_dp_rank" => {
                batch.data_parallel_rank = optional(reader, |r| r.uint("a rank"))?;
            }
            _ => {
                reader.raw(1)?;
            }
        }
        Ok(())
    };
    fields(reader, "a batch", &["ts", "events", "data_parallel_rank"], &mut take)?;
    if seen < 2 { Err(start) } else { Ok(batch) }
}

/// Reads the fields of an array (named by `order`; more of them have the name "") or of a map.
fn fields<'a>(
    reader: &mut Reader<'a>,
    what: &'static str,
    order: &[&str],
    take: &mut dyn FnMut(&mut Reader<'a>, &str) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    let start = reader.malformed(what);
    match reader.head()? {
        Head::Array(len) => {
            (0..len as usize).try_for_each(|at| take(reader, order.get(at).copied().unwrap_or("")))
        }
        Head::Map(pairs) => (0..pairs).try_for_each(|_| {
            let name = reader.str("the name of a field")?;
            take(reader, name)
        }),
        _ => Err(start),
    }
}

fn read_event(reader: &mut Reader<'_>) -> Result<EngineEvent, Malformed> {
    // The type stands first in both forms.
    let mut ahead = reader.clone();
    let start = reader.malformed("an event with its type first");
    match ahead.head()? {
        Head::Array(1..) => {}
        Head::Map(1..) => {
            if ahead.str("the type of an event")? != "type" {
                return Err(start);
            }
        }
        _ => return Err(start),
    }
    match ahead.str("the type of an event")? {
        "BlockStored" => Ok(EngineEvent::Stored(read_stored(reader)?)),
        "BlockRemoved" => Ok(EngineEvent::Removed(read_removed(reader)?)),
        "AllBlocksCleared" => reader.raw(1).map(|_| EngineEvent::AllBlocksCleared),
        _ => Ok(EngineEvent::Unknown(raw(reader)?)),
    }
}

const STORED: &[&str] = &[
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
];

fn read_stored(reader: &mut Reader<'_>) -> Result<BlockStored, Malformed> {
    let start = reader.malformed("a stored event with its hashes, tokens and block size");
    let mut event = BlockStored::default();
    let mut seen = 0;
    fields(reader, "an event", STORED, &mut |reader, name| {
        match name {
            "type" => {
                reader.raw(1)?;
            }
            "block_hashes" => {
                seen += 1;
                event.block_hashes = list(reader, "a list of hashes", read_hash)?;
            }
            "parent_block_hash" => event.parent_block_hash = optional(reader, read_hash)?,
            "token_ids" => {
                seen += 1;
                event.token_ids = list(reader, "a list of tokens", |r| r.uint("a token"))?;
            }
            "block_size" => {
                seen += 1;
                event.block_size = reader.uint("a block size")?;
            }
            "lora_id" => event.lora_id = optional(reader, |r| r.uint("an adapter's number"))?,
            "medium" => event.medium = optional(reader, |r| text(r, "a medium"))?,
            "lora_name" => event.lora_name = optional(reader, |r| text(r, "an adapter's name"))?,
            "extra_keys" => event.extra_keys = optional(reader, raw)?,
            "group_idx" => event.group_idx = optional(reader, |r| r.uint("a group"))?,
            "kv_cache_spec_kind" => {
                event.kv_cache_spec_kind = optional(reader, |r| text(r, "a kind of cache"))?;
            }
            "kv_cache_spec_sliding_window" => {
                event.kv_cache_spec_sliding_window = optional(reader, |r| r.uint("a window"))?;
            }
            "locality" => event.locality = optional(reader, raw)?,
            "ownership" => event.ownership = optional(reader, raw)?,
            "session_id" => event.session_id = optional(reader, raw)?,
            other => event.unknown.push((other.to_owned(), raw(reader)?)),
        }
        Ok(())
    })?;
    if seen < 3 { Err(start) } else { Ok(event) }
}

fn read_removed(reader: &mut Reader<'_>) -> Result<BlockRemoved, Malformed> {
    let start = reader.malformed("a removed event with its hashes");
    let mut event = BlockRemoved::default();
    let mut seen = 0;
    let order = ["type", "block_hashes", "medium", "group_idx", "locality", "ownership"];
    fields(reader, "an event", &order, &mut |reader, name| {
        match name {
            "type" => {
                reader.raw(1)?;
            }
            "block_hashes" => {
                seen += 1;
                event.block_hashes = list(reader, "a list of hashes", read_hash)?;
            }
            "medium" => event.medium = optional(reader, |r| text(r, "a medium"))?,
            "group_idx" => event.group_idx = optional(reader, |r| r.uint("a group"))?,
            "locality" => event.locality = optional(reader, raw)?,
            "ownership" => event.ownership = optional(reader, raw)?,
            other => event.unknown.push((other.to_owned(), raw(reader)?)),
        }
        Ok(())
    })?;
    if seen < 1 { Err(start) } else { Ok(event) }
}

/// The value, or `None` for nil.
fn optional<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, Malformed>,
) -> Result<Option<T>, Malformed> {
    if reader.nil() { Ok(None) } else { read(reader).map(Some) }
}

/// A list that grows with what is really there.
fn list<'a, T>(
    reader: &mut Reader<'a>,
    what: &'static str,
    mut read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let len = reader.array(what)? as usize;
    let mut list = Vec::with_capacity(len.min(reader.left() / size_of::<T>().max(1)));
    for _ in 0..len {
        list.push(read(reader)?);
    }
    Ok(list)
}

fn text(reader: &mut Reader<'_>, what: &'static str) -> Result<String, Malformed> {
    reader.str(what).map(str::to_owned)
}

fn raw(reader: &mut Reader<'_>) -> Result<Raw, Malformed> {
    reader.raw(1).map(|bytes| Raw(bytes.to_vec()))
}

fn read_hash(reader: &mut Reader<'_>) -> Result<EngineHash, Malformed> {
    let start = reader.malformed("a hash: an integer or at most 64 bytes");
    match reader.head()? {
        Head::Uint(number) => Ok(EngineHash::Uint(number)),
        Head::Int(number) => Ok(EngineHash::Int(number)),
        Head::Bin(bytes) if bytes.len() <= EngineHash::MAX_BYTES => Ok(EngineHash::Bytes(bytes.to_vec())),
        _ => Err(start),
    }
}
