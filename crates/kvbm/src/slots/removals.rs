//! Removals from G3 that a rank is not known to have made durable. Its worker is sent them again
//! when it starts again.

use super::Slots;
use kvbm_plan::{BlockId, BlockIdentity, Command, Failure, NamespaceId, Rank, RecoveredBlock, Tier};
use kvbm_pool::{BlockSelection, TierMask};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// What is removed from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Namespace(NamespaceId),
    /// Whatever lies in slots that nothing uses.
    Unused,
}

/// Beyond so many namespaces, or slots, a rank is sent all unused slots instead.
const MAX_NAMESPACES: usize = 1024;
const MAX_SLOTS: usize = 1 << 16;
// A part of slots finds room where none are noted.
const _: () = assert!(Command::MAX_RELEASE <= MAX_SLOTS);

/// Removals that a rank's disk may lack: they could not be sent, or the worker may have ended
/// before they were durable. A removal that stays here for too long costs blocks on that disk, and
/// is never wrong.
#[derive(Default)]
pub(super) struct PendingRemovals {
    /// Each with its number, where it was sent.
    removals: Vec<(Removal, Option<u64>)>,
    /// The same of slots: a block that was on its way when it was removed may be complete there.
    slots: BTreeMap<BlockId, Option<u64>>,
    /// The last such number.
    sent: u64,
    /// What a worker that has started again found in such slots, as far as it has said that.
    found: BTreeMap<BlockId, BlockIdentity>,
    /// Slots that were noted since it began to say that: of these it may have said before what is
    /// in them. `None` where no worker says that.
    noted_since: Option<BTreeSet<BlockId>>,
    /// Whether a worker has said what it found in all slots, and has not started yet: it says that
    /// first.
    has_reported: bool,
    /// Whether a worker has started again without saying what it found.
    awaits_report: bool,
    /// The flush that a new worker was asked for behind all of it, by its token, and how far it had
    /// been sent then.
    catching_up: Option<(u64, u64)>,
}

/// What a new worker has to be sent.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    removals: Vec<Removal>,
    slots: Vec<BlockId>,
}

impl PendingRemovals {
    fn find(&mut self, removal: Removal) -> Option<&mut (Removal, Option<u64>)> {
        self.removals.iter_mut().find(|(noted, _)| *noted == removal)
    }

