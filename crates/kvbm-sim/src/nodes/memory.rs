//! The memory of a process: a few small blocks, and who keeps them in place.

use kvbm_layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
};
use kvbm_nixl::{BlockSource, HeldBlock, LocalRank};
use kvbm_plan::{HeadRange, Rank, RankSlice, Replication, SequenceHash, clock};
use kvbm_storage::{BoundLayout, SystemAllocator};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Blocks of a process.
pub(super) const SLOTS: u32 = 12;
/// Blocks of a chain.
pub(super) const CHAIN: u32 = 4;

/// Block `at` of a chain.
pub(super) fn hash(chain: u32, at: u32) -> SequenceHash {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&chain.to_le_bytes());
    bytes[4] = at as u8;
    SequenceHash::from_bytes(bytes)
}

/// The only right bytes of a block.
fn content(hash: &SequenceHash, length: usize) -> Vec<u8> {
    let seed: u8 = hash.as_bytes().iter().fold(0, |sum: u8, byte| sum.wrapping_mul(31) ^ byte);
    let byte = |at: usize| (at as u8).wrapping_mul(37) ^ hash.as_bytes()[at % 5].wrapping_mul(91) ^ seed;
    (0..length).map(byte).collect()
}

/// What a slot holds.
#[derive(Clone, Debug, Default)]
struct Slot {
    hash: Option<SequenceHash>,
    /// Peers keep it in place, since when.
    pins: BTreeMap<u64, Instant>,
    /// A read of ours may write to it.
    is_reserved: bool,
}

#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    next_pin: u64,
}

/// See the module.
pub(super) struct Memory {
    pub(super) rank: LocalRank,
    slots: Arc<Mutex<Slots>>,
}

/// Keeps a slot in place for a peer.
struct Pin {
    slots: Arc<Mutex<Slots>>,
    slot: u32,
    id: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.slots.lock().slots[self.slot as usize].pins.remove(&self.id);
    }
}

/// Keeps slots out of use until no transfer can write to them.
pub(super) struct Reserved {
    slots: Arc<Mutex<Slots>>,
    pub(super) which: Vec<u32>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut slots = self.slots.lock();
        for slot in &self.which {
            slots.slots[*slot as usize].is_reserved = false;
        }
    }
}

fn layout(is_separate: bool) -> Arc<dyn BlockLayout> {
    let config = LayoutConfig::builder().num_blocks(SLOTS).num_layers(2).outer_dim(2).page_size(2);
    let config = config.inner_dim(16).num_heads(2).dtype(DType::BF16).alignment(64);
    let config = config.build().expect("a sound shape");
    if is_separate {
        Arc::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter).expect("a layout"))
    } else {
        Arc::new(FullyContiguous::new(config, AxisOrder::Nhd).expect("a layout"))
    }
}

impl Memory {
    pub(super) fn new(is_separate: bool) -> Self {
        let bound =
            BoundLayout::allocate(layout(is_separate), &SystemAllocator::default()).expect("a little memory");
        let heads = HeadRange { start: 0, count: 2 };
        let slice =
            RankSlice { rank: Rank(0), first_layer: 0, num_layers: 2, heads, replication: Replication::None };
        let slots = Slots { slots: vec![Slot::default(); SLOTS as usize], next_pin: 0 };
        Self { rank: LocalRank::new(slice, bound), slots: Arc::new(Mutex::new(slots)) }
    }

    /// What the process offers to its peers.
    pub(super) fn source(&self) -> Arc<dyn BlockSource> {
        Arc::new(Source(Arc::clone(&self.slots)))
    }

    /// Takes slots that nobody uses, and forgets what they hold.
    pub(super) fn reserve(&self, count: usize, first: usize) -> Option<Reserved> {
        let mut slots = self.slots.lock();
        let is_free = |slot: &Slot| slot.pins.is_empty() && !slot.is_reserved;
        let order = (0..SLOTS as usize).map(|at| (at + first) % SLOTS as usize);
        let free: Vec<usize> = order.filter(|at| is_free(&slots.slots[*at])).take(count).collect();
        if free.len() < count {
            return None;
        }
        for at in &free {
            slots.slots[*at] = Slot { is_reserved: true, ..Slot::default() };
        }
        let which = free.into_iter().map(|at| at as u32).collect();
        Some(Reserved { slots: Arc::clone(&self.slots), which })
    }

