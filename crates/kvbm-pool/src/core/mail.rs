//! What one shard has to tell another: that a block is gone which continued one of the other's.
//!
//! A block whose parent is in another shard was counted there under the parent's lock before it came. When it goes, its shard
//! posts that under its own lock; whoever locks the parent's shard next reads it first. So a parent may stay too long for a
//! moment, never too short, and nobody holds two locks.

use super::Core;
use crate::sync::Leaf;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// About an entry of the shard that gets it. The entry stays until the last of its links is taken back.
#[derive(Clone, Copy)]
pub(super) enum Letter {
    /// A child less on a tier.
    Child { parent: u32, tier: u8 },
    /// A link less.
    Link { parent: u32 },
}

/// Letters read in one hold of one shard. The others wait: a block may stay too long for it, never too short.
pub(super) const LETTERS_AT_ONCE: usize = 64;

#[derive(Default)]
pub(super) struct Mailbox {
    letters: Leaf<VecDeque<Letter>>,
    waiting: AtomicUsize,
}

impl Mailbox {
    fn post(&self, letter: Letter) {
        let mut letters = self.letters.lock();
        letters.push_back(letter);
        self.waiting.store(letters.len(), Ordering::Release);
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    fn take(&self) -> Option<Letter> {
        let mut letters = self.letters.lock();
        let letter = letters.pop_front();
        self.waiting.store(letters.len(), Ordering::Release);
        letter
    }
}

impl Core<'_> {
    /// Tells the shard of an entry that is not held, when the events of this hold are published: what follows from a letter
    /// is told after what led to it.
    pub(super) fn write(&mut self, letter: Letter) {
        self.first_mut().letters.push(letter);
    }

    pub(super) fn post_letters(&mut self) {
        let store = self.store;
        for letter in self.first_mut().letters.drain(..) {
            let (Letter::Child { parent, .. } | Letter::Link { parent }) = letter;
            // A parent stays until its links are taken back: there is nobody to tell only if one was taken back twice.
            let place = store.shards.get(store.entries[parent].shard());
            debug_assert!(place.is_some(), "entry {parent} has a link and is not in use");
            if let Some(place) = place {
                place.mail.post(letter);
            }
        }
    }

    /// A hold begins: what the shards that are held were told is done, all of it where all are held, and entries that nothing keeps
    /// since are given up. Nothing was found yet, so nobody is about to use one of them.
    #[inline]
    pub(super) fn read_mail(&mut self) {
        #[cfg(test)]
        super::counts::a_hold_begins();
        let most = if self.holds_all() { usize::MAX } else { LETTERS_AT_ONCE };
        let mut any = false;
        for number in self.numbers() {
            let mail = &self.store.shards[number].mail;
            for _ in 0..most.min(mail.waiting()) {
                let Some(letter) = mail.take() else { break };
                self.read(letter);
                any = true;
            }
        }
        if any {
            self.settle();
        }
    }

    fn read(&mut self, letter: Letter) {
        match letter {
            Letter::Child { parent, tier } => {
                self.child_left((parent, &self.store.entries[parent]), usize::from(tier));
            }
            Letter::Link { parent } => {
                self.store.entries[parent].drop_link();
                self.unused(parent);
            }
        }
    }
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use super::super::evict::MOST_LETTERS;
    use super::*;
    use crate::core::chains::{GROUP, register};
    use crate::{Cached, G1, Registry, RegistryConfig};
    use kvbm_plan::{SequenceHash, Tier};

    fn hash(number: u8) -> SequenceHash {
        SequenceHash::from_bytes([number; 16])
    }

    /// A registry of two shards with one block, its entry, and the number of the other shard.
    fn registry() -> (Registry, Cached<G1>, u32, usize) {
        let mut config = RegistryConfig::new([64, 0, 0]);
        config.shards = 2;
        let registry = Registry::new(&config).expect("a valid configuration");
        let block = register(&registry, &[hash(1)], 0);
        let store = &registry.shared.store;
        let index = store.lock_all().find(GROUP, hash(1)).expect("it was registered");
        let other = 1 - store.entries[index].shard();
        (registry, block, index, other)
    }

    /// As if `count` children of `parent` in the other shard had come and gone.
    fn children_come_and_go(registry: &Registry, parent: u32, other: usize, count: usize) {
        let store = &registry.shared.store;
        let core = store.lock_all();
        for _ in 0..count {
            store.entries[parent].add_child(0);
            store.entries[parent].add_link();
        }
        drop(core);
        let mut core = store.lock(other);
        for _ in 0..count {
            core.write(Letter::Child { parent, tier: 0 });
            core.write(Letter::Link { parent });
        }
    }

    #[test]
    fn one_hold_of_one_shard_reads_so_many_letters_and_one_of_all_reads_all() {
        let (registry, block, parent, other) = registry();
        let store = &registry.shared.store;
        let mail = &store.shards[1 - other].mail;
        children_come_and_go(&registry, parent, other, 100);
        assert_eq!(mail.waiting(), 200);
        for left in [200 - LETTERS_AT_ONCE, 200 - 2 * LETTERS_AT_ONCE] {
            drop(store.lock(1 - other));
            assert_eq!(mail.waiting(), left);
            assert_eq!(store.entries[parent].children(0) as usize, left.div_ceil(2));
            assert_eq!(store.entries[parent].links.get() as usize, left.div_ceil(2));
        }
        drop(block);
        // With some letters unread the block is not among those that may go; it is found under all locks, where they are read.
        assert_eq!(registry.pool::<G1>().get_mutable_blocks(64).expect("all may go").len(), 64);
        assert_eq!((mail.waiting(), registry.known_blocks()), (0, 0));
    }

    #[test]
    fn who_evicts_reads_what_piles_up_for_others() {
        let (registry, block, parent, other) = registry();
        let mail = &registry.shared.store.shards[1 - other].mail;
        children_come_and_go(&registry, parent, other, MOST_LETTERS);
        assert_eq!(mail.waiting(), 2 * MOST_LETTERS);
        // Something to evict that is not the parent, in whichever shard.
        for number in 2..=64 {
            drop(register::<G1>(&registry, &[hash(number)], 0));
        }
        assert_eq!(registry.occupancy(Tier::G1).free, 0);
        children_come_and_go(&registry, parent, other, MOST_LETTERS);
        drop(registry.pool::<G1>().get_mutable_blocks(1).expect("63 may go"));
        assert!(mail.waiting() <= MOST_LETTERS, "{} letters wait", mail.waiting());
        drop(block);
    }
}
