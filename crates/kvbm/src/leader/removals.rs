//! What was removed from G3 and a rank is not known to have made durable. Its worker hears of it when it starts again.

use super::Leader;
use super::ranks::Ranks;
use super::recovery::Part;
use kvbm_plan::{BlockId, BlockIdentity, Command, NamespaceId, Rank, RecoveredBlock, Tier};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// What is removed from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Namespace(NamespaceId),
    /// Whatever lies in slots that nothing uses.
    Unused,
}

/// Beyond so many namespaces, or slots, a rank is told to drop all that is unused.
const MAX_MISSED: usize = 1024;
const MAX_SLOTS: usize = 1 << 16;
// A part of slots finds room where none are noted.
const _: () = assert!(Command::MAX_RELEASE <= MAX_SLOTS);

/// Removals that a rank may not have: it could not be told, or may have ended before its disk had them. What stays noted for too long costs
/// blocks on that disk, and is never wrong.
#[derive(Default)]
pub(super) struct Missed {
    /// Each with its number, where the worker was told.
    removals: Vec<(Removal, Option<u64>)>,
    /// The same of slots: a block that was on its way when it was removed may be complete there.
    slots: BTreeMap<BlockId, Option<u64>>,
    /// The last such number.
    told: u64,
    /// What a worker that has started again found in such slots, as far as it has said that.
    found: BTreeMap<BlockId, BlockIdentity>,
    /// Slots that were noted since it began to say that: of these it may have said before what is in them. `None` where no worker says that.
    noted_since: Option<BTreeSet<BlockId>>,
    /// The flush that a new worker was asked for behind all of it, by its token, and how far it had been told then.
    catching_up: Option<(u64, u64)>,
}

/// What a new worker has to be told.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    removals: Vec<Removal>,
    slots: Vec<BlockId>,
}

impl Missed {
    fn find(&mut self, removal: Removal) -> Option<&mut (Removal, Option<u64>)> {
        self.removals.iter_mut().find(|(noted, _)| *noted == removal)
    }

    /// Before the rank is told, also where it was told earlier.
    fn note(&mut self, removal: Removal) {
        let is_full = self.removals.len() >= MAX_MISSED && self.find(removal).is_none();
        let removal = if is_full { Removal::Unused } else { removal };
        match self.find(removal) {
            Some((_, told)) => *told = None,
            None => self.removals.push((removal, None)),
        }
    }

    fn note_slots(&mut self, slots: &[BlockId]) {
        if self.slots.len() + slots.len() > MAX_SLOTS {
            self.note_unused();
        }
        self.slots.extend(slots.iter().map(|&slot| (slot, None)));
        if let Some(since) = &mut self.noted_since {
            since.extend(slots);
        }
    }

    /// From now on all that is unused is noted in place of slots: told, where each of them was.
    fn note_unused(&mut self) {
        let earlier = self.find(Removal::Unused).map(|(_, told)| *told);
        let each = self.slots.values().copied().chain(earlier);
        let told = each.reduce(|told, one| Some(told?.max(one?))).flatten();
        self.slots.clear();
        self.note(Removal::Unused);
        if let Some((_, noted)) = self.find(Removal::Unused) {
            *noted = told;
        }
    }

    fn is_told(&mut self, removal: Removal) {
        let number = self.told + 1;
        if let Some((_, told)) = self.find(removal) {
            *told = Some(number);
            self.told = number;
        }
    }

    fn are_told(&mut self, slots: &[BlockId]) {
        self.told += 1;
        for slot in slots {
            if let Some(told) = self.slots.get_mut(slot) {
                *told = Some(self.told);
            }
        }
    }

    /// What was told up to this number is durable.
    fn durable(&mut self, upto: u64) {
        let stays = |told: &Option<u64>| told.is_none_or(|told| told > upto);
        self.removals.retain(|(_, told)| stays(told));
        self.slots.retain(|_, told| stays(told));
    }

    /// A new worker was told nothing. What it has to be told.
    pub(super) fn anew(&mut self) -> Due {
        self.removals.iter_mut().for_each(|(_, told)| *told = None);
        self.slots.values_mut().for_each(|told| *told = None);
        self.catching_up = None;
        self.untold()
    }

    /// What its worker has not been told.
    fn untold(&self) -> Due {
        let removals = self.removals.iter().filter(|(_, told)| told.is_none());
        let slots = self.slots.iter().filter(|(_, told)| told.is_none());
        Due {
            removals: removals.map(|(removal, _)| *removal).collect(),
            slots: slots.map(|(&slot, _)| slot).collect(),
        }
    }

