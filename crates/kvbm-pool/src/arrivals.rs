//! Arrivals: the reserved destinations of a transfer.

use crate::arrival::{Arrival, ArrivalOutcome, Refusal};
use crate::blocks::HeldSlots;
use crate::core::arrivals::FailedSlot;
use crate::core::registered::Reference;
use crate::core::store::BLOCKS_PER_HOLD;
use crate::error::AllocError;
use crate::losses::Losses;
use crate::metadata::BlockMetadata;
use crate::pinned::{Cached, Pinned};
use crate::shared::RegistryState;
use crate::sync::Arc;
use crate::tier::{TIERS, TierTag};
use crate::withheld::Withheld;
use kvbm_plan::{BlockId, BlockIdentity, Tier};
use std::fmt;
use std::marker::PhantomData;

/// Reserved destinations on a tier that is known at run time. [`Arrivals`] is the same with the
/// tier in its type.
///
/// Nothing is visible before [`complete`](Self::complete). Dropping it returns slots that are not
/// complete to Reset: drop it only when no hardware writes to them any more.
#[must_use = "dropping arrivals gives their slots up"]
pub struct AnyArrivals {
    shared: Arc<RegistryState>,
    tier: Tier,
    identities: Vec<BlockIdentity>,
    arrivals: Vec<Arrival>,
    /// When they began.
    losses: Losses,
}

