//! What the policy remembers of blocks that are gone: eight bytes each, in sets of one cache line.

use crate::entry::BlockMemory;
use crate::prefetch::prefetch;

const WAYS: usize = 8;
const USED: u64 = 1 << 63;

/// Tag (upper 32 bits of it), time and class of blocks, the oldest of a set forgotten first.
pub(crate) struct History {
    sets: Box<[Set]>,
}

#[derive(Default)]
#[repr(C, align(64))]
struct Set([u64; WAYS]);

/// Bytes for each entry.
pub(crate) const BYTES: usize = size_of::<Set>() / WAYS;

fn pack(tag: u64, memory: BlockMemory) -> u64 {
    USED | u64::from(memory.class) << 16 | u64::from(memory.time) | tag_bits(tag)
}

/// 32 bits of the tag that do not choose the set.
fn tag_bits(tag: u64) -> u64 {
    (tag & 0xffff_ffff) << 25
}

const TAG_MASK: u64 = 0xffff_ffff << 25;

fn unpack(record: u64) -> BlockMemory {
    BlockMemory { time: record as u16, class: (record >> 16) as u8 }
}

impl History {
    /// Room for `entries` or a little more.
    pub(crate) fn new(entries: usize) -> Self {
        let sets = entries.div_ceil(WAYS).max(1);
        Self { sets: (0..sets).map(|_| Set::default()).collect() }
    }

    #[inline]
    fn set_of(&self, tag: u64) -> usize {
        (((tag >> 32) * self.sets.len() as u64) >> 32) as usize
    }

    /// Prefetches the sets of `tags`.
    pub(crate) fn fetch(&self, tags: &[u64]) {
        for &tag in tags {
            prefetch(&self.sets[self.set_of(tag)]);
        }
    }

    /// Takes what is remembered of a block.
    pub(crate) fn take(&mut self, tag: u64) -> Option<BlockMemory> {
        let (set, wanted) = (self.set_of(tag), USED | tag_bits(tag));
        let found = self.sets[set].0.iter_mut().find(|record| **record & (USED | TAG_MASK) == wanted)?;
        Some(unpack(std::mem::take(found)))
    }

    /// Remembers a block that is gone, in place of the longest unused of its set. `age` tells ages.
    pub(crate) fn put(&mut self, tag: u64, memory: BlockMemory, age: impl Fn(u16) -> u16) {
        let oldest = |record: &&mut u64| match **record {
            record if record & USED == 0 => u32::MAX,
            record => u32::from(age(record as u16)),
        };
        let set = self.set_of(tag);
        if let Some(record) = self.sets[set].0.iter_mut().max_by_key(oldest) {
            *record = pack(tag, memory);
        }
    }

    /// Shows the entries of a set, and forgets those for which `each` returns true.
    pub(crate) fn observe(&mut self, set: usize, mut each: impl FnMut(BlockMemory) -> bool) {
        for record in &mut self.sets[set].0 {
            if *record & USED != 0 && each(unpack(*record)) {
                *record = 0;
            }
        }
    }

    /// Sets of entries.
    pub(crate) fn sets(&self) -> usize {
        self.sets.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;

    #[test]
    fn gives_back_what_it_was_given_and_forgets_the_oldest_of_a_set() {
        let mut history = History::new(64);
        let memory = |time| BlockMemory { time, class: 0xa5 };
        for n in 0..1000_u64 {
            history.put(mix(n), memory(n as u16), |time| 1000 - time);
        }
        let mut kept = Vec::new();
        for n in 0..1000_u64 {
            if let Some(found) = history.take(mix(n)) {
                assert_eq!(found, memory(n as u16));
                kept.push(n);
            }
            assert_eq!(history.take(mix(n)), None, "taken once");
        }
        assert_eq!(kept.len(), 64, "every place was in use");
        assert!(kept.iter().sum::<u64>() / 64 > 900, "those kept are the youngest: {kept:?}");
    }

    #[test]
    fn observation_reaches_every_entry_and_may_forget_it() {
        let mut history = History::new(80);
        for n in 0..20 {
            history.put(mix(n), BlockMemory { time: 7, class: n as u8 }, |time| time);
        }
        let mut seen = 0;
        for set in 0..history.sets() {
            history.observe(set, |memory| {
                seen += 1;
                memory.class % 2 == 1
            });
        }
        let left: Vec<_> = (0..20).filter_map(|n| history.take(mix(n))).collect();
        assert_eq!((seen, left.len()), (20, 10));
        assert!(left.iter().all(|memory| memory.time == 7));
    }
}
