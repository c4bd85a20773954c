//! What the manager says about a block; it stays with the block on every tier.

/// Set when a block is first registered; follows it through the tiers until it is on none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockMetadata {
    /// Larger is dearer, to every policy: under `lru-leaf` and `s3-fifo` (and `hazard` where it follows recency) a block that would go
    /// is passed over so many times, in the mean; otherwise `hazard` takes it as worth `1 + priority` times as much.
    pub priority: u8,
}