impl AnyArrivals {
    /// See [`BlockPool::begin_arrivals_with`](crate::BlockPool::begin_arrivals_with).
    pub(crate) fn begin(
        shared: &Arc<RegistryState>,
        tier: Tier,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<Self, AllocError> {
        let index = tier.index();
        if index >= TIERS {
            return Err(RegistryState::no_slots(tier, identities.len()));
        }
        let losses = shared.store.losses.now();
        let mut pins = Vec::with_capacity(identities.len() + 1);
        let mut arrivals = Vec::with_capacity(identities.len());
        let mut rooms = Vec::new();
        let mut hold = shared.store.lock();
        let parts = hold.tenants.split(identities);
        for (claim, part) in parts {
            let needed = hold.prepare_arrivals(index, &part, &mut pins);
            let ids = Vec::with_capacity(needed);
            rooms.push((HeldSlots { shared: Arc::clone(shared), tier: index, ids, claim, losses }, needed));
        }
        drop(hold);
        let mut refused = Ok(());
        let mut is_any = identities.is_empty();
        for (room, needed) in &mut rooms {
            match shared.allocate_into(tier, *needed, room.claim, &mut room.ids) {
                Ok(()) => is_any = true,
                Err(error) => (*needed, refused) = (0, Err(error)),
            }
            room.ids.reverse();
        }
        let mut hold = shared.store.lock();
        let mut no_room = Vec::new();
        if is_any {
            for (at, identity) in identities.iter().enumerate() {
                let claim = hold.tenants.claim_of(identity.namespace);
                // The namespace may be another tenant's by now, for which no room was made.
                let room = rooms.iter_mut().find(|(room, _)| room.claim == claim);
                let room = room.map_or(&mut no_room, |(room, _)| &mut room.ids);
                arrivals.push(match hold.entries.check_identity(at, identity) {
                    Ok(()) => hold.begin_arrival(index, identity, metadata, room),
                    Err(_) => Arrival::Refused(Refusal::BadIdentity),
                });
            }
        }
        for (room, needed) in &rooms {
            hold.tenants.let_go(index, room.claim, needed - room.ids.len());
        }
        hold.drop_references(index, &pins, Reference::Transfer);
        drop(hold);
        if !is_any {
            refused?;
        }
        Ok(Self { shared: Arc::clone(shared), tier, identities: identities.to_vec(), arrivals, losses })
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

    /// The bytes of block `index` are complete on every rank and verified: it becomes visible. An
    /// index that is not reserved (any more) changes nothing.
    pub fn complete(&mut self, index: usize) -> ArrivalOutcome {
        self.complete_each([index]).pop().unwrap_or(ArrivalOutcome::Removed)
    }

    /// The same for several blocks, one after the other; answers are in the order of `indices`.
    /// Parents go before their children. Others have their turn after 64 blocks at the latest.
    pub fn complete_each(&mut self, indices: impl IntoIterator<Item = usize>) -> Vec<ArrivalOutcome> {
        self.complete_while(indices, |_| true)
    }

    /// The same up to the first block that was removed meanwhile: how many became visible.
    pub fn complete_front(&mut self, indices: impl IntoIterator<Item = usize>) -> usize {
        let was_there = |outcome: &ArrivalOutcome| *outcome != ArrivalOutcome::Removed;
        let outcomes = self.complete_while(indices, was_there);
        outcomes.iter().filter(|outcome| was_there(outcome)).count()
    }

    /// Goes on after a block as long as what became of it is so.
    fn complete_while(
        &mut self,
        indices: impl IntoIterator<Item = usize>,
        goes_on: impl Fn(&ArrivalOutcome) -> bool,
    ) -> Vec<ArrivalOutcome> {
        let indices: Vec<usize> = indices.into_iter().collect();
        let mut outcomes = Vec::with_capacity(indices.len());
        let store = &self.shared.store;
        let mut hold = store.lock();
        for (at, index) in indices.into_iter().enumerate() {
            if outcomes.last().is_some_and(|last| !goes_on(last)) {
                break;
            }
            if at > 0 && at.is_multiple_of(BLOCKS_PER_HOLD) {
                hold.let_others_in();
            }
            let Some(&Arrival::Reserved { block, .. }) = self.arrivals.get(index) else {
                outcomes.push(ArrivalOutcome::Removed);
                continue;
            };
            let outcome = hold.complete_arrival(self.tier.index(), block);
            self.arrivals[index] = match outcome {
                ArrivalOutcome::Stored => Arrival::Completed { block },
                ArrivalOutcome::Existing { block } => Arrival::Completed { block },
                ArrivalOutcome::Removed => Arrival::Failed,
            };
            outcomes.push(outcome);
        }
        store.remove_orphans(hold);
        outcomes
    }

    /// Every block that is still reserved is complete and verified.
    pub fn complete_all(&mut self) -> Vec<ArrivalOutcome> {
        let reserved: Vec<usize> = self.reserved().map(|(index, ..)| index).collect();
        self.complete_each(reserved)
    }

    /// Block `index` did not arrive: its slot goes back to Reset, nothing becomes visible. In a
    /// Full group, what continues it and was complete before it leaves the tier as well.
    pub fn fail(&mut self, index: usize) {
        self.fail_each([index]);
    }

    /// The same for several blocks. What continues them is looked for once, which may take a look
    /// at the whole registry.
    pub fn fail_each(&mut self, indices: impl IntoIterator<Item = usize>) {
        let _freed = self.end_each(indices, FailedSlot::Free);
    }

    /// Block `index` could not be written because its slot is bad: the slot is never used again.
    pub fn fail_and_quarantine(&mut self, index: usize) {
        let _retired = self.end_each([index], FailedSlot::Retired);
    }

    /// The same as [`fail_each`](Self::fail_each), but the slots are free only when the answer is
    /// dropped: otherwise the next arrivals would take slots first that could not be written.
    pub fn fail_and_withhold(&mut self, indices: impl IntoIterator<Item = usize>) -> Withheld {
        let ids = self.end_each(indices, FailedSlot::Held);
        let shared = Arc::clone(&self.shared);
        Withheld::new(HeldSlots { shared, tier: self.tier.index(), ids, claim: None, losses: self.losses })
    }

    /// An index that is not reserved (any more) changes nothing. Returns the slots of the others.
    fn end_each(&mut self, indices: impl IntoIterator<Item = usize>, after: FailedSlot) -> Vec<BlockId> {
        let indices: Vec<usize> = indices.into_iter().collect();
        let mut ended = Vec::with_capacity(indices.len());
        let store = &self.shared.store;
        let mut hold = store.lock();
        for (at, index) in indices.into_iter().enumerate() {
            if at > 0 && at.is_multiple_of(BLOCKS_PER_HOLD) {
                hold.let_others_in();
            }
            if let Some(&Arrival::Reserved { block, .. }) = self.arrivals.get(index) {
                hold.fail_arrival(self.tier.index(), block, after);
                self.arrivals[index] = Arrival::Failed;
                ended.push(block);
            }
        }
        store.remove_orphans(hold);
        ended
    }

    /// Ends the arrivals: what is Present or Completed stays pinned, in order; what is still
    /// reserved fails.
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
        Pinned { shared: Arc::clone(&self.shared), tier, ids, reference: Reference::Transfer, losses }
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
        let (store, tier) = (&self.shared.store, self.tier.index());
        let mut hold = store.lock();
        for (at, arrival) in self.arrivals.iter().rev().enumerate() {
            if at > 0 && at.is_multiple_of(BLOCKS_PER_HOLD) {
                hold.let_others_in();
            }
            match *arrival {
                Arrival::Reserved { block, .. } => hold.fail_arrival(tier, block, FailedSlot::Free),
                Arrival::Present { block } | Arrival::Completed { block } => {
                    hold.drop_reference(tier, block.0, Reference::Transfer);
                }
                Arrival::Joined { .. } | Arrival::Failed | Arrival::Refused(_) => {}
            }
        }
        store.remove_orphans(hold);
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
    /// See [`BlockPool::begin_arrivals_with`](crate::BlockPool::begin_arrivals_with).
    pub(crate) fn begin(
        shared: &Arc<RegistryState>,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<Self, AllocError> {
        let inner = AnyArrivals::begin(shared, T::TIER, identities, metadata)?;
        Ok(Self { inner, tier: PhantomData })
    }

    /// The same arrivals with their tier known at run time only.
    pub fn erase(self) -> AnyArrivals {
        self.inner
    }

    /// Ends the arrivals: what is Present or Completed stays, held by a user from now on; what is
    /// still reserved fails.
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
