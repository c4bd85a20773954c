//! Entries: what the registry knows of one block, on all tiers.

use crate::random::mix;
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::cell::Cell;

/// No entry, no slot, no position.
pub(crate) const NONE: u32 = u32::MAX;

/// Whether a block is on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Presence {
    Absent = 0,
    Arriving = 1,
    Present = 2,
}

/// What a policy keeps with each block while the block is on any tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockMemory {
    /// A time, in the policy's own unit; it may wrap.
    pub time: u16,
    /// Anything.
    pub class: u8,
}

/// One block on all tiers: one cache line.
#[repr(C, align(64))]
pub(crate) struct Entry {
    hash: [Cell<u64>; 2],
    /// Entry of the block before this one, or `NONE`. While vacant: the next vacant entry.
    pub parent: Cell<u32>,
    pub position: Cell<u32>,
    /// Slot on each tier where the presence there is not `Absent`.
    pub slots: [Cell<u32>; TIERS],
    /// Entries that continue this one and are Arriving or Present, by tier.
    children: [Cell<u32>; TIERS],
    /// What keeps the entry although the block is on no tier: entries that name it as parent, and
    /// slots that still hold its bytes for their users after it was removed.
    pub links: Cell<u32>,
    namespace: Cell<u32>,
    /// Iteration of the last use on any tier; wraps.
    pub last_step: Cell<u16>,
    /// What the eviction policy keeps.
    policy_time: Cell<u16>,
    policy_class: Cell<u8>,
    /// A group's number is below [`RegistryConfig::MAX_GROUPS`](crate::RegistryConfig::MAX_GROUPS).
    group: Cell<u8>,
    /// Two bits for each tier, `PINNED` and `FRESH`.
    presence_bits: Cell<u8>,
    pub priority: Cell<u8>,
}

/// The request that registered the block has neither touched nor released it: its first touch is no
/// further use.
const FRESH: u8 = 0x80;
/// The block is pinned until some iteration on some tier.
const PINNED: u8 = 0x40;
const PRESENCE: u8 = 0b11_11_11;
/// Links of an entry that is not in use.
const VACANT: u32 = u32::MAX;
/// A child count that is not known any more.
const MANY: u32 = u32::MAX;

const _: () = assert!(size_of::<Entry>() == 64 && align_of::<Entry>() == 64);

/// The tag by which policies know a block.
#[inline]
pub(crate) fn tag_of(group: GroupId, hash: SequenceHash) -> u64 {
    mix(hash.to_u128() as u64 ^ u64::from(group.0) << 48)
}

impl Entry {
    pub(crate) const fn vacant() -> Self {
        const fn word(value: u32) -> Cell<u32> {
            Cell::new(value)
        }
        Self {
            hash: [Cell::new(0), Cell::new(0)],
            parent: word(NONE),
            position: word(0),
            slots: [word(NONE), word(NONE), word(NONE)],
            children: [word(0), word(0), word(0)],
            links: word(VACANT),
            namespace: word(0),
            last_step: Cell::new(0),
            policy_time: Cell::new(0),
            policy_class: Cell::new(0),
            group: Cell::new(0),
            presence_bits: Cell::new(0),
            priority: Cell::new(0),
        }
    }

    /// That many vacant entries.
    pub(crate) fn many(count: usize) -> Vec<Self> {
        (0..count).map(|_| Self::vacant()).collect()
    }

    /// Makes a vacant entry that of a block which is on no tier yet.
    #[inline]
    pub(crate) fn begin(&self, group: GroupId, hash: SequenceHash, namespace: NamespaceId, position: u32) {
        let value = hash.to_u128();
        self.hash[0].set(value as u64);
        self.hash[1].set((value >> 64) as u64);
        self.parent.set(NONE);
        self.position.set(position);
        for tier in 0..TIERS {
            self.slots[tier].set(NONE);
            self.children[tier].set(0);
        }
        self.links.set(0);
        self.namespace.set(namespace.0);
        self.last_step.set(0);
        self.set_memory(BlockMemory::default());
        self.group.set(group.0 as u8);
        self.presence_bits.set(0);
        self.priority.set(0);
    }