    /// Computes a block into a reserved slot.
    pub(super) fn fill(&self, slot: u32, hash: SequenceHash) {
        let bytes = content(&hash, self.rank.bound.bytes_per_block() as usize);
        // SAFETY: one thread runs the simulation, and the slot is reserved: no peer reads it.
        unsafe { self.rank.bound.write_block(slot, &bytes) }.expect("host memory");
        self.register(slot, hash);
    }

    /// A reserved slot holds this block from now on.
    pub(super) fn register(&self, slot: u32, hash: SequenceHash) {
        self.slots.lock().slots[slot as usize].hash = Some(hash);
    }

    /// Whether the slot has the only right bytes.
    pub(super) fn is_right(&self, slot: u32, hash: &SequenceHash) -> bool {
        let mut found = vec![0; self.rank.bound.bytes_per_block() as usize];
        // SAFETY: one thread runs the simulation.
        unsafe { self.rank.bound.read_block(slot, &mut found) }.expect("host memory");
        found == content(hash, found.len())
    }

    /// A registered block whose bytes are wrong.
    pub(super) fn find_wrong(&self) -> Option<SequenceHash> {
        let registered: Vec<(u32, SequenceHash)> = {
            let slots = self.slots.lock();
            let slots = slots.slots.iter().enumerate();
            slots.filter_map(|(at, slot)| Some((at as u32, slot.hash?))).collect()
        };
        registered.into_iter().find(|(slot, hash)| !self.is_right(*slot, hash)).map(|(_, hash)| hash)
    }

    /// Whether a peer keeps the block in place.
    pub(super) fn is_pinned(&self, hash: &SequenceHash) -> bool {
        let slots = self.slots.lock();
        slots.slots.iter().any(|slot| slot.hash.as_ref() == Some(hash) && !slot.pins.is_empty())
    }

    /// Pins: of which block, since when.
    pub(super) fn pins(&self) -> Vec<(SequenceHash, Instant)> {
        let slots = self.slots.lock();
        let pins = |slot: &Slot| {
            let hash = slot.hash;
            slot.pins.values().filter_map(move |since| Some((hash?, *since))).collect::<Vec<_>>()
        };
        slots.slots.iter().flat_map(pins).collect()
    }

    /// A chain of which the process has the first block, from some slot on.
    pub(super) fn any_chain(&self, first: usize) -> Option<u32> {
        let slots = self.slots.lock();
        let order = (0..SLOTS as usize).map(|at| (at + first) % SLOTS as usize);
        let hashes = order.filter_map(|at| slots.slots[at].hash);
        let chain = |hash: &SequenceHash| {
            let bytes = hash.as_bytes();
            (bytes[4] == 0).then(|| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        hashes.into_iter().find_map(|hash| chain(&hash))
    }
}

/// What peers are given.
struct Source(Arc<Mutex<Slots>>);

impl Slots {
    fn slot_of(&self, hash: &SequenceHash) -> Option<usize> {
        self.slots.iter().position(|slot| slot.hash.as_ref() == Some(hash))
    }
}

impl BlockSource for Source {
    fn count(&self, hashes: &[SequenceHash]) -> usize {
        let slots = self.0.lock();
        hashes.iter().take_while(|hash| slots.slot_of(hash).is_some()).count()
    }

    fn has_each(&self, hashes: &[SequenceHash]) -> Vec<bool> {
        let slots = self.0.lock();
        hashes.iter().map(|hash| slots.slot_of(hash).is_some()).collect()
    }

    fn hold(&self, hashes: &[SequenceHash]) -> Vec<HeldBlock> {
        let mut slots = self.0.lock();
        let found: Vec<usize> = hashes.iter().map_while(|hash| slots.slot_of(hash)).collect();
        let mut hold = |at: usize| {
            slots.next_pin += 1;
            let id = slots.next_pin;
            slots.slots[at].pins.insert(id, clock::now());
            let guard = Arc::new(Pin { slots: Arc::clone(&self.0), slot: at as u32, id });
            HeldBlock { block: at as u32, guard }
        };
        found.into_iter().map(&mut hold).collect()
    }
}