    /// A part of what a worker that has started again found on its disk.
    fn finds(&mut self, blocks: &[RecoveredBlock]) {
        self.noted_since.get_or_insert_default();
        let noted = blocks.iter().filter(|found| self.slots.contains_key(&found.block));
        self.found.extend(noted.map(|found| (found.block, found.identity)));
    }

    /// That was all of it. Slots in which it found nothing, or the block that the registry has there, need not be released there any more,
    /// unless they were noted meanwhile.
    /// Blocks of the registry in whose place it found another one.
    fn found_all(&mut self, registered: &HashMap<BlockId, BlockIdentity>) -> Vec<BlockIdentity> {
        let (found, since) = (std::mem::take(&mut self.found), self.noted_since.take().unwrap_or_default());
        let is_other = |slot: &BlockId| {
            found.get(slot).is_some_and(|found| registered.get(slot).is_none_or(|block| block != found))
        };
        let others: Vec<BlockId> = self.slots.keys().copied().filter(is_other).collect();
        self.slots.retain(|slot, _| since.contains(slot) || others.binary_search(slot).is_ok());
        others.iter().filter_map(|slot| registered.get(slot)).copied().collect()
    }
}

impl Ranks {
    /// Something is to be removed from all disks: noted for every rank before any is told, under the lock `disk_order`.
    pub(crate) fn note_removal(&self, removal: Removal) {
        self.each.iter().for_each(|state| state.missed.lock().note(removal));
    }

    /// These slots hold nothing any more that may be found: noted for every rank before any is told.
    pub(crate) fn note_released(&self, slots: &[BlockId]) {
        self.each.iter().for_each(|state| state.missed.lock().note_slots(slots));
    }

    /// The worker of a rank was sent a removal, after it was noted and under the same lock.
    pub(crate) fn removal_told(&self, rank: Rank, removal: Removal) {
        if let Some(state) = self.get(rank) {
            state.missed.lock().is_told(removal);
        }
    }

    /// The worker of a rank was sent that slots were released, after that was noted.
    pub(crate) fn released_told(&self, rank: Rank, slots: &[BlockId]) {
        if let Some(state) = self.get(rank) {
            state.missed.lock().are_told(slots);
        }
    }

    /// How far each rank was told what to remove: what a flush that begins now makes durable, see [`removals_durable`](Self::removals_durable).
    pub(crate) fn removals_told(&self) -> Vec<u64> {
        self.each.iter().map(|state| state.missed.lock().told).collect()
    }

    /// A rank has made durable what it was told up to there.
    pub(crate) fn removals_durable(&self, rank: Rank, upto: u64) {
        if let Some(state) = self.get(rank) {
            state.missed.lock().durable(upto);
        }
    }

    /// A rank has answered a flush. Where it is the one that its worker was asked for when it started, not the one of a worker before it, it
    /// has made durable what it was told first.
    pub(super) fn caught_up(&self, rank: Rank, token: u64) {
        if let Some(state) = self.get(rank) {
            let mut missed = state.missed.lock();
            if let Some((_, upto)) = missed.catching_up.take_if(|(asked, _)| *asked == token) {
                missed.durable(upto);
            }
        }
    }

    /// Ranks whose disks may still have something that was removed.
    pub(crate) fn unconfirmed(&self) -> usize {
        let lacks = |missed: &Missed| !missed.removals.is_empty() || !missed.slots.is_empty();
        self.each.iter().filter(|state| lacks(&state.missed.lock())).count()
    }
}

impl Leader {
    /// Tells a rank's new worker what was removed from G3 and is not known to be durable there. Under the lock `disk_order`: no block was
    /// sent to its disk since it started.
    pub(super) fn catch_up(&self, rank: Rank, due: &Due) {
        let Some(state) = self.ranks.get(rank) else { return };
        if *due == Due::default() {
            return;
        }
        let (removals, slots) = (due.removals.len(), due.slots.len());
        tracing::info!(target: "kvbm", %rank, removals, slots, "a rank is told what was removed from G3 while it was away");
        self.tell_removals(rank, due, false);
        // Nobody waits for it: without it, this is durable a commit later. Until it is answered or another flush is, all of it stays noted.
        let token = self.flushes.token();
        {
            let mut missed = state.missed.lock();
            missed.catching_up = Some((token, missed.told));
        }
        let _unreached = self.send_to(rank, &Command::Flush { token });
    }

