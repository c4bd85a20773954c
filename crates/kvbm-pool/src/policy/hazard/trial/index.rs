//! Numbers of the blocks in a small cache, by their tags.

pub(super) const NONE: u16 = u16::MAX;

/// Gives out numbers below its size. Each number has its tag and the next number of its list: one
/// list for each remainder of tags, and one of the numbers that are free.
pub(super) struct Index {
    tags: Box<[u64]>,
    next: Box<[u16]>,
    heads: Box<[u16]>,
    free: u16,
}

impl Index {
    /// For `size` blocks, 1 to 32,768.
    pub(super) fn new(size: usize) -> Self {
        let next = (1..=size).map(|next| if next < size { next as u16 } else { NONE });
        Self {
            tags: vec![0; size].into_boxed_slice(),
            next: next.collect(),
            heads: vec![NONE; size.next_power_of_two()].into_boxed_slice(),
            free: 0,
        }
    }

    fn list(&self, tag: u64) -> usize {
        tag as usize & (self.heads.len() - 1)
    }

    pub(super) fn find(&self, tag: u64) -> Option<u16> {
        let mut at = self.heads[self.list(tag)];
        while at != NONE && self.tags[usize::from(at)] != tag {
            at = self.next[usize::from(at)];
        }
        (at != NONE).then_some(at)
    }

    /// A number for a tag that has none; none when all are given out.
    pub(super) fn add(&mut self, tag: u64) -> Option<u16> {
        let (at, list) = (self.free, self.list(tag));
        if at == NONE {
            return None;
        }
        self.free = self.next[usize::from(at)];
        self.tags[usize::from(at)] = tag;
        self.next[usize::from(at)] = std::mem::replace(&mut self.heads[list], at);
        Some(at)
    }

    /// Takes back a number that was given out.
    pub(super) fn remove(&mut self, number: u16) {
        let list = self.list(self.tags[usize::from(number)]);
        let after = std::mem::replace(&mut self.next[usize::from(number)], self.free);
        self.free = number;
        let mut at = self.heads[list];
        if at == number {
            self.heads[list] = after;
            return;
        }
        while at != NONE {
            let next = &mut self.next[usize::from(at)];
            if *next == number {
                *next = after;
                return;
            }
            at = *next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::collections::HashMap;

    #[test]
    fn agrees_with_a_map() {
        let (mut index, mut map, mut random) = (Index::new(13), HashMap::new(), Random::new(1));
        for _ in 0..20_000 {
            let tag = random.next() % 40;
            assert_eq!(index.find(tag), map.get(&tag).copied());
            match map.get(&tag) {
                Some(&number) => {
                    index.remove(number);
                    map.remove(&tag);
                }
                None => match index.add(tag) {
                    Some(number) => {
                        assert!(number < 13 && map.values().all(|&other| other != number));
                        map.insert(tag, number);
                    }
                    None => assert_eq!(map.len(), 13),
                },
            }
        }
    }
}
