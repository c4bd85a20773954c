//! Users of registered slots: pins that come and go.

use super::prospects::ENDED;
use super::slot::Usage;
use super::{Core, NONE, Pin, Presence, Store};
use crate::near;
use kvbm_plan::{BlockId, BlockIdentity};

/// A slot is asked for twice so many blocks before it is its turn, the entry that it names so many.
const STEPS_AHEAD: usize = 16;

impl Store {
    /// Does something for each of `blocks`, which the caller pins, under the lock of its shard.
    pub(super) fn for_each(
        &self,
        blocks: impl IntoIterator<Item = (usize, BlockId)>,
        mut work: impl FnMut(&mut Core<'_>, usize, u32),
    ) {
        let mut blocks = blocks.into_iter();
        let Some((tier, first)) = blocks.next() else { return };
        let mut core = self.lock(self.shard_of_slot(tier, first.0));
        work(&mut core, tier, first.0);
        if self.is_whole() {
            blocks.for_each(|(tier, block)| work(&mut core, tier, block.0));
            return;
        }
        for (tier, block) in blocks {
            let shard = self.shard_of_slot(tier, block.0);
            if shard != core.number() {
                core = core.go(shard);
            }
            work(&mut core, tier, block.0);
        }
    }

    /// One more user of each of `blocks`, which the caller already pins.
    pub(crate) fn pin_again(&self, tier: usize, blocks: &[BlockId], pin: Pin) {
        self.for_each(blocks.iter().map(|&block| (tier, block)), |core, tier, slot| {
            core.pin(tier, slot, pin);
        });
    }

    /// One user less of each of these blocks.
    pub(crate) fn unpin_each(&self, blocks: impl IntoIterator<Item = (usize, BlockId)>, pin: Pin) {
        self.for_each(blocks, |core, tier, slot| core.unpin(tier, slot, pin));
    }

    /// One user less of each of `blocks`, the last block first, so that the first is the youngest.
    pub(crate) fn unpin_all(&self, tier: usize, blocks: &[BlockId], pin: Pin) {
        self.unpin_each(self.coming_near(tier, blocks), pin);
    }

    /// `blocks`, which the caller pins, the last one first. What is kept of each is asked for some blocks before.
    fn coming_near<'a>(
        &'a self,
        tier: usize,
        blocks: &'a [BlockId],
    ) -> impl Iterator<Item = (usize, BlockId)> + 'a {
        let slots = &self.slots[tier];
        (0..blocks.len()).rev().map(move |at| {
            if let Some(far) = at.checked_sub(2 * STEPS_AHEAD) {
                near::prefetch(&slots[blocks[far].index()]);
            }
            if let Some(next) = at.checked_sub(STEPS_AHEAD) {
                near::prefetch(&self.entries[slots[blocks[next].index()].entry.get()]);
            }
            (tier, blocks[at])
        })
    }

    /// What a pinned block holds.
    pub(crate) fn identity(&self, tier: usize, block: BlockId) -> BlockIdentity {
        let core = self.lock(self.shard_of_slot(tier, block.0));
        core.store.entries.identity(self.slots[tier][block.index()].entry.get())
    }

    /// Whether pinned blocks are still registered in the slots where they are pinned, in order.
    pub(crate) fn are_registered(&self, blocks: impl IntoIterator<Item = (usize, BlockId)>) -> Vec<bool> {
        let mut registered = Vec::new();
        self.for_each(blocks, |core, tier, slot| {
            registered.push(core.store.slots[tier][slot as usize].usage() == Usage::Registered);
        });
        registered
    }

    /// How many of `blocks`, from the first on, are on another tier as well. The caller pins them, so their entries stay; without a lock this
    /// is a hint, as any answer would be by the time that it is used.
    pub(crate) fn prefix_on(&self, tier: usize, blocks: &[BlockId], other: usize) -> usize {
        let entry = |block: &BlockId| &self.entries[self.slots[tier][block.index()].entry.get()];
        blocks.iter().take_while(|block| entry(block).presence(other) == Presence::Present).count()
    }

    /// Priority of a pinned block.
    pub(crate) fn priority(&self, tier: usize, block: BlockId) -> u8 {
        let core = self.lock(self.shard_of_slot(tier, block.0));
        core.store.entries[self.slots[tier][block.index()].entry.get()].priority.get()
    }

    /// Priorities of pinned blocks, in order.
    pub(crate) fn priorities(&self, tier: usize, blocks: &[BlockId]) -> Vec<u8> {
        let mut priorities = Vec::with_capacity(blocks.len());
        self.for_each(blocks.iter().map(|&block| (tier, block)), |core, tier, slot| {
            let index = core.store.slots[tier][slot as usize].entry.get();
            priorities.push(core.store.entries[index].priority.get());
        });
        priorities
    }

    /// What pinned blocks hold, in order.
    pub(crate) fn identities(&self, tier: usize, blocks: &[BlockId], out: &mut Vec<BlockIdentity>) {
        self.for_each(blocks.iter().map(|&block| (tier, block)), |core, tier, slot| {
            out.push(core.store.entries.identity(core.store.slots[tier][slot as usize].entry.get()));
        });
    }

    /// Pins of so many blocks are for another reason now.
    pub(crate) fn repin(&self, tier: usize, blocks: usize, pin: Pin) {
        let mut core = self.lock_any();
        let counts = &mut core.first_mut().tiers[tier].transfer_pins;
        *counts = match pin {
            Pin::Transfer => counts.wrapping_add(blocks as u64),
            Pin::Use => counts.wrapping_sub(blocks as u64),
        };
    }
}