    /// Tells ranks what they could not be told when it was due: a slot may have been on its way to another block then.
    pub(crate) fn tell_removals_again(&self) {
        let _order = self.disk_order.lock();
        for rank in self.ranks.all() {
            let due = self.ranks.get(rank).map(|state| state.missed.lock().untold());
            self.tell_removals(rank, &due.unwrap_or_default(), true);
        }
    }

    /// A worker that has started again says what it found on its disk, or a part of that. It is not taken in yet.
    pub(super) fn disk_found_again(&self, rank: Rank, part: &Part) {
        let Some(state) = self.ranks.get(rank) else { return };
        // No block comes to a slot of the disk meanwhile.
        let _order = self.disk_order.lock();
        state.missed.lock().finds(&part.blocks);
        if !part.last {
            return;
        }
        let registered = self.registry.snapshot(Tier::G3).0.into_iter().collect();
        let missing = state.missed.lock().found_all(&registered);
        for block in missing {
            let tiers = [Tier::G3].into_iter().collect();
            let removed = self.registry.remove_subtree(block.group, block.hash, tiers).blocks;
            tracing::info!(target: "kvbm", %rank, hash = %block.hash, blocks = removed, "not on the disk of a rank that started again: its slot has an earlier block there");
        }
    }

    /// Sends a rank what is due, under the lock `disk_order`. What it does not hear of stays noted. `in_use`: whether blocks may have come to its
    /// disk since the removals were noted. A namespace may have new ones then, so what nothing uses is named instead.
    fn tell_removals(&self, rank: Rank, due: &Due, in_use: bool) {
        let Some(state) = self.ranks.get(rank) else { return };
        for &removal in &due.removals {
            let sent = match removal {
                Removal::Namespace(namespace) if !in_use => {
                    self.send_to(rank, &Command::Forget { tier: Tier::G3, namespace })
                }
                Removal::Namespace(_) | Removal::Unused => {
                    // Those too that are out of use: what a rank's disk has there is found again.
                    let unused = self.unused_slots();
                    unused.chunks(Command::MAX_RELEASE).try_for_each(|part| self.send_release(rank, part))
                }
            };
            match sent {
                Ok(()) => state.missed.lock().is_told(removal),
                Err(failure) => tracing::warn!(
                    target: "kvbm", %rank, %failure, ?removal,
                    "a rank could not be told what was removed from G3: its worker is told when it starts again; where the manager ends before that, repeat it"
                ),
            }
        }
        self.tell_slots(rank, &due.slots);
    }

    /// Those that another block has by now, or awaits, stay noted: it may not be durable there either.
    fn tell_slots(&self, rank: Rank, slots: &[BlockId]) {
        if slots.is_empty() {
            return;
        }
        let unused: HashSet<BlockId> = self.unused_slots().into_iter().collect();
        let unused: Vec<BlockId> = slots.iter().filter(|slot| unused.contains(slot)).copied().collect();
        for part in unused.chunks(Command::MAX_RELEASE) {
            if self.send_release(rank, part).is_ok() {
                self.ranks.released_told(rank, part);
            }
        }
    }

