//! What the manager says about a block; it stays with the block on every tier.

/// Set when a block is first registered; follows it through the tiers until it is on none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockMetadata {
    /// Larger is dearer. An input of eviction policies; `lru-leaf` goes by recency alone.
    pub priority: u8,
}
