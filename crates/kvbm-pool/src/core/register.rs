//! Registration: Complete blocks become visible. One hold of the lock registers a whole batch, all
//! or nothing.

use super::entries::BATCH;
use super::reference::Reference;
use super::shares::Claim;
use super::state::Core;
use crate::entry::Presence;
use crate::error::RegisterError;
use crate::losses::Lost;
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

impl Core {
    /// Registers a batch, all or nothing. Each block then has one reference. Where an existing
    /// block is used instead, its id takes the place of the given one in `blocks`.
    pub(crate) fn register(
        &mut self,
        batch: RegisterBatch<'_>,
        blocks: &mut [BlockId],
    ) -> Result<(), RegisterError> {
        let RegisterBatch { tier, identities, .. } = batch;
        self.refuse_lost(tier, batch.is_lost)?;
        self.check_registration(identities)?;
        self.note_arrival(identities);
        let mut entered = std::mem::take(&mut self.entered);
        self.enter_all(identities, &mut entered);
        let mut from_tail = identities.len() as u32;
        let parts = blocks.chunks_mut(BATCH).zip(entered.chunks(BATCH));
        for ((blocks, entered), identities) in parts.zip(identities.chunks(BATCH)) {
            self.prefetch_policy(identities.iter().map(|next| (next.group, next.hash)));
            for (block, &index) in blocks.iter_mut().zip(entered) {
                from_tail -= 1;
                self.register_one(batch, from_tail, block, index);
            }
        }
        self.tenants.let_go(tier, batch.claim, entered.len());
        self.entered = entered;
        Ok(())
    }

    /// Refuses and counts a batch whose tier lost its blocks since the batch was allocated.
    #[inline]
    pub(crate) fn refuse_lost(&mut self, tier: usize, is_lost: bool) -> Result<(), RegisterError> {
        if !is_lost {
            return Ok(());
        }
        self.tiers[tier].counters.registrations_lost += 1;
        Err(RegisterError::Lost(Lost { tier: Tier::SLOTTED[tier] }))
    }

    /// Whether a block with this identity can exist here.
    pub(crate) fn check_identity(&self, index: usize, identity: &BlockIdentity) -> Result<(), RegisterError> {
        let (group, hash) = (identity.group, identity.hash);
        if self.group(group).is_none() {
            let groups = self.groups.len();
            return Err(RegisterError::UnknownGroup { index, group, groups });
        }
        if !identity.is_consistent() || identity.parent == Some(hash) {
            return Err(RegisterError::BadIdentity { index, hash, position: identity.position });
        }
        Ok(())
    }

    /// Whether all of a batch can be registered.
    fn check_registration(&self, identities: &[BlockIdentity]) -> Result<(), RegisterError> {
        for (index, identity) in identities.iter().enumerate() {
            self.check_identity(index, identity)?;
            let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) else {
                continue;
            };
            // As a rule a batch is one chain: the parent stands just before.
            let before = index.checked_sub(1).map(|before| &identities[before]);
            if before.is_some_and(|before| follows(before, identity)) || self.has_parent(identity) {
                continue;
            }
            if !identities[..index].iter().any(|before| follows(before, identity)) {
                return Err(RegisterError::MissingParent { index, hash: identity.hash, parent });
            }
        }
        Ok(())
    }

    /// Whether the parent that a block needs is on some tier, at the position before.
    pub(crate) fn has_parent(&self, identity: &BlockIdentity) -> bool {
        let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) else { return true };
        self.find(identity.group, parent).is_some_and(|found| {
            let entry = self.entry(found);
            entry.nearest().is_some() && entry.comes_before(identity.position)
        })
    }

    /// Finds or makes the entries of a checked batch, in order.
    fn enter_all(&mut self, identities: &[BlockIdentity], entered: &mut Vec<u32>) {
        entered.clear();
        for (at, identity) in identities.iter().enumerate() {
            if at.is_multiple_of(BATCH) {
                self.prefetch_buckets(identities[at..].iter().map(|next| (next.group, next.hash)));
            }
            let index = self.find_or_insert(identity, entered.last().copied());
            entered.push(index);
        }
    }

    /// The block of an entry is registered in the slot `block`, or `block` becomes the slot that
    /// has it already.
    #[inline]
    fn register_one(&mut self, batch: RegisterBatch<'_>, from_tail: u32, block: &mut BlockId, index: u32) {
        let RegisterBatch { tier, metadata, .. } = batch;
        match self.entry(index).presence(tier) {
            Presence::Present => return self.register_duplicate(batch, block, index),
            Presence::Arriving => self.cancel_arrival(index, tier),
            Presence::Absent => {}
        }
        self.fill(tier, block.0, index);
        self.tiers[tier].counters.stored += 1;
        self.recall(index, from_tail);
        let entry = self.entry(index);
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.last_step.set(self.short_step());
        self.expiry.note(index);
        entry.slots[tier].set(block.0);
        self.set_presence(index, tier, Presence::Present);
    }

    #[cold]
    fn register_duplicate(&mut self, batch: RegisterBatch<'_>, block: &mut BlockId, index: u32) {
        let tier = batch.tier;
        let existing = self.entry(index).slot(tier);
        self.tiers[tier].counters.duplicates += 1;
        match batch.duplicates {
            Duplicates::Reuse => {
                self.give_back(tier, &[*block]);
                self.add_reference(tier, existing, Reference::Use);
                *block = BlockId(existing);
            }
            Duplicates::Allow => {
                self.fill(tier, block.0, index);
                let primary = self.slot(tier, existing);
                self.slot(tier, block.0).link.set(primary.link.get());
                primary.link.set(block.0);
                self.may_be_evicted(index, tier);
            }
        }
    }

    /// A Held slot becomes Registered, with one user.
    #[inline]
    fn fill(&mut self, tier: usize, slot: u32, index: u32) {
        self.slot(tier, slot).register(index);
        self.tenants.count(tier, self.entries[index as usize].namespace(), true);
        let counts = &mut self.tiers[tier];
        counts.held -= 1;
        counts.active += 1;
    }
}
