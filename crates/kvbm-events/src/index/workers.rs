//! Who holds blocks, and at which places.

use crate::SourceId;
use kvbm_plan::{Location, Tier};
use std::collections::HashMap;

/// Where blocks are, and which shard of their source publishes their events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Whose blocks.
    pub source: SourceId,
    /// Shard of the source: what it clears, it clears by shard.
    pub shard: u16,
    /// Tier, node and volume.
    pub location: Location,
}

/// A place as the index knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlaceId {
    pub(super) worker: u16,
    pub(super) place: u8,
    pub(super) tier: u8,
}

/// A block of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) run: u32,
    pub(super) block: u8,
}

#[derive(Debug)]
struct Held {
    place: Place,
    blocks: u64,
}

#[derive(Debug)]
struct Worker {
    source: SourceId,
    places: Vec<Held>,
    /// The last block that it stored: the next one usually follows it.
    last: At,
    /// Every run in which it holds blocks, and some in which it held blocks before; a run may stand
    /// here several times. So clearing a worker costs what it holds.
    runs: Vec<u32>,
    /// Runs in which it holds blocks now.
    num_runs: usize,
}

/// Entries of `runs` that may be stale, beside as many as there are runs.
const STALE_RUNS: usize = 64;

/// Slots of workers; a slot is used again when its worker is forgotten.
#[derive(Debug, Default)]
pub(super) struct Workers {
    slots: Vec<Option<Worker>>,
    free: Vec<u16>,
    by_source: HashMap<SourceId, u16>,
    /// The place that was asked for last.
    recent: Option<(Place, PlaceId)>,
}

/// Most places of one worker.
const MAX_PLACES: usize = 256;

impl Workers {
    pub(super) fn len(&self) -> usize {
        self.by_source.len()
    }

    /// The place's id, new if need be; `None` when there is no room for it.
    pub(super) fn place(&mut self, place: Place) -> Option<PlaceId> {
        if let Some((_, id)) = self.recent.filter(|(recent, _)| *recent == place) {
            return Some(id);
        }
        let slot = match self.by_source.get(&place.source) {
            Some(&slot) => slot,
            None => self.add(place.source)?,
        };
        let places = &mut self.slots[usize::from(slot)].as_mut()?.places;
        let at = match places.iter().position(|held| held.place == place) {
            Some(at) => at,
            None if places.len() == MAX_PLACES => return None,
            None => {
                places.push(Held { place, blocks: 0 });
                places.len() - 1
            }
        };
        let id = PlaceId { worker: slot, place: at as u8, tier: place.location.tier.index() as u8 };
        self.recent = Some((place, id));
        Some(id)
    }

    /// The place's id, if it has one.
    pub(super) fn known(&self, place: &Place) -> Option<PlaceId> {
        if let Some((_, id)) = self.recent.filter(|(recent, _)| recent == place) {
            return Some(id);
        }
        let slot = *self.by_source.get(&place.source)?;
        let places = &self.slots[usize::from(slot)].as_ref()?.places;
        let at = places.iter().position(|held| held.place == *place)?;
        Some(PlaceId { worker: slot, place: at as u8, tier: place.location.tier.index() as u8 })
    }

    fn add(&mut self, source: SourceId) -> Option<u16> {
        let worker = Worker {
            source,
            places: Vec::new(),
            last: At { run: u32::MAX, block: 0 },
            runs: Vec::new(),
            num_runs: 0,
        };
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else {
            let slot = u16::try_from(self.slots.len()).ok()?;
            self.slots.push(None);
            slot
        };
        self.slots[usize::from(slot)] = Some(worker);
        self.by_source.insert(source, slot);
        Some(slot)
    }

    /// The slot of a source.
    pub(super) fn slot(&self, source: SourceId) -> Option<u16> {
        self.by_source.get(&source).copied()
    }

    /// Frees the slot of a source whose blocks are gone.
    pub(super) fn forget(&mut self, source: SourceId) {
        self.recent = None;
        if let Some(slot) = self.by_source.remove(&source) {
            self.slots[usize::from(slot)] = None;
            self.free.push(slot);
        }
    }

    /// Which places of a worker belong to a shard, by index.
    pub(super) fn places_of_shard(&self, slot: u16, shard: u16) -> Vec<bool> {
        let worker = self.slots[usize::from(slot)].as_ref();
        worker.map_or_else(Vec::new, |worker| {
            worker.places.iter().map(|held| held.place.shard == shard).collect()
        })
    }

