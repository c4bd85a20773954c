//! Registration: Complete blocks become visible.

use super::entry::LOOKUPS;
use super::slot::Usage;
use super::{Core, NONE, Pin, Presence};
use crate::error::RegisterError;
use crate::metadata::BlockMetadata;
use crate::pool::Duplicates;
use kvbm_plan::{BlockId, BlockIdentity};

impl Core {
    /// Whether all of a batch may be registered.
    pub(crate) fn check_registration(&self, identities: &[BlockIdentity]) -> Result<(), RegisterError> {
        for (index, identity) in identities.iter().enumerate() {
            self.check_identity(index, identity)?;
            let Some(parent) = identity.parent else { continue };
            if !self.is_full(identity.group) {
                continue;
            }
            // The rule is that a batch is one chain: the parent stands just before.
            let follows = |before: &BlockIdentity| {
                before.hash == parent
                    && before.group == identity.group
                    && before.position.checked_add(1) == Some(identity.position)
            };
            if index.checked_sub(1).is_some_and(|before| follows(&identities[before])) {
                continue;
            }
            let registered = self.entries.find(identity.group, parent).map(|found| &self.entries[found]);
            let fits = registered.is_some_and(|entry| {
                entry.nearest().is_some() && entry.position.checked_add(1) == Some(identity.position)
            });
            if !fits && !identities[..index].iter().any(follows) {
                return Err(RegisterError::MissingParent { index, hash: identity.hash, parent });
            }
        }
        Ok(())
    }

    /// Whether an identity makes sense here at all.
    pub(crate) fn check_identity(&self, index: usize, identity: &BlockIdentity) -> Result<(), RegisterError> {
        let (group, hash) = (identity.group, identity.hash);
        if self.group(group).is_none() {
            return Err(RegisterError::UnknownGroup { index, group, groups: self.groups.len() });
        }
        if !identity.is_consistent() {
            return Err(RegisterError::BadIdentity { index, hash, position: identity.position });
        }
        Ok(())
    }

    /// Registers a checked batch. Each block is then pinned once; where an existing block is used instead, its id
    /// takes the place of the given one.
    pub(crate) fn register(
        &mut self,
        tier: usize,
        blocks: &mut [BlockId],
        identities: &[BlockIdentity],
        duplicates: Duplicates,
        metadata: BlockMetadata,
    ) {
        let mut before = None;
        self.note_arrival(identities);
        for (at, (block, identity)) in blocks.iter_mut().zip(identities).enumerate() {
            let from_tail = (identities.len() - 1 - at) as u32;
            if at % LOOKUPS == 0 {
                let coming = || identities[at..].iter().map(|next| (next.group, next.hash));
                self.entries.fetch(coming());
                self.expect(coming());
            }
            let index = self.entries.find_or_insert(identity, before);
            before = Some(index);
            match self.entries[index].presence(tier) {
                Presence::Present if duplicates == Duplicates::Reuse => {
                    let existing = self.entries[index].slots[tier];
                    self.tiers[tier].counters.duplicates += 1;
                    self.tiers[tier].give_back(&[*block]);
                    self.pin(tier, existing, Pin::Use);
                    *block = BlockId(existing);
                }
                Presence::Present => {
                    let primary = self.entries[index].slots[tier];
                    self.fill(tier, block.0, index);
                    let tier_core = &mut self.tiers[tier];
                    tier_core.counters.duplicates += 1;
                    tier_core.slots[block.index()].link = tier_core.slots[primary as usize].link;
                    tier_core.slots[primary as usize].link = block.0;
                    self.update_evictable(index, tier);
                }
                Presence::Arriving => {
                    self.cancel_arrival(index, tier);
                    self.place(tier, block.0, index, metadata, from_tail);
                }
                Presence::Absent => self.place(tier, block.0, index, metadata, from_tail),
            }
        }
    }

    /// A Held slot becomes the primary of its entry on `tier`.
    fn place(&mut self, tier: usize, slot: u32, index: u32, metadata: BlockMetadata, from_tail: u32) {
        self.fill(tier, slot, index);
        self.recall(index, from_tail);
        let step = self.short_step();
        let entry = &mut self.entries[index];
        if entry.is_nowhere() {
            entry.priority = metadata.priority;
        }
        entry.last_step = step;
        entry.slots[tier] = slot;
        self.tiers[tier].counters.stored += 1;
        self.set_presence(index, tier, Presence::Present);
    }

    /// A Held slot becomes Registered, with one user.
    fn fill(&mut self, tier: usize, slot: u32, index: u32) {
        let tier_core = &mut self.tiers[tier];
        tier_core.held -= 1;
        tier_core.active += 1;
        let state = &mut tier_core.slots[slot as usize];
        state.entry = index;
        state.link = NONE;
        state.place = NONE;
        state.set_usage(Usage::Registered);
        state.add_ref();
    }
}
