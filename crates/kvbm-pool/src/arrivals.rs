//! Destinations of transfers.

use crate::blocks::HeldSlots;
use crate::core::hold::BLOCKS_OF_A_PART;
use crate::core::{After, Core, Pin};
use crate::losses::Losses;
use crate::pinned::{Cached, Pinned};
use crate::shared::Shared;
use crate::sync::Arc;
use crate::tier::TierTag;
use crate::withheld::Withheld;
use kvbm_plan::{BlockId, BlockIdentity, SequenceHash, Tier};
use std::fmt;
use std::marker::PhantomData;

/// What [`begin_arrivals`](crate::BlockPool::begin_arrivals) decided for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Bytes may be written to this slot; [`complete`](AnyArrivals::complete) makes the block visible.
    Reserved {
        /// Destination.
        block: BlockId,
        /// Number of this arrival, by which others join it.
        ticket: u64,
    },
    /// The tier has the block: pinned, nothing to transfer.
    Present {
        /// Slot.
        block: BlockId,
    },
    /// Another transfer brings the block: wait for that one, then look again. If it fails the block is absent.
    Joined {
        /// Number of the other arrival.
        ticket: u64,
    },
    /// Completed: visible and pinned.
    Completed {
        /// Slot.
        block: BlockId,
    },
    /// Failed, or removed while it was on its way.
    Failed,
    /// The block cannot be brought here.
    Refused(Refusal),
}

/// Why a block was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The tier neither has nor awaits the block before it.
    #[error("its parent {parent} is neither on the tier nor on its way there: bring the parent first")]
    MissingParent {
        /// The block before it.
        parent: SequenceHash,
    },
    /// What was on the tier when room was made is gone, or the block's namespace is another tenant's since: the room does not
    /// suffice any more.
    #[error(
        "a block was removed, or its namespace assigned to another tenant, while room was made: try again"
    )]
    NoRoom,
    /// Group or position make no sense.
    #[error("unknown group, or parent and position contradict each other")]
    BadIdentity,
}

/// What came of a completed arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Present now, and announced.
    Stored,
    /// Somebody else registered the block meanwhile: that copy is used and pinned, this one given up.
    Existing {
        /// Slot of the other copy.
        block: BlockId,
    },
    /// The block was removed (clear, forget, a loss) while it was on its way, or, in a Full group, the tier neither has nor awaits its
    /// parent any more, or this arrival was over already: not visible.
    Removed,
}

/// Reserved destinations on a tier that is known at run time. [`Arrivals`] is the same with the tier in its type.
///
/// Nothing is visible before [`complete`](Self::complete). Dropping it returns slots that are not complete to Reset:
/// drop it only when no hardware writes to them any more.
#[must_use = "dropping arrivals gives their slots up"]
pub struct AnyArrivals {
    shared: Arc<Shared>,
    tier: Tier,
    identities: Vec<BlockIdentity>,
    arrivals: Vec<Arrival>,
    /// When they began.
    losses: Losses,
}

impl AnyArrivals {
    pub(crate) fn new(
        shared: Arc<Shared>,
        tier: Tier,
        identities: Vec<BlockIdentity>,
        arrivals: Vec<Arrival>,
        losses: Losses,
    ) -> Self {
        Self { shared, tier, identities, arrivals, losses }
    }

    /// Number of blocks asked for.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// Whether no block was asked for.
    pub fn is_empty(&self) -> bool {
        self.arrivals.is_empty()
    }

    /// The tier.
    pub const fn tier(&self) -> Tier {
        self.tier
    }

    /// The blocks, in the order in which they were asked for.
    pub fn identities(&self) -> &[BlockIdentity] {
        &self.identities
    }