    /// Before the rank is sent, also where it was sent earlier.
    fn note(&mut self, removal: Removal) {
        let is_full = self.removals.len() >= MAX_NAMESPACES && self.find(removal).is_none();
        let removal = if is_full { Removal::Unused } else { removal };
        match self.find(removal) {
            Some((_, sent)) => *sent = None,
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

    /// From now on all that is unused is noted in place of slots: sent, where each of them was.
    fn note_unused(&mut self) {
        let earlier = self.find(Removal::Unused).map(|(_, sent)| *sent);
        let each = self.slots.values().copied().chain(earlier);
        let sent = each.reduce(|sent, one| Some(sent?.max(one?))).flatten();
        self.slots.clear();
        self.note(Removal::Unused);
        if let Some((_, noted)) = self.find(Removal::Unused) {
            *noted = sent;
        }
    }

    fn removal_sent(&mut self, removal: Removal) {
        let number = self.sent + 1;
        if let Some((_, sent)) = self.find(removal) {
            *sent = Some(number);
            self.sent = number;
        }
    }

    fn slots_sent(&mut self, slots: &[BlockId]) {
        self.sent += 1;
        for slot in slots {
            if let Some(sent) = self.slots.get_mut(slot) {
                *sent = Some(self.sent);
            }
        }
    }

    /// Number of the last removal that was sent.
    pub(super) fn last_sent(&self) -> u64 {
        self.sent
    }

    /// What was sent up to this number is durable.
    pub(super) fn durable(&mut self, upto: u64) {
        let stays = |sent: &Option<u64>| sent.is_none_or(|sent| sent > upto);
        self.removals.retain(|(_, sent)| stays(sent));
        self.slots.retain(|_, sent| stays(sent));
    }

    /// A new worker was sent nothing yet. What it has to be sent.
    pub(super) fn unsend_all(&mut self) -> Due {
        self.removals.iter_mut().for_each(|(_, sent)| *sent = None);
        self.slots.values_mut().for_each(|sent| *sent = None);
        self.catching_up = None;
        self.awaits_report = !std::mem::take(&mut self.has_reported) && !self.slots.is_empty();
        self.unsent()
    }

    /// What its worker has not been sent.
    fn unsent(&self) -> Due {
        let removals = self.removals.iter().filter(|(_, sent)| sent.is_none());
        let slots = self.slots.iter().filter(|(_, sent)| sent.is_none());
        Due {
            removals: removals.map(|(removal, _)| *removal).collect(),
            slots: slots.map(|(&slot, _)| slot).collect(),
        }
    }

    /// A part of what a worker that has started again found on its disk.
    pub(super) fn found(&mut self, blocks: &[RecoveredBlock]) {
        self.noted_since.get_or_insert_default();
        let noted = blocks.iter().filter(|found| self.slots.contains_key(&found.block));
        self.found.extend(noted.map(|found| (found.block, found.identity)));
    }

    /// That was all of it. Slots in which it found nothing, or the block that the registry has
    /// there, need not be released there any more, unless they were noted meanwhile. Blocks of the
    /// registry in whose place it found another one.
    pub(super) fn found_all(&mut self, registered: &HashMap<BlockId, BlockIdentity>) -> Vec<BlockIdentity> {
        (self.has_reported, self.awaits_report) = (true, false);
        let (found, since) = (std::mem::take(&mut self.found), self.noted_since.take().unwrap_or_default());
        let is_other = |slot: &BlockId| {
            found.get(slot).is_some_and(|found| registered.get(slot).is_none_or(|block| block != found))
        };
        let others: Vec<BlockId> = self.slots.keys().copied().filter(is_other).collect();
        self.slots.retain(|slot, _| since.contains(slot) || others.binary_search(slot).is_ok());
        others.iter().filter_map(|slot| registered.get(slot)).copied().collect()
    }
}

impl Slots {
    /// Ranks whose disks may still hold something that was removed.
    pub(crate) fn unconfirmed(&self) -> usize {
        let lacks = |pending: &PendingRemovals| !pending.removals.is_empty() || !pending.slots.is_empty();
        self.removals.iter().filter(|pending| lacks(&pending.lock())).count()
    }

    /// Removes a namespace, or all unused slots, from every disk. Under the lock `order`. It stays
    /// pending for every rank until that rank has made it durable.
    pub(super) fn remove(&self, removal: Removal) {
        // For every rank before any rank is sent it.
        self.removals.iter().for_each(|pending| pending.lock().note(removal));
        let mut not_sent = Vec::new();
        match removal {
            Removal::Namespace(namespace) => {
                not_sent = self.ranks.broadcast(&Command::Forget { tier: Tier::G3, namespace });
            }
            Removal::Unused => {
                for part in self.unused().chunks(Command::MAX_RELEASE) {
                    not_sent.extend(self.ranks.broadcast(&release(part)));
                }
            }
        }
        for (rank, pending) in self.ranks.all().zip(&self.removals) {
            match not_sent.iter().find(|(missed, _)| *missed == rank) {
                Some((_, failure)) => log_not_sent(rank, removal, failure),
                None => pending.lock().removal_sent(removal),
            }
        }
    }

    /// Empties all slots of the disks that no block uses, or ever will. Under the lock `order`:
    /// none of them can have a new block yet.
    pub(super) fn remove_unused(&self) {
        self.remove(Removal::Unused);
    }

    /// These slots of G3 hold nothing that may be found after a restart. Pending for every rank
    /// until that rank has made it durable.
    pub(crate) fn release(&self, slots: &[BlockId]) {
        for part in slots.chunks(Command::MAX_RELEASE) {
            self.removals.iter().for_each(|pending| pending.lock().note_slots(part));
            let not_sent = self.ranks.broadcast(&release(part));
            for (rank, pending) in self.ranks.all().zip(&self.removals) {
                match not_sent.iter().find(|(missed, _)| *missed == rank) {
                    Some((_, failure)) => tracing::warn!(
                        target: "kvbm", %rank, %failure,
                        "slots of G3 not released: the worker is sent the release when it starts again; a restart of the manager before that may find their blocks"
                    ),
                    None => pending.lock().slots_sent(part),
                }
            }
        }
    }

    /// Nothing that was sent to a rank's earlier worker counts for its new one. What the new one
    /// has to be sent.
    pub(crate) fn worker_replaced(&self, rank: Rank) -> Due {
        self.removals.get(rank.index()).map(|pending| pending.lock().unsend_all()).unwrap_or_default()
    }

    /// Sends a rank's new worker the removals that are not known to be durable there. Under the
    /// lock `order`: no block was sent to its disk since it started.
    pub(crate) fn catch_up(&self, rank: Rank, due: &Due) {
        let Some(pending) = self.removals.get(rank.index()) else { return };
        if *due == Due::default() {
            return;
        }
        let (removals, slots) = (due.removals.len(), due.slots.len());
        tracing::info!(target: "kvbm", %rank, removals, slots, "a rank is sent what was removed from G3 while it was away");
        self.send_removals(rank, due, false);
        // Nobody waits for this flush: without it the removals are durable a commit later. Until it
        // or another flush is answered, all of them stay pending.
        let token = self.flushes.token();
        {
            let mut pending = pending.lock();
            pending.catching_up = Some((token, pending.sent));
        }
        let _not_sent = self.ranks.send_to(rank, &Command::Flush { token });
    }

    /// A rank has made a flush durable. If its worker was sent that flush when it started, the
    /// removals before it are durable. An answer of the worker before it proves nothing.
    pub(super) fn caught_up(&self, rank: Rank, token: u64) {
        if let Some(pending) = self.removals.get(rank.index()) {
            let mut pending = pending.lock();
            if let Some((_, upto)) = pending.catching_up.take_if(|(flush, _)| *flush == token) {
                pending.durable(upto);
            }
        }
    }

    /// Sends ranks what could not be sent when it was due: a slot may have been on its way to
    /// another block then.
    pub(crate) fn send_removals_again(&self) {
        let _order = self.order();
        for (rank, pending) in self.ranks.all().zip(&self.removals) {
            let due = pending.lock().unsent();
            self.send_removals(rank, &due, true);
        }
    }

    /// Sends a rank what is due, under the lock `order`. What is not sent stays pending. `in_use`:
    /// whether blocks may have come to its disk since the removals were noted. A namespace may have
    /// new blocks then, so all unused slots are named instead. Where blocks are encrypted, the data
    /// key that was to be destroyed has encrypted the new ones too: they go with it.
    fn send_removals(&self, rank: Rank, due: &Due, in_use: bool) {
        let Some(pending) = self.removals.get(rank.index()) else { return };
        for &removal in &due.removals {
            let sent = match removal {
                Removal::Namespace(namespace) if !in_use || self.encrypted => {
                    if in_use {
                        let of_it = BlockSelection::Namespace(namespace);
                        let new = self.registry.remove(of_it, TierMask::only(Tier::G3)).blocks;
                        tracing::info!(target: "kvbm", %rank, %namespace, new, "a rank is sent a namespace to forget again: what has come to G3 since goes too");
                    }
                    self.ranks.send_to(rank, &Command::Forget { tier: Tier::G3, namespace })
                }
                Removal::Namespace(_) | Removal::Unused => {
                    // Also slots that are out of use: what a rank's disk has there is found again.
                    let unused = self.unused();
                    unused
                        .chunks(Command::MAX_RELEASE)
                        .try_for_each(|part| self.ranks.send_to(rank, &release(part)))
                }
            };
            match sent {
                Ok(()) => pending.lock().removal_sent(removal),
                Err(failure) => log_not_sent(rank, removal, &failure),
            }
        }
        if due.slots.is_empty() {
            return;
        }
        let unused: HashSet<BlockId> = self.unused().into_iter().collect();
        let (free, used): (Vec<BlockId>, Vec<BlockId>) =
            due.slots.iter().partition(|slot| unused.contains(slot));
        for part in free.chunks(Command::MAX_RELEASE) {
            if self.ranks.send_to(rank, &release(part)).is_ok() {
                pending.lock().slots_sent(part);
            }
        }
        if in_use && !used.is_empty() {
            let overwritten = self.overwritten(&used);
            let mut pending = pending.lock();
            // The disk of a worker that has not said what it found may lack the registered block.
            if !pending.awaits_report {
                pending.slots_sent(&overwritten);
            }
        }
    }

    /// Of these slots, those that a registered block has: each rank has reported that it wrote that
    /// block over what was removed, so the next flush makes the removal durable. A block that is
    /// only on its way to a slot proves nothing.
    fn overwritten(&self, slots: &[BlockId]) -> Vec<BlockId> {
        let (blocks, _) = self.registry.snapshot(Tier::G3);
        let registered: HashSet<BlockId> = blocks.into_iter().map(|(slot, _)| slot).collect();
        slots.iter().filter(|slot| registered.contains(slot)).copied().collect()
    }

    /// Slots of G3 that hold no block and that nothing is on its way to, in order. Under the lock
    /// `order` it stays so.
    fn unused(&self) -> Vec<BlockId> {
        // Read first: a slot that is not withheld any more after this is free.
        let mut slots = self.directories.withheld();
        slots.extend(self.registry.vacant_slots(Tier::G3));
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}

fn release(slots: &[BlockId]) -> Command {
    Command::Release { tier: Tier::G3, blocks: slots.to_vec() }
}

fn log_not_sent(rank: Rank, removal: Removal, failure: &Failure) {
    tracing::warn!(
        target: "kvbm", %rank, %failure, ?removal,
        "a rank could not be sent a removal from G3: its worker is sent it when it starts again; where the manager ends before that, repeat the removal"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_is_noted_until_a_flush_after_its_report_is_durable() {
        let [one, other] = [1, 2].map(|name| Removal::Namespace(NamespaceId(name)));
        let mut pending = PendingRemovals::default();
        pending.note(one);
        let before = pending.sent;
        pending.removal_sent(one);
        pending.durable(before);
        assert_eq!(pending.removals, [(one, Some(1))], "that flush may have been asked before");
        pending.note(other);
        let upto = pending.sent;
        pending.note(one);
        pending.removal_sent(one);
        pending.durable(upto);
        assert_eq!(pending.removals, [(one, Some(2)), (other, None)], "sent again since; not sent at all");
        let upto = pending.sent;
        assert_eq!(pending.unsend_all().removals, [one, other]);
        pending.durable(upto);
        assert_eq!(pending.removals.len(), 2, "that worker is gone");
        pending.removal_sent(other);
        pending.removal_sent(one);
        pending.durable(pending.sent);
        assert_eq!(pending.removals, []);
        (0..MAX_NAMESPACES as u32 + 7).for_each(|name| pending.note(Removal::Namespace(NamespaceId(name))));
        assert_eq!(pending.removals.len(), MAX_NAMESPACES + 1);
        assert_eq!(pending.removals.last(), Some(&(Removal::Unused, None)));
    }

    #[test]
    fn slots_are_noted_alike_and_too_many_of_them_are_all() {
        let [one, other] = [[BlockId(3)], [BlockId(5)]];
        let mut pending = PendingRemovals::default();
        pending.note_slots(&one);
        pending.slots_sent(&one);
        pending.note_slots(&other);
        pending.durable(pending.sent);
        assert_eq!(
            pending.unsend_all(),
            Due { removals: vec![], slots: other.to_vec() },
            "the one is durable"
        );
        pending.slots_sent(&other);
        let upto = pending.sent;
        pending.unsend_all();
        pending.durable(upto);
        assert_eq!(pending.slots.len(), 1, "that worker is gone");
        let many: Vec<_> = (0..MAX_SLOTS as u32).map(BlockId).collect();
        pending.note_slots(&many);
        pending.slots_sent(&many);
        assert_eq!(pending.unsend_all(), Due { removals: vec![Removal::Unused], slots: many });
        pending.note_slots(&[BlockId(0)]);
        assert_eq!(pending.unsend_all(), Due { removals: vec![Removal::Unused], slots: vec![BlockId(0)] });
    }

    #[test]
    fn too_many_slots_are_durable_like_those_that_they_were() {
        let many: Vec<_> = (0..MAX_SLOTS as u32).map(BlockId).collect();
        let mut pending = PendingRemovals::default();
        pending.note_slots(&many);
        pending.slots_sent(&many);
        pending.note_slots(&[BlockId(7)]);
        assert_eq!(pending.removals, [(Removal::Unused, Some(1))], "each of them was sent");
        pending.slots_sent(&[BlockId(7)]);
        pending.durable(pending.sent);
        assert_eq!((pending.removals.len(), pending.slots.len()), (0, 0));
        pending.note_slots(&many);
        pending.slots_sent(&many[1..]);
        pending.note_slots(&[BlockId(7)]);
        pending.durable(pending.sent);
        assert_eq!(pending.unsent().removals, [Removal::Unused], "one was not");
        pending.note_slots(&many);
        assert_eq!(pending.removals, [(Removal::Unused, None)], "and is not because others were");
    }

    #[test]
    fn a_worker_that_started_again_and_reported_its_blocks_is_awaited_no_more() {
        let mut pending = PendingRemovals::default();
        pending.unsend_all();
        assert!(!pending.awaits_report, "nothing was removed");
        pending.note_slots(&[BlockId(1)]);
        pending.unsend_all();
        assert!(pending.awaits_report, "this worker has not said what it found");
        pending.found(&[]);
        pending.note_slots(&[BlockId(1)]);
        pending.found_all(&HashMap::new());
        pending.unsend_all();
        assert!(!pending.awaits_report, "it said that before it started");
        pending.unsend_all();
        assert!(pending.awaits_report, "the next one has not");
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
        let mut pending = PendingRemovals::default();
        pending.note_slots(&[1, 2, 3, 4].map(BlockId));
        pending.found(&[block(1, 1), block(2, 2)]);
        pending.found(&[block(3, 3), block(9, 9)]);
        let registered = [block(1, 1), block(2, 7), block(4, 4), block(9, 8)];
        let registered = registered.map(|block| (block.block, block.identity)).into_iter().collect();
        assert_eq!(pending.found_all(&registered), [block(2, 7).identity]);
        assert_eq!(pending.unsend_all().slots, [2, 3].map(BlockId), "the released ones are still there");
        pending.found_all(&registered);
        assert_eq!(pending.unsend_all().slots, [], "another worker finds nothing at all");
        // Another one has reported slots that are released before it has reported the last.
        pending.found(&[block(1, 1), block(2, 2)]);
        pending.note_slots(&[1, 5].map(BlockId));
        pending.found(&[block(6, 6)]);
        assert_eq!(pending.found_all(&HashMap::new()), []);
        assert_eq!(
            pending.unsend_all().slots,
            [1, 5].map(BlockId),
            "what it reported before it was noted may lie there"
        );
        pending.found(&[]);
        pending.found_all(&HashMap::new());
        assert_eq!(pending.unsend_all().slots, [], "noted before the next one");
    }
}
