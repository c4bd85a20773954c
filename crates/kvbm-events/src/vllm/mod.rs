//! vLLM's KV events, as its routers read them: payloads written and read byte for byte, other
//! engines' dialects read.
//!
//! ```text
//! payload = [timestamp: f64, [event, ...], data_parallel_rank | nil]
//! event   = {"type": "BlockStored", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
//!            "lora_name", ...} | {"type": "BlockRemoved", "block_hashes", "medium", ...} | {"type": "AllBlocksCleared"}
//! ```
//!
//! Fields stand in the order of [`BlockStored`] and [`BlockRemoved`]; those that may be left out
//! are left out when they are nil (vLLM 0.32). Read as well: payloads that are maps, events that
//! are arrays (`["BlockRemoved", [hash], medium]`; SGLang and older vLLM) with trailing fields left
//! out. Fields that are not known here are read and kept.
//!
//! Around a payload are two frames, a topic and a sequence number of eight bytes, big-endian, from
//! 0. There is no epoch: a number that steps back means that the publisher has started anew.
//! [`Follower`] keeps an index right through all that.

mod engine_blocks;
mod event;
mod follower;
mod gather;
mod holders;
mod json;
mod publish;
mod read;
mod sequence;
mod split;
mod token_keys;
mod write;

pub use engine_blocks::{Adapter, EngineBlock, EngineBlocks};
pub use event::{BlockRemoved, BlockStored, EngineBatch, EngineEvent, EngineHash, Raw};
pub use follower::{EngineSource, Follower, FollowerStats};
pub use publish::{FULL_ATTENTION, Publishing, PublishingStats};
pub use read::{Error, decode};
pub use sequence::{Continuity, SequenceTracker};
pub use token_keys::token_keys;
pub use write::encode;

/// Largest payload that is read: a batch of 4,096 stored blocks of 64 tokens takes about 1 MiB.
pub const MAX_BYTES: usize = 16 << 20;

/// Number in the last frame of a replay: nothing follows.
pub const END_OF_REPLAY: u64 = u64::MAX;
