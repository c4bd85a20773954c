//! What an engine says.

use crate::Malformed;
use crate::msgpack::Reader;
use kvbm_plan::{SequenceHash, Tier};

/// Events of one engine rank that travel together.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineBatch {
    /// Seconds since 1970 at the publisher.
    pub timestamp: f64,
    /// In their order.
    pub events: Vec<EngineEvent>,
    /// The data-parallel rank of the engine that publishes.
    pub data_parallel_rank: Option<u32>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks can be found on a medium.
    Stored(BlockStored),
    /// Blocks are no longer on a medium.
    Removed(BlockRemoved),
    /// The rank holds nothing any more, on any medium.
    AllBlocksCleared,
    /// Something that a later engine says: kept as it came.
    Unknown(Raw),
}

/// Consecutive blocks of one chain that were stored on one medium.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockStored {
    /// In the order of the chain.
    pub block_hashes: Vec<EngineHash>,
    /// The block before the first; none for the first of a chain.
    pub parent_block_hash: Option<EngineHash>,
    /// Tokens of all blocks, one after the other.
    pub token_ids: Vec<u32>,
    /// Tokens of a block.
    pub block_size: u32,
    /// Number of the adapter.
    pub lora_id: Option<u64>,
    /// Where they are: `GPU`, `CPU`, `STORAGE`, or the names that
    /// [`medium_tier`](Self::medium_tier) knows.
    pub medium: Option<String>,
    /// Name of the adapter.
    pub lora_name: Option<String>,
    /// What else went into each block's hash.
    pub extra_keys: Option<Raw>,
    /// Cache group of a hybrid model.
    pub group_idx: Option<u16>,
    /// Kind of the group, `full_attention` for instance.
    pub kv_cache_spec_kind: Option<String>,
    /// Window of a sliding-window group in tokens.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// As the engine says it.
    pub locality: Option<Raw>,
    /// As the engine says it.
    pub ownership: Option<Raw>,
    /// As the engine says it.
    pub session_id: Option<Raw>,
    /// Fields that are not known here, in their order.
    pub unknown: Vec<(String, Raw)>,
}

/// Blocks that went from one medium.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockRemoved {
    /// In any order.
    pub block_hashes: Vec<EngineHash>,
    /// Where they were.
    pub medium: Option<String>,
    /// Cache group of a hybrid model.
    pub group_idx: Option<u16>,
    /// As the engine says it.
    pub locality: Option<Raw>,
    /// As the engine says it.
    pub ownership: Option<Raw>,
    /// Fields that are not known here, in their order.
    pub unknown: Vec<(String, Raw)>,
}

/// The tier that engines call `medium`: vLLM's names, then SGLang's. Without a medium it is the
/// engine's own memory.
pub(super) fn tier(medium: Option<&str>) -> Option<Tier> {
    match medium {
        None | Some("GPU") => Some(Tier::G1),
        Some("CPU" | "CPU_PINNED") => Some(Tier::G2),
        Some("STORAGE" | "DISK") => Some(Tier::G3),
        Some("EXTERNAL") => Some(Tier::G4),
        Some(_) => None,
    }
}

impl BlockStored {
    /// The tier of `medium`; `None` for a name that is not known.
    pub fn medium_tier(&self) -> Option<Tier> {
        tier(self.medium.as_deref())
    }
}

impl BlockRemoved {
    /// The tier of `medium`; `None` for a name that is not known.
    pub fn medium_tier(&self) -> Option<Tier> {
        tier(self.medium.as_deref())
    }
}

/// An engine's own name of a block and all before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum EngineHash {
    /// A number: vLLM's default.
    Uint(u64),
    /// A negative number, as SGLang writes the upper half of them.
    Int(i64),
    /// Bytes, 32 of them for SHA-256.
    Bytes(Vec<u8>),
}

impl EngineHash {
    /// Most bytes of a hash.
    pub const MAX_BYTES: usize = 64;

    /// A key for an index, equal exactly where the hashes are: the number, or the first 16 bytes.
    /// Not a [`SequenceHash`] of kvbm's own making: it is bound to no namespace and good for
    /// nothing but following one deployment of engines.
    pub fn index_key(&self) -> SequenceHash {
        let mut key = [0; 16];
        match self {
            Self::Uint(number) => key[..8].copy_from_slice(&number.to_le_bytes()),
            // The same bits: engines differ in how they write one number.
            Self::Int(number) => key[..8].copy_from_slice(&number.to_le_bytes()),
            Self::Bytes(bytes) => {
                let len = bytes.len().min(16);
                key[..len].copy_from_slice(&bytes[..len]);
            }
        }
        SequenceHash::from_bytes(key)
    }
}

/// A value that is passed on as it came, in MessagePack.
#[derive(Clone, PartialEq, Eq)]
pub struct Raw(pub(super) Vec<u8>);

impl Raw {
    /// One value in MessagePack.
    ///
    /// # Errors
    /// Bytes that are no value, or more than one.
    pub fn new(msgpack: impl Into<Vec<u8>>) -> Result<Self, Malformed> {
        let bytes = msgpack.into();
        let mut reader = Reader::new(&bytes);
        reader.raw(1)?;
        if reader.left() > 0 {
            return Err(reader.malformed("nothing behind the value"));
        }
        Ok(Self(bytes))
    }

    /// The value in MessagePack.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}
