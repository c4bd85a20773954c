use super::*;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{Registry, RegistryConfig};

const CAPACITY: u32 = 160;
/// One slot is a unit, so that neighbours lie in different directories.
const SLOT_BYTES: u64 = 1 << 20;

/// A tier, and what its copies come to: slots of `bad` cannot be written.
struct Disk {
    registry: Registry,
    directories: Directories,
    bad: fn(BlockId) -> bool,
    last: u32,
    now: Instant,
    writes: usize,
}

impl Disk {
    fn new(directories: usize, bad: fn(BlockId) -> bool) -> Self {
        let registry = Registry::new(&RegistryConfig::new([0, 0, CAPACITY])).unwrap();
        let striping = Striping::new(directories, SLOT_BYTES);
        let directories = Directories::new(striping, Duration::ZERO, Duration::ZERO);
        Self { registry, directories, bad, last: 0, now: Instant::now(), writes: 0 }
    }

    /// Copies so many new blocks as one batch, as the leader does: how many arrived.
    fn copy(&mut self, blocks: u32) -> usize {
        drop(self.directories.take_due(self.now));
        let blocks = self.directories.writable(blocks as usize, self.now) as u32;
        let identity = |number: u32| BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes(u128::from(number).to_le_bytes()),
            parent: None,
            position: 0,
        };
        let identities: Vec<_> = (self.last + 1..=self.last + blocks).map(identity).collect();
        self.last += blocks;
        let reserve = || self.registry.begin_arrivals(Tier::G3, &identities).unwrap();
        let mut arrivals = reserve();
        while self.directories.withhold_unwritable(&mut arrivals, self.now) > 0 {
            drop(arrivals);
            arrivals = reserve();
        }
        let slots = arrivals.arrivals().iter().enumerate().filter_map(|(place, arrival)| match *arrival {
            Arrival::Reserved { block, .. } => Some((place, block)),
            _ => None,
        });
        let (failed, written): (Vec<_>, Vec<_>) = slots.partition(|&(_, slot)| (self.bad)(slot));
        self.writes += failed.len() + written.len();
        let all = failed.iter().chain(&written).map(|(_, slot)| *slot);
        self.directories.note_writes(all, self.now);
        arrivals.complete_each(written.iter().map(|&(place, _)| place));
        let written: Vec<_> = written.iter().map(|&(_, slot)| slot).collect();
        self.directories.record_writes(&mut arrivals, &written, &failed, self.now);
        written.len()
    }

    fn copies(&mut self, batches: usize, blocks: u32) -> usize {
        (0..batches).map(|_| self.copy(blocks)).sum()
    }

    fn cached(&self) -> u32 {
        self.registry.occupancy(Tier::G3).inactive
    }

    fn writes_of(&self, directory: usize) -> CircuitState {
        self.directories.status()[directory].writes
    }
}

fn odd(slot: BlockId) -> bool {
    slot.0 % 2 == 1
}

/// Mutation that makes it fail: `withhold_unwritable` withholds nothing.
#[test]
fn copies_go_to_the_directory_that_takes_them() {
    let mut disk = Disk::new(2, odd);
    let arrived = disk.copies(200, 1);
    assert_eq!((disk.writes_of(0), disk.writes_of(1)), (CircuitState::Closed, CircuitState::Open));
    assert_eq!(arrived, 198, "two failures open the breaker");
    assert_eq!((disk.cached(), disk.directories.num_withheld()), (80, 80));
    assert_eq!(disk.copies(100, 10), 1000);
}

#[test]
fn of_eight_directories_seven_may_take_nothing() {
    let mut disk = Disk::new(8, |slot| slot.0 % 8 != 3);
    disk.copies(400, 1);
    assert_eq!(disk.directories.num_withheld(), 140);
    assert_eq!(disk.copies(100, 10), 1000);
}

/// Mutation that makes it fail: `writable` allows all blocks.
#[test]
fn a_disk_that_takes_no_writes_keeps_its_blocks() {
    let mut disk = Disk::new(1, |_| false);
    disk.copies(100, 10);
    assert_eq!(disk.cached(), CAPACITY);
    disk.bad = |_| true;
    disk.writes = 0;
    assert_eq!(disk.copies(100, 1), 0);
    assert_eq!((disk.writes, disk.cached(), disk.writes_of(0)), (2, CAPACITY - 2, CircuitState::Open));
    // Probes write to slots that are withheld anyway: no further block goes.
    for pause_ms in [500, 1000, 2000, 4000] {
        disk.now += Duration::from_millis(pause_ms - 1);
        assert_eq!((disk.copies(10, 1), disk.writes), (0, disk.writes), "not before the pause is over");
        let before = disk.writes;
        disk.now += Duration::from_millis(1);
        assert_eq!((disk.copies(10, 1), disk.writes - before, disk.cached()), (0, 1, CAPACITY - 2));
    }
    disk.bad = |_| false;
    disk.now += LONGEST_PAUSE;
    assert_eq!((disk.copies(100, 10), disk.cached()), (991, CAPACITY), "all after the probe of one block");
}

#[test]
fn a_slot_that_fails_alone_is_withheld_and_its_directory_used() {
    let mut disk = Disk::new(1, |slot| slot.0 == 7);
    assert_eq!(disk.copies(100, 10), 999);
    assert_eq!((disk.directories.withheld(), disk.writes_of(0)), (vec![BlockId(7)], CircuitState::Closed));
    disk.now += RETRY;
    assert_eq!(disk.copies(10, 10), 99, "it is tried again");
    disk.bad = |_| false;
    assert_eq!(disk.copies(10, 10), 100);
    assert_eq!(disk.directories.num_withheld(), 1, "not before");
    disk.now += RETRY;
    assert_eq!((disk.copies(20, 10), disk.directories.num_withheld(), disk.cached()), (200, 0, CAPACITY));
}

#[test]
fn all_slots_are_free_when_the_disk_was_opened_again() {
    let mut disk = Disk::new(2, odd);
    disk.copies(200, 1);
    disk.bad = |_| false;
    drop(disk.directories.reset_writes());
    assert_eq!((disk.directories.num_withheld(), disk.writes_of(1)), (0, CircuitState::Closed));
    assert_eq!((disk.copies(16, 10), disk.cached()), (160, CAPACITY));
}

/// Mutation that makes it fail: `record_reads` gives every result to directory 0.
#[test]
fn only_the_directory_that_fails_reads_counts_as_missing() {
    let directories = Directories::new(Striping::new(2, SLOT_BYTES), Duration::ZERO, Duration::ZERO);
    let failure = Failure::new(FailureKind::Io, "planted");
    let slots = [0, 1, 2, 3].map(BlockId);
    let began = Instant::now();
    let read = || slots.map(|slot| (slot, odd(slot).then_some(&failure)));
    assert!(directories.record_reads(read(), (&[], None), began).is_empty());
    let changes = directories.record_reads(read(), (&[], None), began);
    assert_eq!(changes.iter().map(|change| change.directory).collect::<Vec<_>>(), [1]);
    assert_eq!(directories.first_unreadable(slots), Some(1));
    assert_eq!(directories.first_unreadable([0, 2].map(BlockId)), None);
    assert!(directories.is_down() && directories.failure() == Some(failure.clone()));
    let late = Failure::new(FailureKind::Deadline, "planted");
    for _ in 0..2 {
        directories.record_reads([], (&slots[..1], Some(&late)), began);
    }
    assert_eq!(directories.first_unreadable(slots), Some(0), "one that serves nothing in time");
    directories.reset_reads();
    assert_eq!((directories.first_unreadable(slots), directories.failure()), (None, None));
}
