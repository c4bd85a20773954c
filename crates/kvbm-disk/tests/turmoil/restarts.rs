//! An engine that is started again and again on a machine whose power fails, and what must be true
//! after each start.

use crate::medium::{FaultRates, Machine};
use crate::support::{BLOCK, PATIENCE, Random, lazy_config, pattern, read, write};
use kvbm_disk::{DiskConfig, DiskEngine};
use kvbm_plan::BlockId;
use std::ops::Range;
use std::sync::Arc;

const SLOTS: u32 = 6;
const MOST_RESTARTS: u64 = 5;
/// Most operations between two starts.
const OPERATIONS: u64 = 40;
/// Most changes of the medium before its power fails in the middle of one. There are about so many
/// between two starts.
const CHANGES: u64 = 90;

/// What is known of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Slot {
    /// Anything that was ever written there, or nothing.
    #[default]
    Unknown,
    /// It was written, or emptied, and nobody has said yet that this lasts.
    Written(Option<u64>),
    /// This block, or none, whatever happens.
    Lasting(Option<u64>),
}

/// What was found after restarts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    /// Blocks that had to be there after a power failure, and were.
    pub(crate) durable: u64,
    /// Power failures, and those in the middle of a change, or of an opening.
    pub(crate) failures: u64,
    pub(crate) in_a_change: u64,
    pub(crate) in_an_opening: u64,
}

/// All restarts of all `seeds`.
pub(crate) fn run_all(seeds: Range<u64>) -> Sum {
    let mut sum = Sum::default();
    seeds.for_each(|seed| run_seed(seed, &mut sum));
    sum
}

/// All restarts of `seed`. Panics where an engine finds less than was durable before, serves other
/// bytes than were written, or does not open.
fn run_seed(seed: u64, sum: &mut Sum) {
    let mut random = Random(seed);
    let machine = Machine::new(random.next());
    let mut config = lazy_config(SLOTS);
    config.compact_slack_records = random.below(12);
    let mut world = World { seed, machine, config, slots: [Slot::Unknown; SLOTS as usize], next: 0, random };
    for _ in 0..=world.random.below(MOST_RESTARTS) {
        world.run(sum);
    }
    // And a last opening, in which nothing goes wrong.
    world.machine.set_fault_rates(FaultRates::default());
    world.machine.fail_after(None);
    let engine = world.open().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    sum.durable += world.check(&engine);
}

struct World {
    seed: u64,
    machine: Arc<Machine>,
    config: DiskConfig,
    slots: [Slot; SLOTS as usize],
    /// The number of the next block.
    next: u64,
    random: Random,
}

impl World {
    fn run(&mut self, sum: &mut Sum) {
        let failures = self.machine.failures();
        // Reads are short at any time: whoever takes them for whole ones finds zeros.
        self.machine.set_fault_rates(FaultRates { short_read: 0.2, ..FaultRates::default() });
        let interrupts = self.random.below(3) > 0;
        self.machine.fail_after(interrupts.then(|| self.random.below(CHANGES)));
        match self.open() {
            Ok(engine) => {
                sum.durable += self.check(&engine);
                self.work(&engine);
                if self.machine.failures() == failures && self.random.below(4) > 0 {
                    self.machine.fail();
                }
                // Else it is closed in order, and its last commit may still be interrupted.
                self.machine.set_fault_rates(FaultRates::default());
                drop(engine);
                if self.machine.failures() == failures {
                    self.slots = self.slots.map(closed);
                }
            }
            Err(error) => {
                assert!(self.machine.failures() > failures, "seed {}: {error}", self.seed);
                sum.in_an_opening += 1;
            }
        }
        let failed = self.machine.failures() - failures;
        sum.failures += failed;
        sum.in_a_change += u64::from(interrupts) * failed;
    }

    fn open(&self) -> Result<DiskEngine, kvbm_disk::OpenError> {
        let (engine, _) = DiskEngine::open_on(self.config.clone(), self.machine.medium())?;
        Ok(engine)
    }

