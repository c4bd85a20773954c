//! One change of one block.

use kvbm_plan::{BlockIdentity, LocalHash, Location, SequenceHash};

/// What happened, with its place in the order of its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// Number within its stream, from 0, without holes.
    pub sequence: u64,
    /// What happened.
    pub kind: EventKind,
    /// Free metadata, in order: at most [`KvEvent::MAX_EXTRA`] pairs of at most
    /// [`KvEvent::MAX_EXTRA_BYTES`] bytes each.
    pub extra: Vec<(String, String)>,
    /// What a later revision of the format said beyond this; passed on unread.
    pub unknown: Unknown,
}

impl KvEvent {
    /// Most pairs of extra metadata.
    pub const MAX_EXTRA: usize = 16;

    /// Most bytes of key and value together in one pair of extra metadata.
    pub const MAX_EXTRA_BYTES: usize = 1024;

    /// An event without extra metadata.
    pub const fn new(sequence: u64, kind: EventKind) -> Self {
        Self { sequence, kind, extra: Vec::new(), unknown: Unknown::NONE }
    }
}

/// Fields that this version does not know, as they came: whoever decodes and encodes again loses
/// nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unknown {
    values: u32,
    bytes: Vec<u8>,
}

impl Unknown {
    /// Nothing unknown.
    pub const NONE: Self = Self { values: 0, bytes: Vec::new() };

    /// Most bytes of unknown fields in one event, and in one batch beside its events.
    pub const MAX_BYTES: usize = 1024;

    pub(crate) fn new(values: u32, bytes: &[u8]) -> Self {
        Self { values, bytes: bytes.to_vec() }
    }

    /// How many fields.
    pub const fn values(&self) -> u32 {
        self.values
    }

    /// The fields in MessagePack, one after the other.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// What happened to a block, or to all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The block can be found at its location, complete and verified.
    Store(EventBlock),
    /// The block is no longer at its location; other locations are not affected.
    Remove(EventBlock),
    /// The source holds nothing any more, on any of its tiers, in the stream's shard.
    Cleared,
}

impl EventKind {
    /// The block, where the event is about one.
    pub const fn block(&self) -> Option<&EventBlock> {
        match self {
            Self::Store(block) | Self::Remove(block) => Some(block),
            Self::Cleared => None,
        }
    }
}

/// The block of an event. The *reference documents*' fields, made precise: `sequence_hash` is
/// `identity.hash`, `block_size` is `block_bytes`, `storage_location` is `location`. The namespace
/// travels as the first four bytes of its tag ([`kvbm_plan::NamespaceId`]); the sequence hash binds
/// the whole tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventBlock {
    /// Namespace, group, sequence hash, parent and position.
    pub identity: BlockIdentity,
    /// Sequence hash of the first block of its chain; the block's own where `identity.position` is
    /// 0.
    pub prefix_hash: SequenceHash,
    /// Hash of the block's own tokens without its prefix, where the source knows it.
    pub local_hash: Option<LocalHash>,
    /// Bytes of the block on all ranks together.
    pub block_bytes: u64,
    /// Tokens of the block.
    pub block_tokens: u32,
    /// Tier, node and volume.
    pub location: Location,
}