    /// Where each block stands.
    pub fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Index, destination and ticket of every block that must be transferred.
    pub fn reserved(&self) -> impl Iterator<Item = (usize, BlockId, u64)> + '_ {
        self.arrivals.iter().enumerate().filter_map(|(index, arrival)| match *arrival {
            Arrival::Reserved { block, ticket } => Some((index, block, ticket)),
            _ => None,
        })
    }

    /// The bytes of block `index` are complete on every rank and verified: it becomes visible. An index that is not
    /// reserved (any more) changes nothing.
    pub fn complete(&mut self, index: usize) -> Completion {
        self.complete_each([index]).pop().unwrap_or(Completion::Removed)
    }

    /// The same for several blocks, one after the other; answers are in the order of `indices`. Parents go before their children. Others have
    /// their turn after 64 blocks at the latest.
    pub fn complete_each(&mut self, indices: impl IntoIterator<Item = usize>) -> Vec<Completion> {
        self.complete_while(indices, |_| true)
    }

    /// The same up to the first block that was removed meanwhile: how many became visible.
    pub fn complete_front(&mut self, indices: impl IntoIterator<Item = usize>) -> usize {
        let was_there = |completion: &Completion| *completion != Completion::Removed;
        let completions = self.complete_while(indices, was_there);
        completions.iter().filter(|completion| was_there(completion)).count()
    }

    /// Goes on after a block as long as what became of it is so.
    fn complete_while(
        &mut self,
        indices: impl IntoIterator<Item = usize>,
        goes_on: impl Fn(&Completion) -> bool,
    ) -> Vec<Completion> {
        let indices: Vec<usize> = indices.into_iter().collect();
        let mut completions = Vec::with_capacity(indices.len());
        let store = &self.shared.store;
        let mut held = None;
        for (at, index) in indices.into_iter().enumerate() {
            if completions.last().is_some_and(|last| !goes_on(last)) {
                break;
            }
            let_others_in(&mut held, at);
            let Some(&Arrival::Reserved { block, .. }) = self.arrivals.get(index) else {
                completions.push(Completion::Removed);
                continue;
            };
            let (core, completion) = store.complete_arrival(held.take(), self.tier.index(), block);
            held = Some(core);
            self.arrivals[index] = match completion {
                Completion::Stored => Arrival::Completed { block },
                Completion::Existing { block } => Arrival::Completed { block },
                Completion::Removed => Arrival::Failed,
            };
            completions.push(completion);
        }
        drop(held);
        store.remove_orphans();
        completions
    }

    /// Every block that is still reserved is complete and verified.
    pub fn complete_all(&mut self) -> Vec<Completion> {
        let reserved: Vec<usize> = self.reserved().map(|(index, ..)| index).collect();
        self.complete_each(reserved)
    }

    /// Block `index` did not arrive: its slot goes back to Reset, nothing becomes visible. In a Full group, what continues it and
    /// was complete before it leaves the tier as well.
    pub fn fail(&mut self, index: usize) {
        self.fail_each([index]);
    }

    /// The same for several blocks. What continues them is looked for once, which may take a look at the whole registry.
    pub fn fail_each(&mut self, indices: impl IntoIterator<Item = usize>) {
        let _freed = self.end_each(indices, After::Free);
    }

    /// Block `index` could not be written because its slot is bad: the slot is never used again.
    pub fn fail_and_quarantine(&mut self, index: usize) {
        let _retired = self.end_each([index], After::Retired);
    }

    /// The same as [`fail_each`](Self::fail_each), but the slots are free only when the answer is dropped: places that could not be
    /// written, say, which the next arrivals would take first.
    pub fn fail_and_withhold(&mut self, indices: impl IntoIterator<Item = usize>) -> Withheld {
        let ids = self.end_each(indices, After::Held);
        let shared = Arc::clone(&self.shared);
        Withheld::new(HeldSlots { shared, tier: self.tier.index(), ids, claim: None, losses: self.losses })
    }

    /// An index that is not reserved (any more) changes nothing. The slots of the others.
    fn end_each(&mut self, indices: impl IntoIterator<Item = usize>, after: After) -> Vec<BlockId> {
        let indices: Vec<usize> = indices.into_iter().collect();
        let (store, tier) = (&self.shared.store, self.tier.index());
        let (mut held, mut ended) = (None, Vec::new());
        for (at, index) in indices.into_iter().enumerate() {
            let_others_in(&mut held, at);
            if let Some(&Arrival::Reserved { block, .. }) = self.arrivals.get(index) {
                let mut core = store.go_to_slot(held.take(), tier, block);
                core.fail_arrival(tier, block, after);
                held = Some(core);
                self.arrivals[index] = Arrival::Failed;
                ended.push(block);
            }
        }
        drop(held);
        store.remove_orphans();
        ended
    }

    /// Ends the arrivals: what is Present or Completed stays pinned, in order; what is still reserved fails.
    pub fn into_pinned(mut self) -> Pinned {
        self.take_pinned()
    }

    /// What is Present or Completed by now, pinned, in order. What is still reserved stays so.
    pub fn take_pinned(&mut self) -> Pinned {
        let ids: Vec<BlockId> = self.arrivals.iter().filter_map(Self::pinned_block).collect();
        for arrival in &mut self.arrivals {
            if Self::pinned_block(arrival).is_some() {
                *arrival = Arrival::Failed;
            }
        }
        let Self { tier, losses, .. } = *self;
        Pinned { shared: Arc::clone(&self.shared), tier, ids, pin: Pin::Transfer, losses }
    }

    fn pinned_block(arrival: &Arrival) -> Option<BlockId> {
        match *arrival {
            Arrival::Present { block } | Arrival::Completed { block } => Some(block),
            _ => None,
        }
    }
}