    /// Slots of G3 that hold no block and that nothing is on its way to, in order. Under the lock `disk_order` it stays so.
    pub(crate) fn unused_slots(&self) -> Vec<BlockId> {
        // Asked first: what rests no more after that is free.
        let mut slots = self.resting.slots();
        slots.extend(self.registry.vacant_slots(Tier::G3));
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    fn send_release(&self, rank: Rank, slots: &[BlockId]) -> Result<(), kvbm_plan::Failure> {
        self.send_to(rank, &Command::Release { tier: Tier::G3, blocks: slots.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_noted_until_a_flush_after_it_was_told_is_durable() {
        let [one, other] = [1, 2].map(|name| Removal::Namespace(NamespaceId(name)));
        let mut missed = Missed::default();
        missed.note(one);
        let before = missed.told;
        missed.is_told(one);
        missed.durable(before);
        assert_eq!(missed.removals, [(one, Some(1))], "that flush may have been asked before");
        missed.note(other);
        let upto = missed.told;
        missed.note(one);
        missed.is_told(one);
        missed.durable(upto);
        assert_eq!(missed.removals, [(one, Some(2)), (other, None)], "told again since; not told at all");
        let upto = missed.told;
        assert_eq!(missed.anew().removals, [one, other]);
        missed.durable(upto);
        assert_eq!(missed.removals.len(), 2, "that worker is gone");
        missed.is_told(other);
        missed.is_told(one);
        missed.durable(missed.told);
        assert_eq!(missed.removals, []);
        (0..MAX_MISSED as u32 + 7).for_each(|name| missed.note(Removal::Namespace(NamespaceId(name))));
        assert_eq!(missed.removals.len(), MAX_MISSED + 1);
        assert_eq!(missed.removals.last(), Some(&(Removal::Unused, None)));
    }

    #[test]
    fn slots_are_noted_alike_and_too_many_of_them_are_all() {
        let [one, other] = [[BlockId(3)], [BlockId(5)]];
        let mut missed = Missed::default();
        missed.note_slots(&one);
        missed.are_told(&one);
        missed.note_slots(&other);
        missed.durable(missed.told);
        assert_eq!(missed.anew(), Due { removals: vec![], slots: other.to_vec() }, "the one is durable");
        missed.are_told(&other);
        let upto = missed.told;
        missed.anew();
        missed.durable(upto);
        assert_eq!(missed.slots.len(), 1, "that worker is gone");
        let many: Vec<_> = (0..MAX_SLOTS as u32).map(BlockId).collect();
        missed.note_slots(&many);
        missed.are_told(&many);
        assert_eq!(missed.anew(), Due { removals: vec![Removal::Unused], slots: many });
        missed.note_slots(&[BlockId(0)]);
        assert_eq!(missed.anew(), Due { removals: vec![Removal::Unused], slots: vec![BlockId(0)] });
    }

    #[test]
    fn too_many_slots_are_durable_like_those_that_they_were() {
        let many: Vec<_> = (0..MAX_SLOTS as u32).map(BlockId).collect();
        let mut missed = Missed::default();
        missed.note_slots(&many);
        missed.are_told(&many);
        missed.note_slots(&[BlockId(7)]);
        assert_eq!(missed.removals, [(Removal::Unused, Some(1))], "each of them was told");
        missed.are_told(&[BlockId(7)]);
        missed.durable(missed.told);
        assert_eq!((missed.removals.len(), missed.slots.len()), (0, 0));
        missed.note_slots(&many);
        missed.are_told(&many[1..]);
        missed.note_slots(&[BlockId(7)]);
        missed.durable(missed.told);
        assert_eq!(missed.untold().removals, [Removal::Unused], "one was not");
        missed.note_slots(&many);
        assert_eq!(missed.removals, [(Removal::Unused, None)], "and is not because others were");
    }

    #[test]
    fn slots_in_which_a_new_worker_finds_nothing_or_the_right_block_are_noted_no_more() {
        let block = |slot: u32, hash: u8| RecoveredBlock {
            block: BlockId(slot),
            identity: BlockIdentity {
                namespace: NamespaceId(0),
                group: kvbm_plan::GroupId(0),
                hash: kvbm_plan::SequenceHash::from_bytes([hash; 16]),
                parent: None,
                position: 0,
            },
        };
        let mut missed = Missed::default();
        missed.note_slots(&[1, 2, 3, 4].map(BlockId));
        missed.finds(&[block(1, 1), block(2, 2)]);
        missed.finds(&[block(3, 3), block(9, 9)]);
        let registered = [block(1, 1), block(2, 7), block(4, 4), block(9, 8)];
        let registered = registered.map(|block| (block.block, block.identity)).into_iter().collect();
        assert_eq!(missed.found_all(&registered), [block(2, 7).identity]);
        assert_eq!(missed.anew().slots, [2, 3].map(BlockId), "the released ones are still there");
        missed.found_all(&registered);
        assert_eq!(missed.anew().slots, [], "another worker finds nothing at all");
        // Another one has told of slots that are released before it has told of the last.
        missed.finds(&[block(1, 1), block(2, 2)]);
        missed.note_slots(&[1, 5].map(BlockId));
        missed.finds(&[block(6, 6)]);
        assert_eq!(missed.found_all(&HashMap::new()), []);
        assert_eq!(
            missed.anew().slots,
            [1, 5].map(BlockId),
            "what it told before it was noted may lie there"
        );
        missed.finds(&[]);
        missed.found_all(&HashMap::new());
        assert_eq!(missed.anew().slots, [], "noted before the next one");
    }
}