    /// The source in a slot that is in use.
    pub(super) fn source(&self, slot: u16) -> SourceId {
        self.slots[usize::from(slot)].as_ref().map_or(SourceId(0), |worker| worker.source)
    }

    pub(super) fn place_of(&self, slot: u16, place: u8) -> Option<Place> {
        Some(self.slots[usize::from(slot)].as_ref()?.places.get(usize::from(place))?.place)
    }

    pub(super) fn last(&self, slot: u16) -> At {
        self.slots[usize::from(slot)].as_ref().map_or(At { run: u32::MAX, block: 0 }, |worker| worker.last)
    }

    pub(super) fn set_last(&mut self, slot: u16, last: At) {
        if let Some(worker) = &mut self.slots[usize::from(slot)] {
            worker.last = last;
        }
    }

    /// A worker holds a first block in a run.
    pub(super) fn enter(&mut self, slot: u16, run: u32) {
        if let Some(worker) = &mut self.slots[usize::from(slot)] {
            worker.runs.push(run);
            worker.num_runs += 1;
        }
    }

    /// A worker holds no block in a run any more.
    pub(super) fn leave(&mut self, slot: u16) {
        if let Some(worker) = &mut self.slots[usize::from(slot)] {
            worker.num_runs -= 1;
        }
    }

    /// Whether most of a worker's list of runs is stale.
    pub(super) fn is_stale(&self, slot: u16) -> bool {
        let worker = self.slots[usize::from(slot)].as_ref();
        worker.is_some_and(|worker| worker.runs.len() > 2 * worker.num_runs + STALE_RUNS)
    }

    /// Takes a worker's list of runs, each run once, in their order.
    pub(super) fn take_runs(&mut self, slot: u16) -> Vec<u32> {
        let worker = self.slots[usize::from(slot)].as_mut();
        let mut runs = worker.map(|worker| std::mem::take(&mut worker.runs)).unwrap_or_default();
        runs.sort_unstable();
        runs.dedup();
        runs
    }

    /// Adds `runs`, in which the worker holds blocks, to its list.
    pub(super) fn return_runs(&mut self, slot: u16, mut runs: Vec<u32>) {
        if let Some(worker) = &mut self.slots[usize::from(slot)] {
            runs.append(&mut worker.runs);
            runs.shrink_to(2 * runs.len());
            worker.runs = runs;
        }
    }

    /// For each worker, its list and how many runs it holds.
    #[cfg(test)]
    pub(super) fn runs(&self) -> impl Iterator<Item = (u16, &[u32], usize)> + '_ {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(slot, worker)| {
            let worker = worker.as_ref()?;
            Some((slot, worker.runs.as_slice(), worker.num_runs))
        })
    }

    pub(super) fn count(&mut self, id: PlaceId, change: i64) {
        let worker = self.slots[usize::from(id.worker)].as_mut();
        if let Some(held) = worker.and_then(|worker| worker.places.get_mut(usize::from(id.place))) {
            held.blocks = held.blocks.saturating_add_signed(change);
        }
    }

    pub(super) fn sources(&self) -> impl Iterator<Item = SourceId> + '_ {
        self.slots.iter().flatten().map(|worker| worker.source)
    }

    /// Blocks of a source by tier; a block at two places of a tier counts twice.
    pub(super) fn blocks(&self, source: SourceId) -> [u64; Tier::ALL.len()] {
        let mut blocks = [0; Tier::ALL.len()];
        let worker = self.slot(source).and_then(|slot| self.slots[usize::from(slot)].as_ref());
        for held in worker.iter().flat_map(|worker| &worker.places) {
            blocks[held.place.location.tier.index()] += held.blocks;
        }
        blocks
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let places = |worker: &Worker| {
            worker.places.capacity() * size_of::<Held>() + worker.runs.capacity() * size_of::<u32>()
        };
        self.slots.capacity() * size_of::<Option<Worker>>()
            + self.slots.iter().flatten().map(places).sum::<usize>()
            + self.free.capacity() * size_of::<u16>()
            + self.by_source.capacity() * (size_of::<(SourceId, u16)>() + 1)
    }
}
