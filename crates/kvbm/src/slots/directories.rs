//! The directories of the disk tier. Each has a circuit breaker for its reads and one for its
//! writes; nothing else decides whether a directory is used.
//!
//! - While the breaker of the reads is open, blocks in the directory count as missing.
//! - While the breaker of the writes is open, copies go to slots of other directories. The slots
//!   that a reservation gets in the directory are *withheld*. Otherwise the next reservation would
//!   get the same ones, because a free slot is taken before any block is evicted.
//! - While the writes of no directory are allowed, no slot is reserved, and no block is evicted: a
//!   disk that can only be read keeps its blocks.
//!
//! A slot that failed a write is withheld too, whatever the state, for [`RETRY`]: the next copy
//! would get it again. The probe of an open breaker writes to the slot that is withheld for
//! longest.

use crate::circuit_breaker::{CircuitBreaker, CircuitState, RequestResults, StateChange};
use kvbm_plan::{BlockId, Failure, FailureKind, Striping};
use kvbm_pool::{AnyArrivals, Arrival, Withheld};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// The longest pause between two probes of a directory.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How long a slot that failed a write is withheld while the breaker is closed.
const RETRY: Duration = Duration::from_secs(30);

/// See the module.
pub(crate) struct Directories {
    striping: Striping,
    read_probe: Duration,
    write_probe: Duration,
    all: Mutex<Vec<Directory>>,
}

struct Directory {
    reads: CircuitBreaker,
    writes: CircuitBreaker,
    /// Withheld for longest first.
    withheld: VecDeque<Withheld>,
    /// When the withheld slots of a closed breaker are free again.
    retry: Instant,
}

/// A directory of the disk tier, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryStatus {
    /// The circuit breaker of its reads. Unless it is closed, blocks there count as missing.
    pub reads: CircuitState,
    /// The circuit breaker of its writes. Unless it is closed, copies go to other directories.
    pub writes: CircuitState,
    /// Slots that no copy gets for a while, because they failed a write or the writes are stopped.
    pub withheld_slots: u32,
    /// The last failure of a read, else of a write, while that breaker is not closed.
    pub failure: Option<Failure>,
}

/// A breaker of a directory that opened or closed.
#[derive(Debug)]
pub(crate) struct DirectoryChange {
    pub(crate) directory: usize,
    pub(crate) change: StateChange,
}

impl Directory {
    fn new(read_probe: Duration, write_probe: Duration) -> Self {
        Self {
            reads: CircuitBreaker::new(LONGEST_PAUSE, read_probe),
            writes: CircuitBreaker::new(LONGEST_PAUSE, write_probe),
            withheld: VecDeque::new(),
            retry: kvbm_plan::clock::now(),
        }
    }

    fn withheld_slots(&self) -> usize {
        self.withheld.iter().map(Withheld::len).sum()
    }

    /// The slots that are free again now: all of a closed breaker after a while, one for a probe.
    fn take_due(&mut self, now: Instant) -> Vec<Withheld> {
        if self.writes.is_open() {
            let probe = if self.writes.allows(now) { self.withheld.pop_front() } else { None };
            return probe.map(|slots| self.first_of(slots)).into_iter().collect();
        }
        if now >= self.retry { self.withheld.drain(..).collect() } else { Vec::new() }
    }

    fn first_of(&mut self, mut slots: Withheld) -> Withheld {
        let rest = slots.split_off(1);
        if !rest.is_empty() {
            self.withheld.push_front(rest);
        }
        slots
    }
}

impl Directories {
    /// A probe of the reads may take `read_probe`, one of the writes `write_probe`.
    pub(crate) fn new(striping: Striping, read_probe: Duration, write_probe: Duration) -> Self {
        let all = (0..striping.directories()).map(|_| Directory::new(read_probe, write_probe));
        Self { striping, read_probe, write_probe, all: Mutex::new(all.collect()) }
    }

