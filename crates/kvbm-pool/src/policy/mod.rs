//! Which block goes when room is needed: the seam, and the policies that ship.
//!
//! The registry keeps every policy to the rules: it names as evictable only blocks that nobody uses and, in Full
//! groups, that nothing on the tier continues. A policy only chooses among these. What it wants to remember of a block
//! lies in the block's own entry ([`BlockMemory`], three bytes), so a use of a block costs no further cache miss.

mod hazard;
mod s3_fifo;

pub use hazard::Hazard;
pub use s3_fifo::S3Fifo;

use crate::config::PolicyKind;
use crate::core::entry::Arena;
use crate::core::slot::Slot;
use crate::tier::TIERS;

/// What a policy keeps with each block while the block is on any tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockMemory {
    /// A time, in the policy's own unit; it may wrap.
    pub time: u16,
    /// Anything.
    pub class: u8,
}

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

/// What victims are chosen among: the slots of a tier, or, where tenants have shares, those of one tenant there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotSet {
    /// The tier.
    pub tier: usize,
    /// The tenant's place in [`RegistryConfig::tenants`](crate::RegistryConfig::tenants) and one; 0 for blocks of nobody, and
    /// where there are no tenants. A slot belongs to one set until it is evictable no more.
    pub tenant: usize,
}

impl SlotSet {
    /// All slots of a tier, where there are no tenants.
    pub(crate) const fn of_tier(tier: usize) -> Self {
        Self { tier, tenant: 0 }
    }
}

/// Something for each set of slots; sets come into being when they are needed.
struct Sets<T> {
    new: fn(usize) -> T,
    capacity: [usize; TIERS],
    all: Vec<[T; TIERS]>,
}

impl<T> Sets<T> {
    /// `new` makes the one of a set, from the slots of its tier.
    fn new(capacity: [usize; TIERS], new: fn(usize) -> T) -> Self {
        Self { new, capacity, all: vec![capacity.map(new)] }
    }

    #[inline]
    fn get(&self, set: SlotSet) -> Option<&T> {
        self.all.get(set.tenant).map(|tiers| &tiers[set.tier])
    }

    #[inline]
    fn at(&mut self, set: SlotSet) -> &mut T {
        while self.all.len() <= set.tenant {
            self.all.push(self.capacity.map(self.new));
        }
        &mut self.all[set.tenant][set.tier]
    }

    /// Whether nobody's blocks are kept apart.
    fn is_one_for_each_tier(&self) -> bool {
        self.all.len() == 1
    }

    fn each(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.iter_mut().flatten()
    }
}

/// A number that the registry keeps with each evictable slot of a tier for the policy: where the slot is in a list, say.
/// It lies in the slot itself, where references are otherwise, so it costs no memory and no further cache miss.
pub struct Numbers<'a> {
    slots: &'a [Slot],
    /// Where the blocks in the slots are described, where victims are chosen.
    entries: Option<&'a Arena>,
}

impl<'a> Numbers<'a> {
    pub(crate) fn of(slots: &'a [Slot]) -> Self {
        Self { slots, entries: None }
    }

    pub(crate) fn for_victims(slots: &'a [Slot], entries: &'a Arena) -> Self {
        Self { slots, entries: Some(entries) }
    }
}

impl Numbers<'_> {
    /// The tag of the block in an evictable slot; while victims are chosen only. Reads memory that may be far.
    #[inline]
    pub fn tag(&self, slot: u32) -> Option<u64> {
        let state = self.slots.get(slot as usize).filter(|state| state.is_listed())?;
        Some(self.entries?[state.entry.get()].tag())
    }

    /// The number of `slot`; none before it is set, and none where the slot is not evictable.
    #[inline]
    pub fn get(&self, slot: u32) -> Option<u32> {
        self.slots.get(slot as usize).and_then(Slot::number)
    }

    /// Sets (below 2^28 - 1) or clears the number of an evictable slot. It is gone when the slot is not evictable any more.
    #[inline]
    pub fn set(&mut self, slot: u32, number: Option<u32>) {
        if let Some(state) = self.slots.get(slot as usize) {
            state.set_number(number);
        }
    }
}

/// Chooses victims on all tiers of one registry.
///
/// Every method runs under a lock of the registry: it must be short, must not wait and must not call the registry. A
/// request is `begin`, then `registered` or `used` for each of its blocks. A policy that keeps nothing of blocks answers only what is said
/// of slots.
///
/// A registry of several shards has a part of the policy for each ([`split`](Self::split)), under the shard's lock. What is said of a slot
/// (`evictable`, `kept`, `emptied`, `touched`, `victims`, `has_victim`) is said to the part of the shard that the slot's block belongs
/// to for as long as it is on any tier; all else, to any part.
pub trait EvictionPolicy: Send {
    /// As many policies as that, which together take the place of this one, to which nothing was said yet: one for each shard. None where
    /// one must see every block: then the registry has one shard, and a second thread waits for the first.
    fn split(&self, parts: usize) -> Option<Vec<Box<dyn EvictionPolicy>>> {
        let _ = parts;
        None
    }