impl Core<'_> {
    /// One more user of a Registered slot.
    #[inline]
    pub(crate) fn pin(&mut self, tier: usize, slot: u32, pin: Pin) {
        let state = &self.store.slots[tier][slot as usize];
        if state.is_listed() {
            self.unlist(tier, slot);
        }
        let index = state.entry.get();
        let idle = state.refs() == 0 && state.usage() == Usage::Registered;
        if idle {
            self.count_idle_for_tenant(index, tier, false);
        }
        let part = self.part(index, tier);
        if idle {
            part.inactive -= 1;
            part.active += 1;
        }
        state.add_ref();
        if pin == Pin::Transfer {
            part.transfer_pins = part.transfer_pins.wrapping_add(1);
        }
    }

    /// One user less.
    #[inline]
    pub(crate) fn unpin(&mut self, tier: usize, slot: u32, pin: Pin) {
        let store = self.store;
        let slots = &store.slots[tier];
        let state = &slots[slot as usize];
        let left = state.drop_ref();
        let (usage, index, placed) = (state.usage(), state.entry.get(), state.place.get() != NONE);
        let step = self.short_step();
        let has_policy = self.first().policy.is_some();
        let part = self.part(index, tier);
        if pin == Pin::Transfer {
            part.transfer_pins = part.transfer_pins.wrapping_sub(1);
        }
        if usage != Usage::Registered {
            if left == 0 {
                self.last_user_of_removed(tier, slot);
            }
            return;
        }
        let entry = &store.entries[index];
        if entry.slot(tier) != slot {
            if left == 0 {
                self.drop_duplicate(tier, slot);
            }
            return;
        }
        if left == 0 {
            part.active -= 1;
            part.inactive += 1;
        }
        match pin {
            Pin::Use => {
                entry.last_step.set(step);
                if entry.memory() == ENDED && !has_policy {
                    part.order.push_old(slot, slots);
                } else {
                    part.order.push_young(slot, slots);
                }
            }
            // It came up for eviction while it was copied: it is still among the oldest.
            Pin::Transfer if left == 0 && !placed => part.order.push_old(slot, slots),
            Pin::Transfer => {}
        }
        if left == 0 {
            entry.take_fresh();
            self.count_idle_for_tenant(index, tier, true);
            self.update_evictable(index, tier);
        }
    }

    /// The last user of a slot that is no longer in the registry is gone.
    fn last_user_of_removed(&mut self, tier: usize, slot: u32) {
        let store = self.store;
        let state = &store.slots[tier][slot as usize];
        let index = state.entry.get();
        match state.usage() {
            Usage::Detached => store.free[tier].lock().put(&store.slots[tier], slot),
            Usage::Tainted => store.free[tier].lock().retire(&store.slots[tier], slot),
            _ => return,
        }
        self.part(index, tier).detached -= 1;
        self.count_for_tenant(index, tier, false);
        store.entries[index].drop_link();
        self.unused(index);
    }
}