    fn directories_of(&self, slots: impl IntoIterator<Item = BlockId>) -> HashSet<usize> {
        slots.into_iter().map(|slot| self.striping.directory(slot)).collect()
    }

    pub(crate) fn status(&self) -> Vec<DirectoryStatus> {
        let status = |directory: &Directory| DirectoryStatus {
            reads: directory.reads.state(),
            writes: directory.writes.state(),
            withheld_slots: u32::try_from(directory.withheld_slots()).unwrap_or(u32::MAX),
            failure: directory.reads.failure().or_else(|| directory.writes.failure()),
        };
        self.all.lock().iter().map(status).collect()
    }
}

/// Reads.
impl Directories {
    /// Whether the blocks of some directory count as missing.
    pub(crate) fn is_down(&self) -> bool {
        self.all.lock().iter().any(|directory| directory.reads.is_open())
    }

    /// The last failure of a directory that is down.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.all.lock().iter().find_map(|directory| directory.reads.failure())
    }

    /// The index of the first of `slots` that may not be read now.
    pub(crate) fn first_unreadable(&self, slots: impl IntoIterator<Item = BlockId>) -> Option<usize> {
        let (now, all) = (kvbm_plan::clock::now(), self.all.lock());
        slots.into_iter().position(|slot| !all[self.striping.directory(slot)].reads.allows(now))
    }

    /// Reads of these slots are sent.
    pub(crate) fn note_reads(&self, slots: impl IntoIterator<Item = BlockId>) {
        let (now, directories) = (kvbm_plan::clock::now(), self.directories_of(slots));
        let mut all = self.all.lock();
        for directory in directories {
            all[directory].reads.note_request(now);
        }
    }

    /// These slots were read, although the request is not over.
    pub(crate) fn note_service(&self, slots: impl IntoIterator<Item = BlockId>) {
        let (now, directories) = (kvbm_plan::clock::now(), self.directories_of(slots));
        let mut all = self.all.lock();
        for directory in directories {
            all[directory].reads.note_service(now);
        }
    }

    /// The results of a request that began at `began`, by slot. With `late`, the slots of the
    /// second list were asked for in time and served nothing until the request was late. What
    /// changed.
    pub(crate) fn record_reads<'a>(
        &self,
        blocks: impl IntoIterator<Item = (BlockId, Option<&'a Failure>)>,
        late: (&[BlockId], Option<&Failure>),
        began: Instant,
    ) -> Vec<DirectoryChange> {
        let mut results: BTreeMap<usize, RequestResults> = BTreeMap::new();
        for (slot, failure) in blocks {
            results.entry(self.striping.directory(slot)).or_default().add(failure);
        }
        if let (slots, Some(failure)) = late {
            for directory in self.directories_of(slots.iter().copied()) {
                results.entry(directory).or_default().add_late(failure.clone());
            }
        }
        let (now, mut all) = (kvbm_plan::clock::now(), self.all.lock());
        let conclusive = results.into_iter().filter(|(_, results)| results.are_conclusive());
        let record = |(directory, results): (usize, RequestResults)| {
            let change = all[directory].reads.record(&results, began, now);
            DirectoryChange { directory, change }
        };
        conclusive.map(record).filter(|change| change.change != StateChange::None).collect()
    }

    /// Another worker serves a rank: earlier results of reads say nothing about its disk.
    pub(crate) fn reset_reads(&self) {
        for directory in &mut *self.all.lock() {
            directory.reads = CircuitBreaker::new(LONGEST_PAUSE, self.read_probe);
        }
    }
}

/// Writes.
impl Directories {
    /// The slots that are withheld.
    pub(crate) fn withheld(&self) -> Vec<BlockId> {
        let all = self.all.lock();
        let withheld = all.iter().flat_map(|directory| &directory.withheld);
        withheld.flat_map(Withheld::block_ids).copied().collect()
    }