    /// Blocks of a request come: those that are there (`used`) or those that are new (`registered`). `before` is what is
    /// kept of the last block there of the former, or of the block before the first of the latter.
    fn begin(&mut self, before: Option<BlockMemory>, part: RequestPart, blocks: usize) {
        let _ = (before, part, blocks);
    }

    /// The request that began in another part goes on in this one: `before` is as there.
    fn goes_on(&mut self, before: Option<BlockMemory>) {
        let _ = before;
    }

    /// Blocks with these tags are about to come or to be forgotten, each told on its own later: whatever is remembered of
    /// them in far memory is better read now, for all at once.
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

    /// The caller says that nothing will continue the block's branch, and that the block belongs to no other.
    fn ended(&mut self, tag: u64, memory: BlockMemory) -> BlockMemory {
        let _ = tag;
        memory
    }

    /// Looks at a block that is on some tier, whichever: called for all of them in turn, for each once in `every` uses of
    /// blocks.
    fn observe(&mut self, memory: BlockMemory, every: u64) -> BlockMemory {
        let _ = every;
        memory
    }

    /// The last copy of a block was evicted.
    fn forgotten(&mut self, tag: u64, memory: BlockMemory) {
        let _ = (tag, memory);
    }

    /// `slot` of `set` may be evicted from now on; or it may already, and what is kept of its block has changed.
    /// `priority` is that of its [`BlockMetadata`](crate::BlockMetadata).
    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        memory: BlockMemory,
        priority: u8,
        numbers: &mut Numbers<'_>,
    );

    /// `slot` of `set` must not be evicted any more, or is empty.
    fn kept(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>);

    /// The block in `slot` of `set` was removed on request: the next one there is another.
    fn emptied(&mut self, set: SlotSet, slot: u32, numbers: &mut Numbers<'_>) {
        self.kept(set, slot, numbers);
    }

    /// A block in `slot` of `tier` was used (it may not be evictable).
    fn touched(&mut self, tier: usize, slot: u32) {
        let _ = (tier, slot);
    }

    /// Chooses at least one and at most `want` evictable slots of `set`, appends them to `out`, and counts them as not
    /// evictable. None only where none is evictable. What is not in the set does not go; where
    /// nothing of the answer may, the least recently used does. What was not wanted is told again ([`evictable`](Self::evictable)).
    fn victims(&mut self, set: SlotSet, want: usize, out: &mut Vec<u32>, numbers: &mut Numbers<'_>);

    /// Whether the least recently used blocks of `set` are the ones to go for now: then the registry takes these, without asking
    /// for [`victims`](Self::victims), and says [`kept`](Self::kept) of them.
    fn follows_recency(&self, set: SlotSet) -> bool {
        let _ = set;
        false
    }

    /// Uses expected of a block while as many blocks are used as the largest tier holds, if the policy estimates that.
    fn expected_reuse(&self, memory: BlockMemory) -> Option<f32> {
        let _ = memory;
        None
    }

    /// Whether a slot of `set` is evictable.
    fn has_victim(&self, set: SlotSet) -> bool;
}

/// The policy of that name; none for the one that the registry has built in.
pub(crate) fn build(
    kind: PolicyKind,
    capacity: [usize; TIERS],
    seed: u64,
) -> Option<Box<dyn EvictionPolicy>> {
    match kind {
        PolicyKind::LruLeaf => None,
        PolicyKind::S3Fifo => Some(Box::new(S3Fifo::new(capacity, seed))),
        PolicyKind::Hazard => Some(Box::new(Hazard::new(capacity, seed))),
    }
}

/// Whether a block of this priority is passed over where policies that learn nothing would have it: out of `1 + priority` times all but
/// one, in the mean.
#[inline]
pub(crate) fn spares(priority: u8, random: &mut Random) -> bool {
    priority > 0 && random.below(1 + usize::from(priority)) > 0
}

/// Numbers that look random; cheap.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// From one number to the next.
    pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        mix(self.0)
    }

    /// Below `end`, which must not be 0.
    #[inline]
    pub(crate) fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

/// Every bit of the number reaches every bit of the result (splitmix64's finalizer).
#[inline]
pub(crate) fn mix(number: u64) -> u64 {
    let z = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
