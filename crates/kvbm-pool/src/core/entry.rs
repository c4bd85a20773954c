//! Entries: what is known of one block, on all tiers. A flat array that all shards share.

use super::field::{U8, U16, U32, U64};
use super::{MAX_SHARDS, NONE, Presence};
use crate::policy::{BlockMemory, mix};
use crate::tier::{TIERS, TierMask};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::sync::OnceLock;

/// One block on all tiers: one cache line.
#[repr(C, align(64))]
pub(crate) struct Entry {
    hash: [U64; 2],
    /// Entry of the block before it, or `NONE`. While vacant: the next vacant entry.
    pub parent: U32,
    pub position: U32,
    /// Slot on each tier where the presence there is not `Absent`.
    pub slots: [U32; TIERS],
    /// Entries that continue this one and are Arriving or Present, by tier. In the upper bits of the first: the shard.
    children: [U32; TIERS],
    /// What keeps the entry although it is on no tier: entries that name it as parent, and slots that still hold
    /// its bytes for their users after it was removed.
    pub links: U32,
    namespace: U32,
    /// Iteration of the last use on any tier; wraps.
    pub last_step: U16,
    /// What the eviction policy keeps.
    policy_time: U16,
    policy_class: U8,
    /// A group's number is below [`RegistryConfig::MAX_GROUPS`](crate::RegistryConfig::MAX_GROUPS).
    group: U8,
    /// Two bits for each tier, `KEPT` and `FRESH`.
    presence_bits: U8,
    pub priority: U8,
}

/// The request that registered the block has neither touched it nor let go of it: its first touch is no further use.
const FRESH: u8 = 0x80;
/// The block is pinned until some iteration on some tier.
const KEPT: u8 = 0x40;
const PRESENCE: u8 = 0b11_11_11;

/// Where the shard's number stands in the word of the children on the first tier.
const SHARD_SHIFT: u32 = 28;
const COUNT: u32 = (1 << SHARD_SHIFT) - 1;
/// Shard of an entry that is not in use.
const NOBODY: usize = 15;
const _: () = assert!(MAX_SHARDS <= NOBODY);

const _: () = assert!(size_of::<Entry>() == 64 && align_of::<Entry>() == 64);

/// What policies know a block by.
#[inline]
pub(crate) fn tag_of(group: GroupId, hash: SequenceHash) -> u64 {
    mix(hash.to_u128() as u64 ^ u64::from(group.0) << 48)
}

impl Entry {
    pub(crate) const fn vacant() -> Self {
        const fn word(value: u32) -> U32 {
            U32::new(value)
        }
        Self {
            hash: [U64::new(0), U64::new(0)],
            parent: word(NONE),
            position: word(0),
            slots: [word(NONE), word(NONE), word(NONE)],
            children: [word((NOBODY as u32) << SHARD_SHIFT), word(0), word(0)],
            links: word(0),
            namespace: word(0),
            last_step: U16::new(0),
            policy_time: U16::new(0),
            policy_class: U8::new(0),
            group: U8::new(0),
            presence_bits: U8::new(0),
            priority: U8::new(0),
        }
    }

    /// Makes a vacant entry that of a block which is nowhere yet. From here on it belongs to `shard`.
    #[inline]
    pub(crate) fn begin(
        &self,
        shard: usize,
        group: GroupId,
        hash: SequenceHash,
        namespace: NamespaceId,
        position: u32,
    ) {
        let value = hash.to_u128();
        self.hash[0].set(value as u64);
        self.hash[1].set((value >> 64) as u64);
        self.parent.set(NONE);
        self.position.set(position);
        for slot in &self.slots {
            slot.set(NONE);
        }
        self.children[1].set(0);
        self.children[2].set(0);
        self.links.set(0);
        self.namespace.set(namespace.0);
        self.last_step.set(0);
        self.set_memory(BlockMemory::default());
        self.group.set(group.0 as u8);
        self.presence_bits.set(0);
        self.priority.set(0);
        self.children[0].set((shard as u32) << SHARD_SHIFT);
    }

    /// Makes it vacant. What else is in it means nothing any more.
    #[inline]
    pub(crate) fn end(&self) {
        self.children[0].set((NOBODY as u32) << SHARD_SHIFT);
    }

    /// The shard that the entry belongs to; [`MAX_SHARDS`] or more where it is not in use. Only under that shard's lock can
    /// it come to belong to it, or cease to: who holds a lock and reads its number here can rely on all fields.
    #[inline]
    pub(crate) fn shard(&self) -> usize {
        (self.children[0].get() >> SHARD_SHIFT) as usize
    }

    #[inline]
    pub(crate) fn in_use(&self) -> bool {
        self.shard() != NOBODY
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
        self.children[tier].get() & COUNT
    }