    pub(crate) fn num_withheld(&self) -> usize {
        self.all.lock().iter().map(Directory::withheld_slots).sum()
    }

    /// Slots that are free again once the answer is dropped: the next reservation gets them first.
    pub(crate) fn take_due(&self, now: Instant) -> Vec<Withheld> {
        self.all.lock().iter_mut().flat_map(|directory| directory.take_due(now)).collect()
    }

    /// How many of `wanted` blocks may be copied now: all where the writes of a directory are
    /// allowed, one where a directory is to be probed, else none.
    pub(crate) fn writable(&self, wanted: usize, now: Instant) -> usize {
        let all = self.all.lock();
        if all.iter().any(|directory| !directory.writes.is_open()) {
            return wanted;
        }
        usize::from(all.iter().any(|directory| directory.writes.allows(now))).min(wanted)
    }

    /// Withholds the reserved slots of directories whose writes are not allowed. How many. One slot
    /// of a directory that is to be probed stays reserved.
    pub(crate) fn withhold_unwritable(&self, arrivals: &mut AnyArrivals, now: Instant) -> usize {
        let mut probed = HashSet::new();
        let mut places: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut all = self.all.lock();
        for (place, arrival) in arrivals.arrivals().iter().enumerate() {
            let Arrival::Reserved { block, .. } = *arrival else { continue };
            let directory = self.striping.directory(block);
            let writes = &all[directory].writes;
            if writes.is_open() && !(writes.allows(now) && probed.insert(directory)) {
                places.entry(directory).or_default().push(place);
            }
        }
        for (&directory, places) in &places {
            let slots = arrivals.fail_and_withhold(places.iter().copied());
            all[directory].withheld.push_back(slots);
        }
        places.values().map(Vec::len).sum()
    }

    /// Writes to these slots are sent.
    pub(crate) fn note_writes(&self, slots: impl IntoIterator<Item = BlockId>, now: Instant) {
        let directories = self.directories_of(slots);
        let mut all = self.all.lock();
        for directory in directories {
            all[directory].writes.note_request(now);
        }
    }

    /// Copies are over: slots that were written, and the place in `arrivals` and slot of those that
    /// failed, which are withheld. What changed.
    pub(crate) fn record_writes(
        &self,
        arrivals: &mut AnyArrivals,
        written: &[BlockId],
        failed: &[(usize, BlockId)],
        now: Instant,
    ) -> Vec<DirectoryChange> {
        let mut results: BTreeMap<usize, (RequestResults, Vec<usize>)> = BTreeMap::new();
        for &slot in written {
            results.entry(self.striping.directory(slot)).or_default().0.add(None);
        }
        let failure = Failure::new(FailureKind::Io, "a slot could not be written");
        for &(place, slot) in failed {
            let (results, places) = results.entry(self.striping.directory(slot)).or_default();
            results.add(Some(&failure));
            places.push(place);
        }
        let mut all = self.all.lock();
        let mut changes = Vec::new();
        for (number, (results, places)) in results {
            let directory = &mut all[number];
            let change = directory.writes.record(&results, now, now);
            match change {
                StateChange::Closed => directory.retry = now,
                StateChange::None | StateChange::Opened => {}
            }
            if !places.is_empty() {
                directory.withheld.push_back(arrivals.fail_and_withhold(places));
                directory.retry = now + RETRY;
            }
            if change != StateChange::None {
                changes.push(DirectoryChange { directory: number, change });
            }
        }
        changes
    }

    /// A worker opened its disk again: earlier results say nothing about it. The slots that were
    /// withheld.
    pub(crate) fn reset_writes(&self) -> Vec<Withheld> {
        let mut withheld = Vec::new();
        for directory in &mut *self.all.lock() {
            directory.writes = CircuitBreaker::new(LONGEST_PAUSE, self.write_probe);
            withheld.extend(directory.withheld.drain(..));
        }
        withheld
    }
}

#[cfg(test)]
mod tests;
