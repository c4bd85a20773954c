//! What is remembered of blocks that are gone: eight bytes each, in sets of one cache line.
//!
//! A block may come back in another shard of the registry than it went from, so all shards have one history, without a lock. An entry is one
//! number, which is read and written as a whole: what is found was put in for a block with this tag, at some time. Two threads that
//! write the same entry at the same time forget a block. Nothing but a guess hangs on either.

use crate::near;
use crate::policy::BlockMemory;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WAYS: usize = 8;
const USED: u64 = 1 << 63;

/// Tag (upper 32 bits of it), time and class of blocks, the oldest of a set forgotten first.
pub(crate) struct History {
    sets: Box<[Set]>,
}

#[derive(Default)]
#[repr(C, align(64))]
struct Set([AtomicU64; WAYS]);

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
    fn set(&self, tag: u64) -> &[AtomicU64; WAYS] {
        &self.sets[(((tag >> 32) * self.sets.len() as u64) >> 32) as usize].0
    }

    /// Asks for the sets of `tags`, for later.
    pub(crate) fn fetch(&self, tags: &[u64]) {
        for &tag in tags {
            near::prefetch(self.set(tag));
        }
    }

    /// Takes what is remembered of a block.
    pub(crate) fn take(&self, tag: u64) -> Option<BlockMemory> {
        let wanted = USED | tag_bits(tag);
        for place in self.set(tag) {
            let record = place.load(Relaxed);
            if record & (USED | TAG_MASK) == wanted {
                forget(place, record);
                return Some(unpack(record));
            }
        }
        None
    }

    /// Remembers a block that is gone, in place of the longest unused of its set. `age` tells ages.
    pub(crate) fn put(&self, tag: u64, memory: BlockMemory, age: impl Fn(u16) -> u16) {
        let oldest = |place: &&AtomicU64| match place.load(Relaxed) {
            record if record & USED == 0 => u32::MAX,
            record => u32::from(age(record as u16)),
        };
        if let Some(place) = self.set(tag).iter().max_by_key(oldest) {
            place.store(pack(tag, memory), Relaxed);
        }
    }

    /// Shows the entries of a set; those of which `each` says so are forgotten.
    pub(crate) fn observe(&self, set: usize, mut each: impl FnMut(BlockMemory) -> bool) {
        for place in &self.sets[set].0 {
            let record = place.load(Relaxed);
            if record & USED != 0 && each(unpack(record)) {
                forget(place, record);
            }
        }
    }

    /// Sets of entries.
    pub(crate) fn sets(&self) -> usize {
        self.sets.len()
    }
}

/// Unless there is another one by now.
#[inline]
fn forget(place: &AtomicU64, record: u64) {
    // An instruction that locks the line costs more than all the rest; what is put there meanwhile may be lost.
    if place.load(Relaxed) == record {
        place.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::mix;

    #[test]
    fn gives_back_what_it_was_given_and_forgets_the_oldest_of_a_set() {
        let history = History::new(64);
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
        let history = History::new(80);
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
