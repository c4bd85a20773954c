//! Copies that were complete before that of their parent, which failed: they leave the tier as well, with what continues them there.
//!
//! Whoever completes a block whose parent is still on its way notes that, under the lock of the parent's shard. The note goes when the
//! parent's arrival ends. Where it failed, what is noted is removed under all locks, after the hold in which it failed.

use super::remove::Reach;
use super::select::Choice;
use super::{Core, NONE, Presence, Store};
use crate::registry::Removed;
use crate::status::EvictionReason;
use crate::sync::Leaf;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A block, by its name.
type Name = (GroupId, SequenceHash);

/// Asked at the end of every arrival and hardly ever written, so in cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Orphans {
    /// Entries on their way with something noted behind them. One of a shard that is held changes nothing in it.
    awaited: AtomicUsize,
    /// By the entry that is on its way, and the tier: what may be complete there before it.
    early: Leaf<HashMap<(u32, u8), Vec<Name>>>,
    /// On each tier, what was noted behind a block that failed.
    orphaned: Leaf<[Vec<Name>; TIERS]>,
    /// How many these are.
    waiting: AtomicUsize,
}

impl Orphans {
    fn note(&self, parent: u32, tier: usize, child: Name) {
        let mut early = self.early.lock();
        early.entry((parent, tier as u8)).or_default().push(child);
        self.awaited.store(early.len(), Relaxed);
    }

    /// What is noted behind an entry, whose shard is held: who noted it held that too.
    fn take(&self, parent: u32, tier: usize) -> Vec<Name> {
        if self.awaited.load(Relaxed) == 0 {
            return Vec::new();
        }
        let mut early = self.early.lock();
        let children = early.remove(&(parent, tier as u8)).unwrap_or_default();
        self.awaited.store(early.len(), Relaxed);
        children
    }

    fn add(&self, tier: usize, children: Vec<Name>) {
        if !children.is_empty() {
            let mut orphaned = self.orphaned.lock();
            self.waiting.fetch_add(children.len(), Relaxed);
            orphaned[tier].extend(children);
        }
    }

    /// What has to go from each tier.
    fn take_orphaned(&self) -> [Vec<Name>; TIERS] {
        if self.waiting.load(Relaxed) == 0 {
            return Default::default();
        }
        let mut orphaned = self.orphaned.lock();
        self.waiting.store(0, Relaxed);
        std::mem::take(&mut *orphaned)
    }
}

impl Store {
    /// Removes what was complete before its parent failed. Called by whoever ends arrivals, with no shard held.
    pub(crate) fn remove_orphans(&self) {
        for (tier, mut names) in self.orphans.take_orphaned().into_iter().enumerate() {
            if names.is_empty() {
                continue;
            }
            let core = self.lock_all();
            names.retain(|&name| core.stays_orphan(tier, name));
            drop(core);
            if !names.is_empty() {
                let (tiers, mut removed) = (TierMask::only(Tier::SLOTTED[tier]), Removed::default());
                let how = (Reach::Ends, EvictionReason::ParentFailed);
                self.remove_in_parts(&Choice::Subtrees(&names), tiers, how, &mut removed);
            }
        }
    }
}

impl Core<'_> {
    /// Whether the parent of a block that arrives on `tier` is there or on its way, which is noted. The parent's shard is held.
    pub(super) fn awaits(&self, parent: u32, tier: usize, child: u32) -> bool {
        let store = self.store;
        let presence = store.entries[parent].presence(tier);
        if presence == Presence::Arriving {
            let child = &store.entries[child];
            store.orphans.note(parent, tier, (child.group(), child.hash()));
        }
        presence != Presence::Absent
    }

    /// The arrival of a block failed.
    pub(super) fn orphan(&self, parent: u32, tier: usize) {
        self.store.orphans.add(tier, self.store.orphans.take(parent, tier));
    }

    /// A block is not on its way any more.
    pub(super) fn arrival_ended(&self, index: u32, tier: usize) {
        drop(self.store.orphans.take(index, tier));
    }

    /// Whether a block is on `tier`, or on its way there, and its parent neither. Where that is on its way again, it is noted behind it once
    /// more. All shards are held.
    fn stays_orphan(&self, tier: usize, (group, hash): Name) -> bool {
        let entries = &self.store.entries;
        let Some(index) = self.find(group, hash) else { return false };
        let parent = entries[index].parent.get();
        entries[index].presence(tier) != Presence::Absent
            && parent != NONE
            && !self.awaits(parent, tier, index)
    }
}