impl Drop for AnyArrivals {
    fn drop(&mut self) {
        let tier = self.tier.index();
        let store = &self.shared.store;
        let mut held = None;
        for (at, arrival) in self.arrivals.iter().rev().enumerate() {
            let_others_in(&mut held, at);
            match *arrival {
                Arrival::Reserved { block, .. } => {
                    let mut core = store.go_to_slot(held.take(), tier, block);
                    core.fail_arrival(tier, block, After::Free);
                    held = Some(core);
                }
                Arrival::Present { block } | Arrival::Completed { block } => {
                    let mut core = store.go_to_slot(held.take(), tier, block);
                    core.unpin(tier, block.0, Pin::Transfer);
                    held = Some(core);
                }
                Arrival::Joined { .. } | Arrival::Failed | Arrival::Refused(_) => {}
            }
        }
        drop(held);
        store.remove_orphans();
    }
}

/// Others have their turn between two parts of a batch of which so many blocks are done.
fn let_others_in(held: &mut Option<Core<'_>>, done: usize) {
    if let Some(core) = held
        && done.is_multiple_of(BLOCKS_OF_A_PART)
    {
        core.let_others_in();
    }
}

impl fmt::Debug for AnyArrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyArrivals<{}>{:?}", self.tier, self.arrivals)
    }
}

/// Reserved destinations on one tier.
#[derive(Debug)]
#[must_use = "dropping arrivals gives their slots up"]
pub struct Arrivals<T: TierTag> {
    inner: AnyArrivals,
    tier: PhantomData<fn() -> T>,
}

impl<T: TierTag> Arrivals<T> {
    pub(crate) fn new(inner: AnyArrivals) -> Self {
        Self { inner, tier: PhantomData }
    }

    /// The same arrivals with their tier known at run time only.
    pub fn erase(self) -> AnyArrivals {
        self.inner
    }

    /// Ends the arrivals: what is Present or Completed stays, held by a user from now on; what is still reserved fails.
    pub fn into_cached(self) -> Cached<T> {
        Cached::new(self.inner.into_pinned().into_use())
    }
}

impl<T: TierTag> std::ops::Deref for Arrivals<T> {
    type Target = AnyArrivals;
    fn deref(&self) -> &AnyArrivals {
        &self.inner
    }
}

impl<T: TierTag> std::ops::DerefMut for Arrivals<T> {
    fn deref_mut(&mut self) -> &mut AnyArrivals {
        &mut self.inner
    }
}
