//! A small cache that keeps what is worth most, of leaves first: the policy itself, in small.

use super::super::candidates::{Least, Next, Offer, SAMPLE, WINDOW};
use super::index::{Index, NONE};
use crate::entry::BlockMemory;
use crate::random::Random;

#[derive(Clone, Copy)]
struct Block {
    memory: BlockMemory,
    /// The block before it in its request, and how many name this one so.
    parent: u16,
    children: u16,
    /// Where it is among the leaves.
    place: u16,
}

/// What a block is worth now, and its age, by which the older of two equals goes first.
pub(in crate::policy::hazard) struct Rate {
    pub(in crate::policy::hazard) worth: f32,
    pub(in crate::policy::hazard) age: u16,
}

pub(super) struct Rated {
    index: Index,
    blocks: Box<[Block]>,
    leaves: Vec<u16>,
    next: Next,
    /// The block of the request that was used last.
    above: u16,
    random: Random,
}

impl Rated {
    pub(super) fn new(size: usize, seed: u64) -> Self {
        let none = Block { memory: BlockMemory::default(), parent: NONE, children: 0, place: NONE };
        Self {
            index: Index::new(size),
            blocks: vec![none; size].into_boxed_slice(),
            leaves: Vec::with_capacity(size),
            next: Next::NOTHING,
            above: NONE,
            random: Random::new(seed),
        }
    }

    /// A request begins.
    pub(super) fn begin(&mut self) {
        self.above = NONE;
    }

    /// What is kept of a block has changed.
    pub(super) fn changed(&mut self, tag: u64, memory: BlockMemory) {
        if let Some(at) = self.index.find(tag) {
            self.blocks[usize::from(at)].memory = memory;
        }
    }

    /// The next block of a request. Says whether it was there.
    pub(super) fn used(&mut self, tag: u64, memory: BlockMemory, rate: impl Fn(BlockMemory) -> Rate) -> bool {
        if let Some(at) = self.index.find(tag) {
            self.blocks[usize::from(at)].memory = memory;
            self.above = at;
            return true;
        }
        let number = self.index.add(tag).or_else(|| {
            let victim = self.victim(&rate)?;
            self.remove(victim, &rate);
            self.index.add(tag)
        });
        if let Some(at) = number {
            let parent = self.above;
            self.blocks[usize::from(at)] = Block { memory, parent, children: 0, place: NONE };
            if let Some(above) = self.blocks.get_mut(usize::from(parent)) {
                above.children += 1;
                self.leave(parent);
            }
            self.join(at);
            self.above = at;
        }
        false
    }

    fn join(&mut self, leaf: u16) {
        self.blocks[usize::from(leaf)].place = self.leaves.len() as u16;
        self.leaves.push(leaf);
    }

    /// The block is no leaf any more, if it was.
    fn leave(&mut self, block: u16) {
        let place = std::mem::replace(&mut self.blocks[usize::from(block)].place, NONE);
        if place != NONE {
            self.leaves.swap_remove(usize::from(place));
            if let Some(&moved) = self.leaves.get(usize::from(place)) {
                self.blocks[usize::from(moved)].place = place;
            }
        }
    }

    fn remove(&mut self, leaf: u16, rate: &impl Fn(BlockMemory) -> Rate) {
        self.leave(leaf);
        self.index.remove(leaf);
        let parent = self.blocks[usize::from(leaf)].parent;
        if let Some(above) = self.blocks.get_mut(usize::from(parent)) {
            above.children -= 1;
            if above.children == 0 {
                self.next.consider(u32::from(parent), rate(above.memory).worth);
                self.join(parent);
            }
        }
    }

    fn victim(&mut self, rate: &impl Fn(BlockMemory) -> Rate) -> Option<u16> {
        let follow = self.next.take().map(|slot| slot as u16);
        let is_leaf = |&at: &u16| at != self.above && self.blocks[usize::from(at)].place != NONE;
        follow.filter(is_leaf).or_else(|| self.sample(rate))
    }

    /// The leaf of least worth in a sample, but not the request's own.
    fn sample(&mut self, rate: &impl Fn(BlockMemory) -> Rate) -> Option<u16> {
        let mut least = Least([Offer::NONE; 2]);
        let count = self.leaves.len();
        let windows = if count <= SAMPLE { 1 } else { SAMPLE / WINDOW };
        for _ in 0..windows {
            let from = if count <= SAMPLE { 0 } else { self.random.below(count - WINDOW) };
            for &leaf in self.leaves[from..].iter().take(SAMPLE / windows).filter(|leaf| **leaf != self.above)
            {
                let Rate { worth, age } = rate(self.blocks[usize::from(leaf)].memory);
                least.offer(Offer { worth, age, slot: u32::from(leaf) });
            }
        }
        let [first, second] = least.0;
        self.next = Next::after(second);
        (first.slot != Offer::NONE.slot).then_some(first.slot as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worth is the class: what is worth least goes first, ends of chains before what they
    /// continue.
    #[test]
    fn the_least_worth_leaf_goes() {
        let mut rated = Rated::new(4, 1);
        let rate = |memory: BlockMemory| Rate { worth: f32::from(memory.class), age: 0 };
        let mut request = |tags: &[(u64, u8)]| -> Vec<bool> {
            rated.begin();
            tags.iter().map(|&(tag, class)| rated.used(tag, BlockMemory { time: 0, class }, rate)).collect()
        };
        assert_eq!(request(&[(1, 9), (2, 1), (3, 5)]), [false; 3]);
        assert_eq!(request(&[(7, 4)]), [false]);
        assert_eq!(request(&[(8, 8)]), [false], "7 goes: 2 is worth less, but 3 continues it");
        assert_eq!(request(&[(9, 8)]), [false], "3 goes");
        assert_eq!(request(&[(1, 9), (2, 1)]), [true, true]);
        assert_eq!(request(&[(9, 8)]), [true]);
        assert_eq!(request(&[(10, 8)]), [false], "2 goes");
        assert_eq!(request(&[(1, 9), (2, 1)]), [true, false]);
    }

    /// A request that is longer than the cache keeps its beginning.
    #[test]
    fn a_request_does_not_displace_itself() {
        let mut rated = Rated::new(3, 1);
        for expected in [false, true] {
            rated.begin();
            let used = |tag| rated.used(tag, BlockMemory::default(), |_| Rate { worth: 1.0, age: 0 });
            let found: Vec<bool> = (0..5).map(used).collect();
            assert_eq!(found, [expected, expected, expected, false, false]);
        }
    }
}
