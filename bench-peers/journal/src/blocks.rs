//! The blocks of the benchmark: what each slot holds, first and later.

use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

/// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Block `number`, one of a chain, as most blocks are.
pub fn identity(number: u32) -> BlockIdentity {
    let hash = |number: u32| {
        let mut random = Random::new(u64::from(number) << 20);
        SequenceHash::from_bytes((u128::from(random.next()) << 64 | u128::from(random.next())).to_le_bytes())
    };
    BlockIdentity {
        namespace: NamespaceId(1),
        group: GroupId(0),
        hash: hash(number),
        parent: number.checked_sub(1).map(hash),
        position: number,
    }
}

/// All slots, in a random order.
pub fn shuffled(slots: u32) -> Vec<u32> {
    let mut random = Random::new(7);
    let mut order: Vec<u32> = (0..slots).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    order
}

/// Which block each slot gets: in order first, then others in random order. As (slot, block).
pub fn first(slots: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..slots).map(|slot| (slot, slot))
}

/// See [`first`].
pub fn later(slots: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..).zip(shuffled(slots)).map(move |(number, slot)| (slot, slots + number))
}