    /// Compares what an engine found with what is known. How many blocks had to be there.
    fn check(&mut self, engine: &DiskEngine) -> u64 {
        let failures = self.machine.failures();
        let mut durable = 0;
        for slot in 0..SLOTS {
            let known = self.slots[slot as usize];
            let found = self.served(engine, slot);
            if self.machine.failures() > failures {
                // Reads change nothing, but the engine may commit meanwhile.
                return durable;
            }
            if let Slot::Lasting(lasting) = known {
                assert_eq!(found, lasting, "seed {}: slot {slot}", self.seed);
                durable += u64::from(lasting.is_some());
            }
            self.slots[slot as usize] = found.map_or(Slot::Unknown, |number| Slot::Lasting(Some(number)));
            if known == Slot::Lasting(None) {
                self.slots[slot as usize] = known;
            }
        }
        durable
    }

    /// Which block `slot` serves, of all that were ever written. Its bytes are compared.
    fn served(&self, engine: &DiskEngine, slot: u32) -> Option<u64> {
        (0..self.next).find(|&number| self.is_served(engine, slot, number))
    }

    fn is_served(&self, engine: &DiskEngine, slot: u32, number: u64) -> bool {
        let Ok(bytes) = read(engine, slot, number) else { return false };
        assert!(bytes == pattern(number, BLOCK), "seed {}: wrong bytes of block {number}", self.seed);
        true
    }

    /// Random operations, until there are enough or the power fails.
    fn work(&mut self, engine: &DiskEngine) {
        let failures = self.machine.failures();
        let fault = self.random.below(4);
        self.machine.set_fault_rates(FaultRates {
            short_read: 0.2,
            io_error: if fault == 0 { 0.05 } else { 0.0 },
            corruption: if fault == 1 { 0.1 } else { 0.0 },
        });
        for _ in 0..self.random.below(OPERATIONS) {
            if self.machine.failures() > failures {
                return;
            }
            let slot = self.random.below(u64::from(SLOTS)) as usize;
            match self.random.below(7) {
                0 => self.flush(engine, failures),
                1 => {
                    engine.release(&[BlockId(slot as u32)]);
                    self.slots[slot] = Slot::Written(None);
                }
                2 => self.look(engine, slot, failures),
                _ => self.put(engine, slot),
            }
        }
    }

    fn flush(&mut self, engine: &DiskEngine, failures: u64) {
        // A flush says of how many blocks it is sure; it is sure of each slot only where it says so
        // of all.
        let Ok(report) = engine.flush(PATIENCE) else { return };
        assert_eq!(report.pending_blocks, 0, "seed {}: no sync fails here", self.seed);
        assert_eq!(self.machine.failures(), failures, "seed {}: a flush after a power failure", self.seed);
        self.slots = self.slots.map(closed);
    }

    /// Writes one block or several.
    fn put(&mut self, engine: &DiskEngine, slot: usize) {
        let many = if self.random.below(4) == 0 { SLOTS as usize - slot } else { 1 };
        let batch: Vec<(u32, u64)> = (slot as u32..).zip(self.next..).take(many).collect();
        self.next += many as u64;
        let outcomes = write(engine, &batch);
        for ((slot, number), outcome) in batch.into_iter().zip(outcomes) {
            let written = outcome.map_or(Slot::Unknown, |_| Slot::Written(Some(number)));
            self.slots[slot as usize] = written;
        }
    }

    /// Reads a block, which may fail for a fault. Bad bytes put the slot out of use.
    fn look(&mut self, engine: &DiskEngine, slot: usize, failures: u64) {
        let (Slot::Written(Some(number)) | Slot::Lasting(Some(number))) = self.slots[slot] else { return };
        if !self.is_served(engine, slot as u32, number) && self.machine.failures() == failures {
            self.slots[slot] = Slot::Unknown;
        }
    }
}

/// A slot after everything was committed.
fn closed(slot: Slot) -> Slot {
    match slot {
        Slot::Written(content) => Slot::Lasting(content),
        Slot::Unknown | Slot::Lasting(_) => slot,
    }
}
