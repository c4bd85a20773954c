//! What the manager says about a block; it stays with the block on every tier.

/// Set when a block is first registered; follows it through the tiers until it is on none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockMetadata {
    /// Larger is dearer, to every policy. Under `lru-leaf` (and `hazard` where it follows recency)
    /// a block that would go is passed over so many times, in the mean. Otherwise `hazard` takes it
    /// as worth `1 + priority` times as much.
    pub priority: u8,
}

/// What to do with a block that the tier already has when it is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duplicates {
    /// Use the block that is there; the slot of the new one is free again.
    #[default]
    Reuse,
    /// Keep the new copy beside the old one for as long as it is held: the engine's tables point at
    /// it.
    Allow,
}
