//! Registration: Complete blocks become visible. A batch is registered in one hold, all or nothing.
//!
//! A batch that continues its chain goes into one shard: that of its parent, unless something else continues the parent there
//! already (the end of a shared prompt); then the calling thread's own. First all of its blocks get entries there. Where one of them
//! has an entry in another shard (the same blocks, registered by another thread), nothing has become visible yet, and the batch is
//! left to a hold of all shards. So it is, also with one shard, where a hash comes twice or no entry is vacant.

use super::index::LOOKUPS;
use super::table::Mixed;
use super::tenants::Claim;
use super::tiers::TierPart;
use super::{Core, NONE, Pin, Presence, Store};
use crate::error::RegisterError;
use crate::losses::Losses;
use crate::metadata::BlockMetadata;
use crate::pool::Duplicates;
use kvbm_plan::{BlockId, BlockIdentity};

/// What is registered, and how.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    pub tier: usize,
    pub identities: &'a [BlockIdentity],
    pub duplicates: Duplicates,
    pub metadata: BlockMetadata,
    /// For whom the slots were allocated.
    pub claim: Claim,
    /// When.
    pub losses: Losses,
}

/// A parent in another shard, which counts the first block of a batch already: one child and one link more than it has.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(super) parent: u32,
    /// [`Store::bereaved`] when it began to.
    pub(super) bereaved: u64,
}

impl Store {
    /// Registers a batch, all or nothing. Each block is then pinned once; where an existing block is used instead, its id
    /// takes the place of the given one in `blocks`.
    pub(crate) fn register(&self, batch: Batch<'_>, blocks: &mut [BlockId]) -> Result<(), RegisterError> {
        let Batch { tier, identities, .. } = batch;
        let (mut kept, mut noted) = (None, false);
        if self.is_chain(identities) {
            let (mut core, place) = self.find_shard(batch)?;
            // Asked in the hold in which the blocks come: a loss that is counted later takes them too.
            if !core.lacks(&batch) && core.still_keeps(place) {
                // With one shard it is clear that the blocks come here. What the policy looks at is none of them.
                noted = self.is_whole();
                if noted {
                    core.note_arrival(identities);
                }
                if core.enter_chain(identities, place) {
                    if !noted {
                        core.note_arrival(identities);
                    }
                    core.register_entered(batch, blocks);
                    return Ok(());
                }
            }
            kept = place;
        }
        let home = self.homes.home(0);
        let mut core = self.lock_all();
        if let Some(Place { parent, .. }) = kept {
            core.give_up_place(parent, tier);
        }
        core.refuse_lost(&batch)?;
        core.check_registration(identities, false)?;
        if !noted {
            core.note_arrival(identities);
        }
        core.enter_anywhere(identities, home);
        core.register_entered(batch, blocks);
        Ok(())
    }

    /// Whether each of the identities continues the one before, in a Full group.
    pub(super) fn is_chain(&self, identities: &[BlockIdentity]) -> bool {
        let Some(first) = identities.first() else { return false };
        self.is_full(first.group) && identities.windows(2).all(|pair| follows(&pair[0], &pair[1]))
    }

    /// Whether an identity makes sense here at all.
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

    /// Locks the shard where a chain goes; in another one its parent keeps a place for it.
    fn find_shard(&self, batch: Batch<'_>) -> Result<(Core<'_>, Option<Place>), RegisterError> {
        let Batch { tier, identities, .. } = batch;
        let mut core = self.lock_home(identities.len());
        let home = core.number();
        let mut parent = None;
        if !self.is_whole()
            && let Some(hash) = identities[0].parent
        {
            (core, parent) = core.seek(identities[0].group, hash);
        }
        core.refuse_lost(&batch)?;
        core.check_registration(identities, true)?;
        let Some(parent) = parent.filter(|_| !core.holds_all() && core.number() != home) else {
            return Ok((core, None));
        };
        // Only what is on this tier itself cannot be evicted for a child that is counted there.
        let entry = &self.entries[parent];
        if entry.children(tier) == 0 || entry.presence(tier) != Presence::Present {
            return Ok((core, None));
        }
        entry.add_child(tier);
        entry.add_link();
        let bereaved = self.bereaved();
        Ok((core.go(home), Some(Place { parent, bereaved })))
    }
}

/// Whether `next` is the block after `before`.
fn follows(before: &BlockIdentity, next: &BlockIdentity) -> bool {
    next.parent == Some(before.hash)
        && before.group == next.group
        && before.position.checked_add(1) == Some(next.position)
}

