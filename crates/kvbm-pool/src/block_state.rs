//! The life of a block, declared once: the typed batches, their errors and the tests all read this
//! table.

use std::fmt;

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// No content.
    Reset,
    /// Belongs to a sequence, being filled.
    Partial,
    /// Full, known by its sequence hash, visible to its owner only.
    Complete,
    /// Visible to all lookups; its bytes never change.
    Registered,
}

impl BlockState {
    /// Every state, in the order of a block's life.
    pub const ALL: [Self; 4] = [Self::Reset, Self::Partial, Self::Complete, Self::Registered];
}

impl fmt::Display for BlockState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reset => "Reset",
            Self::Partial => "Partial",
            Self::Complete => "Complete",
            Self::Registered => "Registered",
        })
    }
}

/// What happens to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockTrigger {
    /// [`BlockBatch::init_sequence`](crate::BlockBatch::init_sequence).
    InitSequence,
    /// [`BlockBatch::commit`](crate::BlockBatch::commit).
    Commit,
    /// [`BlockPool::register`](crate::BlockPool::register).
    Register,
    /// [`BlockBatch::into_reset`](crate::BlockBatch::into_reset), or drop of an unfinished batch.
    Reset,
    /// The last user is gone and the tier needs the slot, or the block was removed.
    Evict,
}

impl BlockTrigger {
    /// Every trigger.
    pub const ALL: [Self; 5] = [Self::InitSequence, Self::Commit, Self::Register, Self::Reset, Self::Evict];

    /// What must hold before.
    pub const fn rule(self) -> &'static str {
        match self {
            Self::InitSequence => "must not be in use",
            Self::Commit => "must be full",
            Self::Register => "must be finalized",
            Self::Reset => "must be an unfinished block of its owner",
            Self::Evict => "must be registered and without users",
        }
    }
}

impl fmt::Display for BlockTrigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InitSequence => "init_sequence",
            Self::Commit => "commit",
            Self::Register => "register",
            Self::Reset => "reset",
            Self::Evict => "evict",
        })
    }
}

/// The six transitions; there is no other. As a graph, in the DOT language (a test compares it with
/// the table):
/// ```dot
#[doc = include_str!("../states.dot")]
/// ```
pub const TRANSITIONS: [(BlockState, BlockTrigger, BlockState); 6] = [
    (BlockState::Reset, BlockTrigger::InitSequence, BlockState::Partial),
    (BlockState::Partial, BlockTrigger::Commit, BlockState::Complete),
    (BlockState::Complete, BlockTrigger::Register, BlockState::Registered),
    (BlockState::Registered, BlockTrigger::Evict, BlockState::Reset),
    (BlockState::Partial, BlockTrigger::Reset, BlockState::Reset),
    (BlockState::Complete, BlockTrigger::Reset, BlockState::Reset),
];

/// A transition that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a {from} block cannot {trigger}: it {}", trigger.rule())]
pub struct IllegalTransition {
    /// State of the block.
    pub from: BlockState,
    /// What was asked of it.
    pub trigger: BlockTrigger,
}

impl BlockState {
    /// The state after `trigger`.
    ///
    /// # Errors
    /// A transition that is not in the table: which, and the rule.
    pub const fn after(self, trigger: BlockTrigger) -> Result<Self, IllegalTransition> {
        let mut row = 0;
        while row < TRANSITIONS.len() {
            let (from, on, to) = TRANSITIONS[row];
            if from as u8 == self as u8 && on as u8 == trigger as u8 {
                return Ok(to);
            }
            row += 1;
        }
        Err(IllegalTransition { from: self, trigger })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// State of an exclusive batch, as a type.
pub trait BatchState: sealed::Sealed + Send + Sync + 'static {
    /// The state.
    const STATE: BlockState;
    /// What a batch in this state knows of its blocks.
    type Content: Send + Sync + 'static;
}

/// [`BlockState::Reset`] as a type.
#[derive(Clone, Copy, Debug)]
pub enum Reset {}

/// [`BlockState::Partial`] as a type.
#[derive(Clone, Copy, Debug)]
pub enum Partial {}

/// [`BlockState::Complete`] as a type.
#[derive(Clone, Copy, Debug)]
pub enum Complete {}

/// Where a Partial batch lies in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPosition {
    /// Namespace of the sequence.
    pub namespace: kvbm_plan::NamespaceId,
    /// Cache group.
    pub group: kvbm_plan::GroupId,
    /// Position in the sequence of the batch's first block.
    pub position: u32,
}

impl sealed::Sealed for Reset {}
impl BatchState for Reset {
    const STATE: BlockState = BlockState::Reset;
    type Content = ();
}

impl sealed::Sealed for Partial {}
impl BatchState for Partial {
    const STATE: BlockState = BlockState::Partial;
    type Content = BatchPosition;
}

impl sealed::Sealed for Complete {}
impl BatchState for Complete {
    const STATE: BlockState = BlockState::Complete;
    type Content = Vec<kvbm_plan::BlockIdentity>;
}
