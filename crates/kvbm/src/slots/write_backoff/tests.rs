use super::*;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{G3, Registry, RegistryConfig};

const CAPACITY: u32 = 160;

/// A tier, and what its copies come to: slots of `bad` cannot be written.
struct Disk {
    registry: Registry,
    backoff: WriteBackoff,
    bad: fn(BlockId) -> bool,
    last: u32,
    now: Instant,
}

impl Disk {
    fn new(bad: fn(BlockId) -> bool) -> Self {
        let registry = Registry::new(&RegistryConfig::new([0, 0, CAPACITY])).unwrap();
        Self { registry, backoff: WriteBackoff::new(CAPACITY), bad, last: 0, now: Instant::now() }
    }

    /// Copies so many new blocks as one batch, as the leader does: how many arrived.
    fn copy(&mut self, blocks: u32) -> usize {
        let identity = |number: u32| BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes(u128::from(number).to_le_bytes()),
            parent: None,
            position: 0,
        };
        let identities: Vec<_> = (self.last + 1..=self.last + blocks).map(identity).collect();
        self.last += blocks;
        drop(self.backoff.due(self.now));
        let mut arrivals = self.registry.pool::<G3>().begin_arrivals(&identities).unwrap();
        let slots: Vec<_> = arrivals.reserved().map(|(index, block, _)| (index, block)).collect();
        let (failed, written): (Vec<_>, Vec<_>) =
            slots.into_iter().partition(|&(_, block)| (self.bad)(block));
        arrivals.complete_each(written.iter().map(|&(index, _)| index));
        let [came, lost] =
            [&written, &failed].map(|slots| slots.iter().map(|&(_, block)| block).collect::<Vec<_>>());
        let backoff = self.backoff.writes_ended(&came, &lost, self.now);
        let slots = arrivals.fail_and_withhold(failed.iter().take(backoff).map(|&(index, _)| index));
        self.backoff.begin(slots, self.now);
        written.len()
    }

    fn copies(&mut self, batches: usize, blocks: u32) -> usize {
        (0..batches).map(|_| self.copy(blocks)).sum()
    }

    fn cached(&self) -> u32 {
        self.registry.occupancy(Tier::G3).inactive
    }
}

fn odd(slot: BlockId) -> bool {
    slot.0 % 2 == 1
}

#[test]
fn copies_go_to_the_directory_that_takes_them() {
    let mut disk = Disk::new(odd);
    disk.copies(100, 10);
    assert_eq!(disk.backoff.len(), 80);
    assert_eq!(disk.cached(), 80);
    assert_eq!(disk.copies(100, 10), 1000, "nothing is in their way");
}

#[test]
fn of_eight_directories_seven_may_take_nothing() {
    let mut disk = Disk::new(|slot| slot.0 % 8 != 3);
    disk.copies(200, 10);
    assert_eq!(disk.backoff.len(), 140);
    assert_eq!(disk.copies(100, 10), 1000);
}

#[test]
fn a_disk_that_takes_no_writes_keeps_its_blocks() {
    const RESTING: u32 = CAPACITY / SLOTS_FOR_ONE;
    let mut disk = Disk::new(|_| false);
    disk.copies(100, 10);
    assert_eq!(disk.cached(), CAPACITY);
    disk.bad = |_| true;
    assert_eq!(disk.copies(100, 1), 0);
    assert_eq!((disk.backoff.len() as u32, disk.cached()), (RESTING, CAPACITY - RESTING - 1));
    for more in 1..=3 {
        disk.now += PAUSE * (1 << (more - 1));
        assert_eq!(disk.copies(10, 1), 0);
        assert_eq!(
            (disk.backoff.len() as u32, disk.cached()),
            (RESTING + more, CAPACITY - RESTING - more - 1)
        );
    }
    disk.now += 7 * PAUSE;
    disk.copies(10, 1);
    assert_eq!(disk.backoff.len() as u32, RESTING + 3, "ever longer pauses");

    disk.bad = |_| false;
    assert_eq!(disk.copies(100, 10), 1000);
    assert_eq!(disk.cached(), CAPACITY, "at once, since it takes writes again");
}

/// Its slots come one after the other, more of them than there is credit for.
#[test]
fn a_long_run_of_bad_slots_is_passed_in_the_end() {
    let mut disk = Disk::new(|slot| (40..52).contains(&slot.0));
    for _ in 0..3 {
        disk.copies(CAPACITY as usize, 1);
        disk.now += LONGEST_PAUSE;
    }
    assert_eq!((disk.backoff.len(), disk.cached()), (12, CAPACITY - 12));
}

#[test]
fn one_is_tried_after_each_pause_and_more_when_it_could_be_written() {
    let mut disk = Disk::new(odd);
    disk.copies(100, 10);
    for _ in 0..3 {
        disk.now += PAUSE;
        assert_eq!(disk.copies(10, 10), 99, "one block for a trial");
        assert_eq!(disk.backoff.len(), 80);
    }
    disk.bad = |_| false;
    assert_eq!((disk.copies(3, 10), disk.backoff.len()), (30, 80), "not before the pause is over");
    disk.now += PAUSE;
    for left in [79, 77, 73, 65, 49, 17, 0] {
        assert_eq!(disk.copy(10), 10);
        assert_eq!(disk.backoff.len(), left);
    }
    assert_eq!((disk.copies(100, 10), disk.cached()), (1000, CAPACITY));
}

#[test]
fn a_trial_that_nobody_heard_of_is_made_again() {
    let mut disk = Disk::new(odd);
    disk.copies(100, 10);
    disk.now += PAUSE;
    let tried = disk.backoff.due(disk.now);
    assert_eq!(tried.iter().map(Withheld::len).sum::<usize>(), 1);
    drop(tried);
    assert!(disk.backoff.due(disk.now).is_empty());
    disk.now += PAUSE;
    assert_eq!(disk.backoff.due(disk.now).len(), 1);
}

#[test]
fn all_come_back_for_a_disk_that_was_opened_again() {
    let mut disk = Disk::new(odd);
    disk.copies(100, 10);
    disk.bad = |_| false;
    drop(disk.backoff.all());
    assert_eq!(disk.backoff.len(), 0);
    assert_eq!((disk.copies(16, 10), disk.cached()), (160, CAPACITY));
}
