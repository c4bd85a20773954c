//! What an engine knows of its blocks, for who follows engines.

use crate::events::EventPump;
use kvbm_events::vllm::{EngineBlock, EngineHash};
use kvbm_tokens::{BlockChain, BlockHasher};

/// A description that makes no sense; nothing was noted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescribeError {
    /// Blocks beyond the chain's end.
    #[error(
        "{blocks} blocks from block {first} on are described, and the chain has {len}: describe blocks of the chain"
    )]
    Count {
        /// The first block that was described.
        first: usize,
        /// How many were.
        blocks: usize,
        /// Blocks of the chain.
        len: usize,
    },
    /// Neither no tokens nor a block's.
    #[error("block {block} is described with {tokens} tokens: give all {page_size} of a block, or none")]
    Tokens {
        /// The block's index in the chain.
        block: usize,
        /// Tokens given.
        tokens: usize,
        /// Tokens of a block.
        page_size: usize,
    },
    /// More bytes than are published to followers.
    #[error("{what} of block {block} has {bytes} bytes: at most {most} are published")]
    TooLong {
        /// The block's index in the chain.
        block: usize,
        /// What is too long.
        what: &'static str,
        /// Its bytes.
        bytes: usize,
        /// Most bytes.
        most: usize,
    },
}

/// Notes what the engine knows of blocks `first`, `first + 1`, .. of `chain`.
pub(super) fn describe(
    events: &EventPump,
    hasher: &BlockHasher,
    chain: BlockChain<'_>,
    first: usize,
    blocks: impl IntoIterator<Item = EngineBlock>,
) -> Result<(), DescribeError> {
    let blocks: Vec<EngineBlock> = blocks.into_iter().collect();
    if first.checked_add(blocks.len()).is_none_or(|end| end > chain.len()) {
        return Err(DescribeError::Count { first, blocks: blocks.len(), len: chain.len() });
    }
    let page_size = hasher.page_size();
    for (at, block) in blocks.iter().enumerate() {
        check(first + at, block, page_size)?;
    }
    for (hash, block) in chain.hashes()[first..].iter().zip(blocks) {
        events.describe(*hash, block, hasher);
    }
    Ok(())
}

fn check(block: usize, known: &EngineBlock, page_size: usize) -> Result<(), DescribeError> {
    let tokens = known.token_ids.len();
    if tokens != 0 && tokens != page_size {
        return Err(DescribeError::Tokens { block, tokens, page_size });
    }
    let hash = match &known.hash {
        Some(EngineHash::Bytes(bytes)) => bytes.len(),
        _ => 0,
    };
    let adapter = known.adapter.as_ref().and_then(|adapter| adapter.name.as_ref()).map_or(0, String::len);
    let extra = known.extra_keys.as_ref().map_or(0, |keys| keys.bytes().len());
    let parts = [
        ("the hash", hash, EngineHash::MAX_BYTES),
        ("the adapter's name", adapter, EngineBlock::MAX_EXTRA_BYTES),
        ("the list of extra keys", extra, EngineBlock::MAX_EXTRA_BYTES),
    ];
    match parts.into_iter().find(|(_, bytes, most)| bytes > most) {
        Some((what, bytes, most)) => Err(DescribeError::TooLong { block, what, bytes, most }),
        None => Ok(()),
    }
}