    /// Makes it vacant. Its other fields mean nothing any more.
    #[inline]
    pub(crate) fn end(&self) {
        self.links.set(VACANT);
        self.presence_bits.set(0);
    }

    #[inline]
    pub(crate) fn in_use(&self) -> bool {
        self.links.get() != VACANT
    }

    #[inline]
    pub(crate) fn hash(&self) -> SequenceHash {
        let value = u128::from(self.hash[1].get()) << 64 | u128::from(self.hash[0].get());
        SequenceHash::from_bytes(value.to_le_bytes())
    }

    #[inline]
    pub(crate) fn is_block(&self, group: GroupId, hash: SequenceHash) -> bool {
        let value = hash.to_u128();
        self.hash[0].get() == value as u64
            && self.hash[1].get() == (value >> 64) as u64
            && self.group() == group
            && self.in_use()
    }

    /// Entries that continue this one on `tier`.
    #[inline]
    pub(crate) fn children(&self, tier: usize) -> u32 {
        self.children[tier].get()
    }

    /// Counts a child more on `tier`. A count that reaches its maximum stays there: the block is
    /// then never evicted, which is safe, where a wrapped count would let it go before its
    /// children.
    #[inline]
    pub(crate) fn add_child(&self, tier: usize) {
        self.children[tier].set(self.children(tier).saturating_add(1));
    }

    /// Counts a child less on `tier`; returns how many are left. A count does not go below zero.
    #[inline]
    pub(crate) fn drop_child(&self, tier: usize) -> u32 {
        let count = self.children(tier);
        debug_assert!(count > 0, "a child that leaves was counted when it came");
        if count != MANY {
            self.children[tier].set(count.saturating_sub(1));
        }
        self.children(tier)
    }

    #[inline]
    pub(crate) fn add_link(&self) {
        self.links.set(self.links.get() + 1);
    }

    #[inline]
    pub(crate) fn drop_link(&self) {
        debug_assert!(self.links.get() > 0, "a link that ends was counted when it began");
        self.links.set(self.links.get().saturating_sub(1));
    }

    #[inline]
    pub(crate) fn namespace(&self) -> NamespaceId {
        NamespaceId(self.namespace.get())
    }

    #[inline]
    pub(crate) fn slot(&self, tier: usize) -> u32 {
        self.slots[tier].get()
    }

    /// Whether a block at `position` continues this one.
    #[inline]
    pub(crate) fn comes_before(&self, position: u32) -> bool {
        self.position.get().checked_add(1) == Some(position)
    }

    #[inline]
    pub(crate) fn group(&self) -> GroupId {
        GroupId(u16::from(self.group.get()))
    }

    #[inline]
    pub(crate) fn tag(&self) -> u64 {
        tag_of(self.group(), self.hash())
    }

    #[inline]
    pub(crate) fn memory(&self) -> BlockMemory {
        BlockMemory { time: self.policy_time.get(), class: self.policy_class.get() }
    }

    #[inline]
    pub(crate) fn set_memory(&self, memory: BlockMemory) {
        self.policy_time.set(memory.time);
        self.policy_class.set(memory.class);
    }

    /// Marks the block as just registered.
    #[inline]
    pub(crate) fn set_fresh(&self) {
        self.presence_bits.set(self.presence_bits.get() | FRESH);
    }

    /// Whether the block was marked; it is not any more.
    #[inline]
    pub(crate) fn take_fresh(&self) -> bool {
        let bits = self.presence_bits.get();
        self.presence_bits.set(bits & !FRESH);
        bits & FRESH != 0
    }