impl Core<'_> {
    /// Whether all of a batch may be registered. In a chain each block but the first has the parent that it names.
    fn check_registration(&self, identities: &[BlockIdentity], is_chain: bool) -> Result<(), RegisterError> {
        for (index, identity) in identities.iter().enumerate() {
            self.store.check_identity(index, identity)?;
            if is_chain && index > 0 {
                continue;
            }
            let Some(parent) = identity.parent.filter(|_| self.store.is_full(identity.group)) else {
                continue;
            };
            // The rule is that a batch is one chain: the parent stands just before.
            let before = index.checked_sub(1).map(|before| &identities[before]);
            if before.is_some_and(|before| follows(before, identity)) {
                continue;
            }
            let fits = self.find(identity.group, parent).is_some_and(|found| {
                let entry = &self.store.entries[found];
                self.holds(found) && entry.nearest().is_some() && entry.comes_before(identity.position)
            });
            if !fits && !identities[..index].iter().any(|before| follows(before, identity)) {
                return Err(RegisterError::MissingParent { index, hash: identity.hash, parent });
            }
        }
        Ok(())
    }

    /// The place that was kept for a block is not needed.
    pub(super) fn give_up_place(&mut self, parent: u32, tier: usize) {
        let entry = &self.store.entries[parent];
        self.child_left((parent, entry), tier);
        entry.drop_link();
        self.unused(parent);
    }

    /// Whether a parent in another shard, which keeps a place, has been on its tier all the time. It cannot be evicted, and what removes
    /// blocks that have children holds all shards, this one too: the answer stays true as long as this shard is held. That it is there
    /// now would not be enough: it may have come again this moment, and what is told of that may have no number yet.
    fn still_keeps(&self, place: Option<Place>) -> bool {
        place.is_none_or(|Place { bereaved, .. }| self.store.bereaved() == bereaved)
    }

    /// Makes entries for the blocks of a chain in the shard that is held, behind a parent there or one that keeps a place. False
    /// where a block has an entry that cannot be used here, or no entry is vacant: then nothing of it is left when this hold ends,
    /// and the parent still keeps the place.
    pub(super) fn enter_chain(&mut self, identities: &[BlockIdentity], place: Option<Place>) -> bool {
        let Some(first) = identities.first() else {
            self.first_mut().entered.clear();
            return true;
        };
        let mut above = match place {
            Some(Place { parent, .. }) => Some(parent),
            None => first.parent.and_then(|parent| self.find(first.group, parent)),
        };
        if place.is_none() && above.is_some_and(|above| !self.holds(above)) {
            return false;
        }
        let mut entered = std::mem::take(&mut self.first_mut().entered);
        entered.clear();
        let mut parts = identities.chunks(LOOKUPS).peekable();
        let mut place = place;
        // The block that the place was for.
        let mut placed = None;
        let mut complete = true;
        let mut coming = self.ask_table(parts.peek().copied().unwrap_or_default());
        while complete && let Some(part) = parts.next() {
            let next = self.ask_table(parts.peek().copied().unwrap_or_default());
            let keys = std::mem::replace(&mut coming, next);
            let mut found = self.find_new(part, &keys);
            let kept = place.take();
            complete = self.enter_part(part, &keys, &mut found[..part.len()], above, kept);
            if kept.is_some() && complete {
                placed = Some(found[0]);
            }
            above = found[part.len() - 1..].first().copied();
            entered.extend_from_slice(&found[..part.len()]);
        }
        if !complete {
            // The place stays the caller's, who gives it up: with it goes what the parent has counted, once.
            if let Some(index) = placed {
                self.store.entries[index].parent.set(NONE);
            }
            // Those that were made go again, the last ones first; of those that were there nothing has changed.
            for &index in entered.iter().rev() {
                if index != NONE && self.holds(index) {
                    self.unused(index);
                }
            }
        }
        self.first_mut().entered = entered;
        complete
    }

    /// Makes entries for a part of a chain where `found` has none. A place is for the first of the chain, which is new then.
    #[inline]
    fn enter_part(
        &mut self,
        part: &[BlockIdentity],
        keys: &[Mixed; LOOKUPS],
        found: &mut [u32],
        mut above: Option<u32>,
        mut place: Option<Place>,
    ) -> bool {
        let store = self.store;
        // What is there must belong here, and its parent too: then its coming is counted there directly.
        let usable = |(&index, block): (&u32, &BlockIdentity)| {
            let parent = store.entries[index].parent.get();
            self.holds(index) && if parent == NONE { block.parent.is_none() } else { self.holds(parent) }
        };
        let there = found.iter().zip(part).filter(|(index, _)| **index != NONE);
        if !there.clone().all(usable) || (place.is_some() && found[0] != NONE) {
            return false;
        }
        let mut new = [false; LOOKUPS];
        for (new, index) in new.iter_mut().zip(&*found) {
            *new = *index == NONE;
        }
        if !self.insert_many(self.number(), part, keys, found) {
            return false;
        }
        for (&index, new) in found.iter().zip(new) {
            if let Some(Place { parent, .. }) = place.take() {
                store.entries[index].parent.set(parent);
            } else if let Some(above) = above.filter(|_| new) {
                self.link(index, above);
            }
            above = Some(index);
        }
        true
    }

    /// Makes entries for a checked batch. All shards are held; blocks without a parent come to `home`.
    fn enter_anywhere(&mut self, identities: &[BlockIdentity], home: usize) {
        let mut entered = std::mem::take(&mut self.first_mut().entered);
        entered.clear();
        for (at, identity) in identities.iter().enumerate() {
            if at.is_multiple_of(LOOKUPS) {
                self.fetch(identities[at..].iter().map(|next| (next.group, next.hash)));
            }
            entered.push(self.find_or_insert(identity, entered.last().copied(), home));
        }
        self.first_mut().entered = entered;
    }

    /// Registers a batch whose blocks all have entries, which are held.
    fn register_entered(&mut self, batch: Batch<'_>, blocks: &mut [BlockId]) {
        let entered = std::mem::take(&mut self.first_mut().entered);
        let mut from_tail = batch.identities.len() as u32;
        let parts = blocks.chunks_mut(LOOKUPS).zip(entered.chunks(LOOKUPS));
        for ((blocks, entered), identities) in parts.zip(batch.identities.chunks(LOOKUPS)) {
            self.expect(identities.iter().map(|next| (next.group, next.hash)));
            for (block, &index) in blocks.iter_mut().zip(entered) {
                from_tail -= 1;
                self.register_one(batch, from_tail, block, index);
            }
        }
        let shard = self.first_mut();
        shard.tenants.let_go(batch.tier, batch.claim, entered.len());
        shard.entered = entered;
    }

    /// A block with entry `index`, which is held, is registered in the slot `block`, or `block` becomes the one that is there.
    #[inline]
    fn register_one(&mut self, batch: Batch<'_>, from_tail: u32, block: &mut BlockId, index: u32) {
        let Batch { tier, metadata, .. } = batch;
        let entry = &self.store.entries[index];
        let before = entry.presence(tier);
        if before == Presence::Present {
            return self.register_another(batch, block, index);
        }
        if before == Presence::Arriving {
            self.cancel_arrival(index, tier);
        }
        self.fill(tier, block.0, index).counters.stored += 1;
        self.recall(entry, from_tail);
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.last_step.set(self.short_step());
        entry.slots[tier].set(block.0);
        match before {
            Presence::Absent => {
                self.change_presence((index, entry), tier, Presence::Absent, Presence::Present);
            }
            _ => self.set_presence(index, tier, Presence::Present),
        }
    }

    /// The same for one that is there already.
    #[cold]
    fn register_another(&mut self, batch: Batch<'_>, block: &mut BlockId, index: u32) {
        let (store, tier) = (self.store, batch.tier);
        let entry = &store.entries[index];
        let existing = entry.slot(tier);
        match batch.duplicates {
            Duplicates::Reuse => {
                self.part(index, tier).counters.duplicates += 1;
                store.give_back(tier, &[*block]);
                self.pin(tier, existing, Pin::Use);
                *block = BlockId(existing);
            }
            Duplicates::Allow => {
                let slots = &store.slots[tier];
                let primary = &slots[existing as usize];
                self.fill(tier, block.0, index).counters.duplicates += 1;
                slots[block.index()].link.set(primary.link.get());
                primary.link.set(block.0);
                self.waits_no_more((index, entry), tier);
            }
        }
    }

    /// A Held slot becomes Registered, with one user. Returns where its tier's blocks are counted.
    #[expect(
        clippy::inline_always,
        reason = "a call would be a hundredth of what a block costs in a small pool"
    )]
    #[inline(always)]
    fn fill(&mut self, tier: usize, slot: u32, index: u32) -> &mut TierPart {
        self.store.slots[tier][slot as usize].register(index);
        self.count_for_tenant(index, tier, true);
        let part = self.part(index, tier);
        part.drop_held(1);
        part.active += 1;
        part
    }
}
