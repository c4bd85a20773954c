//! The interface of eviction policies.

use crate::entry::{BlockMemory, Entry};
use crate::slot::Slot;

/// One block of a request, as it is used.
#[derive(Clone, Copy, Debug)]
pub struct BlockUse {
    /// Half of the block's hash, mixed: tells blocks apart well enough for a history.
    pub tag: u64,
    /// Blocks of the request behind this one; 0 for its last.
    pub from_tail: u32,
}

/// Which blocks of a request are spoken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPart {
    /// Those that are on some tier.
    Used,
    /// Those that come.
    Registered,
}

/// What victims are chosen among: the slots of a tier, or, where tenants have shares, those of one
/// tenant there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotSet {
    /// The tier.
    pub tier: usize,
    /// The tenant's place in [`RegistryConfig::tenants`](crate::RegistryConfig::tenants) and one; 0
    /// for blocks without a tenant, and where no tenants are configured. A slot belongs to one set
    /// until it is evictable no more.
    pub tenant: usize,
}

impl SlotSet {
    /// All slots of a tier, where there are no tenants.
    pub(crate) const fn of_tier(tier: usize) -> Self {
        Self { tier, tenant: 0 }
    }
}

/// A number that the registry keeps with each evictable slot of a tier for the policy: where the
/// slot is in a list, say. It lies in the slot itself, where references are otherwise, so it costs
/// no memory and no further cache miss.
pub struct SlotNumbers<'a> {
    slots: &'a [Slot],
    /// Where the blocks in the slots are described, where victims are chosen.
    entries: Option<&'a [Entry]>,
}

impl<'a> SlotNumbers<'a> {
    pub(crate) fn of(slots: &'a [Slot]) -> Self {
        Self { slots, entries: None }
    }

    pub(crate) fn for_victims(slots: &'a [Slot], entries: &'a [Entry]) -> Self {
        Self { slots, entries: Some(entries) }
    }
}

impl SlotNumbers<'_> {
    /// The tag of the block in an evictable slot; while victims are chosen only. Reads memory that
    /// may be far.
    #[inline]
    pub fn tag(&self, slot: u32) -> Option<u64> {
        let state = self.slots.get(slot as usize).filter(|state| state.is_listed())?;
        Some(self.entries?[state.entry.get() as usize].tag())
    }

    /// The number of `slot`; none before it is set, and none where the slot is not evictable.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<u32> {
        self.slots.get(slot as usize).and_then(Slot::number)
    }

    /// Sets (below 2^28 - 1) or clears the number of an evictable slot. It is gone when the slot is
    /// not evictable any more.
    #[inline]
    pub fn set(&mut self, slot: u32, number: Option<u32>) {
        if let Some(state) = self.slots.get(slot as usize) {
            state.set_number(number);
        }
    }
}

/// Chooses victims on all tiers of one registry.
///
/// Every method runs under a lock of the registry: it must be short, must not wait and must not
/// call the registry. A request is `begin`, then `registered` or `used` for each of its blocks. A
/// policy that keeps nothing of blocks answers only what is said of slots.
pub trait EvictionPolicy: Send {
    /// Blocks of a request come: those that are there (`used`) or those that are new
    /// (`registered`). `before` is what is kept of the last block there of the former, or of the
    /// block before the first of the latter.
    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        let _ = (before, part, blocks);
    }

    /// Blocks with these tags are about to be registered or forgotten, each in a call of its own
    /// later. Whatever is remembered of them in far memory is better read now, for all at once.
    fn expect(&self, tags: &[u64]) {
        let _ = tags;
    }

    /// A block comes that was on no tier: what to keep of it.
    fn registered(&mut self, block: &BlockUse) -> BlockMemory {
        let _ = block;
        BlockMemory::default()
    }

    /// A block that is on some tier is used again: what to keep of it from now on.
    fn used(&mut self, block: &BlockUse, memory: BlockMemory) -> BlockMemory {
        let _ = block;
        memory
    }

    /// The caller says that nothing will continue the block's branch, and that the block belongs to
    /// no other.
    fn ended(&mut self, tag: u64, memory: BlockMemory) -> BlockMemory {
        let _ = tag;
        memory
    }

    /// Looks at a block that is on some tier, whichever: called for all of them in turn, for each
    /// once in `every` uses of blocks.
    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        let _ = every;
        memory
    }

    /// The last copy of a block was evicted.
    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        let _ = (tag, memory);
    }

    /// `slot` of `set` may be evicted from now on; or it may already, and what is kept of its block
    /// has changed. `priority` is that of its [`BlockMetadata`](crate::BlockMetadata).
    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        numbers: &mut SlotNumbers<'_>,
    );

    /// `slot` of `set` must not be evicted any more, or is empty.
    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut SlotNumbers<'_>);

    /// The block in `slot` of `set` was removed on request: the next one there is another.
    fn emptied(&mut self, set: SlotSet, slot: u32, numbers: &mut SlotNumbers<'_>) {
        self.kept(set, slot, numbers);
    }

    /// A block in `slot` of `tier` was used (it may not be evictable).
    fn touched(&mut self, tier: usize, slot: u32) {
        let _ = (tier, slot);
    }

    /// Chooses at least one and at most `want` evictable slots of `set`, appends them to `out`, and
    /// counts them as not evictable. None only where none is evictable. What is not in the set does
    /// not go; where nothing of the answer may, the least recently used does. What was not wanted
    /// is reported again ([`evictable`](Self::evictable)).
    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, numbers: &mut SlotNumbers<'_>);

    /// Whether the least recently used blocks of `set` are the ones to go for now: then the
    /// registry takes these, without asking for [`victims`](Self::victims), and says
    /// [`kept`](Self::kept) of them.
    fn follows_recency(&self, set: SlotSet) -> bool {
        let _ = set;
        false
    }

    /// Uses expected of a block while as many blocks are used as the largest tier holds, if the
    /// policy estimates that.
    fn expected_reuse(&self, memory: BlockMemory) -> Option<f32> {
        let _ = memory;
        None
    }

    /// Whether a slot of `set` is evictable.
    fn has_victim(&self, set: SlotSet) -> bool;
}