    #[inline]
    pub(crate) fn is_pinned(&self) -> bool {
        self.presence_bits.get() & PINNED != 0
    }

    #[inline]
    pub(crate) fn set_pinned(&self, pinned: bool) {
        self.presence_bits.set(self.presence_bits.get() & !PINNED | if pinned { PINNED } else { 0 });
    }

    #[inline]
    pub(crate) fn presence(&self, tier: usize) -> Presence {
        match self.presence_bits.get() >> (2 * tier) & 0b11 {
            0 => Presence::Absent,
            1 => Presence::Arriving,
            _ => Presence::Present,
        }
    }

    #[inline]
    pub(crate) fn set_presence(&self, tier: usize, presence: Presence) {
        let others = self.presence_bits.get() & !(0b11 << (2 * tier));
        self.presence_bits.set(others | (presence as u8) << (2 * tier));
    }

    /// Whether the block is neither Present nor Arriving anywhere.
    #[inline]
    pub(crate) fn is_nowhere(&self) -> bool {
        self.presence_bits.get() & PRESENCE == 0
    }

    /// Nearest tier with the block.
    #[inline]
    pub(crate) fn nearest(&self) -> Option<usize> {
        self.nearest_of(PresentOn::ALL)
    }

    /// Nearest of some tiers with the block.
    #[inline]
    pub(crate) fn nearest_of(&self, tiers: PresentOn) -> Option<usize> {
        let present = self.presence_bits.get() & tiers.0;
        (present != 0).then(|| present.trailing_zeros() as usize / 2)
    }
}

/// Some tiers, as the bits of which one is set where a block is Present on one of them.
#[derive(Clone, Copy)]
pub(crate) struct PresentOn(u8);

/// Of the two bits of a tier that one is set for Present alone.
const PRESENT: u8 = Presence::Present as u8;
const _: () = assert!(PRESENT == 0b10 && (Presence::Absent as u8 | Presence::Arriving as u8) & PRESENT == 0);

impl PresentOn {
    const ALL: Self = Self(PRESENT | PRESENT << 2 | PRESENT << 4);

    pub(crate) fn some_of(tiers: TierMask) -> Self {
        Self(tiers.iter().fold(0, |bits, tier| bits | PRESENT << (2 * tier.index())))
    }
}

/// Identity of the block of an entry in use. Its parent is in use as well.
#[inline]
pub(crate) fn identity_of(entries: &[Entry], index: u32) -> BlockIdentity {
    let entry = &entries[index as usize];
    let parent = entry.parent.get();
    BlockIdentity {
        namespace: entry.namespace(),
        group: entry.group(),
        hash: entry.hash(),
        parent: (parent != NONE).then(|| entries[parent as usize].hash()),
        position: entry.position.get(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u8) -> SequenceHash {
        SequenceHash::from_bytes([number; 16])
    }

    #[test]
    fn a_group_whose_number_does_not_fit_has_no_blocks() {
        let entry = Entry::vacant();
        entry.begin(GroupId(2), hash(1), NamespaceId(0), 0);
        assert!(entry.is_block(GroupId(2), hash(1)));
        assert!(!entry.is_block(GroupId(256 + 2), hash(1)));
        assert!(!entry.is_block(GroupId(2), hash(2)));
    }

    #[test]
    fn a_saturated_child_count_stays() {
        let entry = Entry::vacant();
        entry.begin(GroupId(0), hash(1), NamespaceId(0), 0);
        entry.children[0].set(MANY - 1);
        entry.add_child(0);
        assert_eq!(entry.children(0), MANY);
        entry.add_child(0);
        assert_eq!(entry.children(0), MANY);
        assert_eq!((entry.drop_child(0), entry.children(0)), (MANY, MANY));
        for tier in 1..TIERS {
            entry.add_child(tier);
            assert_eq!((entry.children(tier), entry.drop_child(tier), entry.children(tier)), (1, 0, 0));
        }
    }
}
