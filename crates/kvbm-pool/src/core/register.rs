//! Registration: Complete blocks become visible. One hold of the lock registers a whole batch, all
//! or nothing.

use super::entries::{BATCH, Entries};
use super::registered::Reference;
use super::shares::Claim;
use super::state::Core;
use crate::entry::Presence;
use crate::error::RegisterError;
use crate::metadata::{BlockMetadata, Duplicates};
use kvbm_plan::{BlockId, BlockIdentity, Tier};

/// The blocks to register, and how.
#[derive(Clone, Copy)]
pub(crate) struct RegisterBatch<'a> {
    pub tier: usize,
    pub identities: &'a [BlockIdentity],
    pub duplicates: Duplicates,
    pub metadata: BlockMetadata,
    /// The tenant for which the slots were allocated.
    pub claim: Claim,
    /// Whether the tier lost its blocks since the slots were allocated.
    pub is_lost: bool,
}

/// Whether `next` is the block after `before`.
fn follows(before: &BlockIdentity, next: &BlockIdentity) -> bool {
    next.parent == Some(before.hash)
        && before.group == next.group
        && before.position.checked_add(1) == Some(next.position)
}

impl RegisterBatch<'_> {
    /// Registers the batch, all or nothing. Each block then has one reference. Where an existing
    /// block is used instead, its id takes the place of the given one in `blocks`.
    pub(crate) fn register(self, core: &mut Core, blocks: &mut [BlockId]) -> Result<(), RegisterError> {
        let Self { tier, identities, .. } = self;
        core.tiers[tier].refuse_lost(Tier::SLOTTED[tier], self.is_lost)?;
        self.check(&core.entries)?;
        core.policy.note_arrival(identities, &core.entries);
        let mut entered = std::mem::take(&mut core.entered);
        self.enter_all(core, &mut entered);
        let mut from_tail = identities.len() as u32;
        let parts = blocks.chunks_mut(BATCH).zip(entered.chunks(BATCH));
        for ((blocks, entered), identities) in parts.zip(identities.chunks(BATCH)) {
            core.policy.prefetch(identities.iter().map(|next| (next.group, next.hash)));
            for (block, &index) in blocks.iter_mut().zip(entered) {
                from_tail -= 1;
                self.register_one(core, from_tail, block, index);
            }
        }
        core.tenants.let_go(tier, self.claim, entered.len());
        core.entered = entered;
        Ok(())
    }

    /// Whether all of the batch can be registered.
    fn check(&self, entries: &Entries) -> Result<(), RegisterError> {
        let identities = self.identities;
        for (index, identity) in identities.iter().enumerate() {
            entries.check_identity(index, identity)?;
            let Some(parent) = identity.parent.filter(|_| entries.is_full(identity.group)) else {
                continue;
            };
            // As a rule a batch is one chain: the parent stands just before.
            let before = index.checked_sub(1).map(|before| &identities[before]);
            if before.is_some_and(|before| follows(before, identity)) || entries.has_parent(identity) {
                continue;
            }
            if !identities[..index].iter().any(|before| follows(before, identity)) {
                return Err(RegisterError::MissingParent { index, hash: identity.hash, parent });
            }
        }
        Ok(())
    }

    /// Finds or makes the entries of a checked batch, in order.
    fn enter_all(&self, core: &mut Core, entered: &mut Vec<u32>) {
        entered.clear();
        for (at, identity) in self.identities.iter().enumerate() {
            if at.is_multiple_of(BATCH) {
                let next = self.identities[at..].iter().map(|next| (next.group, next.hash));
                core.entries.prefetch_buckets(next);
            }
            let index = core.find_or_insert(identity, entered.last().copied());
            entered.push(index);
        }
    }

    /// The block of an entry is registered in the slot `block`, or `block` becomes the slot that
    /// has it already.
    #[inline]
    fn register_one(&self, core: &mut Core, from_tail: u32, block: &mut BlockId, index: u32) {
        let tier = self.tier;
        match core.entry(index).presence(tier) {
            Presence::Present => return self.register_duplicate(core, block, index),
            Presence::Arriving => core.cancel_arrival(index, tier),
            Presence::Absent => {}
        }
        core.fill(tier, block.0, index);
        core.tiers[tier].counters.stored += 1;
        let entry = &core.entries[index];
        core.policy.recall(entry, from_tail);
        if entry.is_nowhere() {
            entry.priority.set(self.metadata.priority);
        }
        entry.slots[tier].set(block.0);
        core.note_time(index);
        core.set_presence(index, tier, Presence::Present);
    }

    #[cold]
    fn register_duplicate(&self, core: &mut Core, block: &mut BlockId, index: u32) {
        let tier = self.tier;
        let existing = core.entry(index).slot(tier);
        core.tiers[tier].counters.duplicates += 1;
        match self.duplicates {
            Duplicates::Reuse => {
                core.tiers[tier].give_back(&[*block]);
                core.add_reference(tier, existing, Reference::Use);
                *block = BlockId(existing);
            }
            Duplicates::Allow => {
                core.fill(tier, block.0, index);
                let primary = core.slot(tier, existing);
                core.slot(tier, block.0).link.set(primary.link.get());
                primary.link.set(block.0);
                core.may_be_evicted(index, tier);
            }
        }
    }
}