    /// One child more on `tier`. A count that reaches its maximum stays there: the block is then never evicted for its children's
    /// sake, which is safe, where one more would reach into the shard.
    #[inline]
    pub(crate) fn add_child(&self, tier: usize) {
        if self.children(tier) < COUNT {
            self.children[tier].set(self.children[tier].get() + 1);
        }
    }

    /// One child less on `tier`; says how many are left. Nor does a count go below zero.
    #[inline]
    pub(crate) fn drop_child(&self, tier: usize) -> u32 {
        let (word, count) = (self.children[tier].get(), self.children(tier));
        debug_assert!(count > 0, "a child that leaves was counted when it came");
        match count {
            0 | COUNT => count,
            _ => {
                self.children[tier].set(word - 1);
                count - 1
            }
        }
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

    /// Changes the time that the policy keeps, unless that has changed since it was read: without the lock of the entry's shard.
    pub(crate) fn change_time(&self, from: u16, to: u16) {
        self.policy_time.change(from, to);
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
    pub(crate) fn is_kept(&self) -> bool {
        self.presence_bits.get() & KEPT != 0
    }

    #[inline]
    pub(crate) fn set_kept(&self, kept: bool) {
        self.presence_bits.set(self.presence_bits.get() & !KEPT | if kept { KEPT } else { 0 });
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

/// All entries. The array grows only while all shards are locked.
pub(crate) struct Arena {
    base: Box<[Entry]>,
    /// Each as long as all before it together.
    more: [OnceLock<Box<[Entry]>>; MORE],
}

const MORE: usize = 24;

/// Fewest entries that are added.
const LEAST: usize = 64;

impl Arena {
    pub(crate) fn new(entries: usize) -> Self {
        Self { base: vacant_entries(entries.max(LEAST)), more: [const { OnceLock::new() }; MORE] }
    }

    pub(crate) fn len(&self) -> usize {
        let grown = self.more.iter().take_while(|part| part.get().is_some()).count();
        self.base.len() << grown
    }

    /// Makes room for as many again; false where there is no number for more.
    pub(crate) fn grow(&self) -> bool {
        let len = self.len();
        let next = self.more.iter().find(|part| part.get().is_none());
        next.is_some_and(|part| len <= (NONE / 4) as usize && part.set(vacant_entries(len)).is_ok())
    }

    #[cold]
    fn added(&self, index: usize) -> &Entry {
        let part = (index / self.base.len()).ilog2() as usize;
        let entries = self.more.get(part).and_then(OnceLock::get);
        let start = self.base.len() << part;
        &entries.expect(
            "indices come from lanes and fields, each written as a whole after the array had the entry",
        )[index - start]
    }

    /// Identity of the block of an entry in use. Its parent is in use as well, perhaps in another shard, and keeps its hash.
    pub(crate) fn identity(&self, index: u32) -> BlockIdentity {
        let entry = &self[index];
        let parent = entry.parent.get();
        BlockIdentity {
            namespace: entry.namespace(),
            group: entry.group(),
            hash: entry.hash(),
            parent: (parent != NONE).then(|| self[parent].hash()),
            position: entry.position.get(),
        }
    }
}

fn vacant_entries(count: usize) -> Box<[Entry]> {
    (0..count).map(|_| Entry::vacant()).collect()
}

impl std::ops::Index<u32> for Arena {
    type Output = Entry;
    #[inline]
    fn index(&self, index: u32) -> &Entry {
        match self.base.get(index as usize) {
            Some(entry) => entry,
            None => self.added(index as usize),
        }
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
        entry.begin(3, GroupId(2), hash(1), NamespaceId(0), 0);
        assert!(entry.is_block(GroupId(2), hash(1)));
        assert!(!entry.is_block(GroupId(256 + 2), hash(1)));
        assert!(!entry.is_block(GroupId(2), hash(2)));
    }

    #[test]
    fn children_that_are_too_many_to_count_stay_and_the_shard_is_left_alone() {
        let entry = Entry::vacant();
        entry.begin(3, GroupId(0), hash(1), NamespaceId(0), 0);
        entry.children[0].set(3 << SHARD_SHIFT | (COUNT - 1));
        entry.add_child(0);
        assert_eq!((entry.children(0), entry.shard()), (COUNT, 3));
        entry.add_child(0);
        assert_eq!((entry.children(0), entry.shard()), (COUNT, 3));
        assert_eq!((entry.drop_child(0), entry.children(0), entry.shard()), (COUNT, COUNT, 3));
        for tier in 1..TIERS {
            entry.add_child(tier);
            assert_eq!((entry.children(tier), entry.drop_child(tier), entry.children(tier)), (1, 0, 0));
        }
    }
}
