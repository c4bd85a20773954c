//! What the tests of the engine share: blocks whose bytes follow from their number, and waiting
//! with patience.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part; a panic is a failed test")]

use kvbm_disk::fault::SimMedium;
use kvbm_disk::medium::Medium;
use kvbm_disk::{DiskConfig, DiskEngine, IoBatch, OpOutcome, OwnedBuffer, ReadTarget, Recovered};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const BLOCK: usize = 8192;

pub(crate) fn config(slots: u32) -> DiskConfig {
    let mut config = DiskConfig::new("", slots, BLOCK as u64, [7; 16]);
    config.threads = 2;
    config
}

/// An engine that commits only when asked to.
pub(crate) fn lazy_config(slots: u32) -> DiskConfig {
    let mut config = config(slots);
    config.commit.interval = Duration::MAX;
    config.commit.max_slots = u32::MAX;
    config
}

pub(crate) fn open(config: DiskConfig, medium: &impl CloneMedium) -> (DiskEngine, Recovered) {
    DiskEngine::open_on(config, medium.as_medium()).unwrap()
}

pub(crate) trait CloneMedium {
    fn as_medium(&self) -> Arc<dyn Medium>;
}

impl<T: Medium + Clone + 'static> CloneMedium for T {
    fn as_medium(&self) -> Arc<dyn Medium> {
        Arc::new(self.clone())
    }
}

pub(crate) fn identity(number: u64) -> BlockIdentity {
    let hash = |number: u64| SequenceHash::from_bytes(u128::from(number + 1).to_le_bytes());
    BlockIdentity {
        namespace: NamespaceId(1),
        group: GroupId(0),
        hash: hash(number),
        parent: (number > 0).then(|| hash(number - 1)),
        position: number as u32,
    }
}

/// Bytes that differ between blocks and between words.
pub(crate) fn pattern(number: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| {
        (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index.wrapping_mul(0xD6E8_FEB8_6659_FD93)).to_le_bytes()
    };
    (0..len.div_ceil(8) as u64).flat_map(word).take(len).collect()
}

pub(crate) fn write(engine: &DiskEngine, blocks: &[(u32, u64)]) -> Vec<OpOutcome> {
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    for &(slot, number) in blocks {
        batch.write_buffer(
            BlockId(slot),
            identity(number),
            &Arc::new(OwnedBuffer::from_slice(&pattern(number, BLOCK))),
        );
    }
    engine.submit(batch).unwrap();
    outcomes.recv_timeout(PATIENCE).unwrap()
}

/// Reads one block; its bytes only if the outcome is good.
pub(crate) fn read(engine: &DiskEngine, slot: u32, number: u64) -> Result<Vec<u8>, kvbm_disk::OpError> {
    let (done, outcomes) = mpsc::channel();
    let target = ReadTarget::new(BLOCK);
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    assert!(batch.read_target(BlockId(slot), identity(number), &target));
    engine.submit(batch).unwrap();
    let mut outcomes: Vec<OpOutcome> = outcomes.recv_timeout(PATIENCE).unwrap();
    outcomes.remove(0)?;
    Ok(target.into_buffer().unwrap().as_slice().to_vec())
}

/// Whether the block is served with its right bytes; panics if wrong bytes are served.
pub(crate) fn is_served(engine: &DiskEngine, slot: u32, number: u64) -> bool {
    match read(engine, slot, number) {
        Ok(bytes) => {
            assert_eq!(bytes, pattern(number, BLOCK), "wrong bytes were served for block {number}");
            true
        }
        Err(_) => false,
    }
}

pub(crate) fn wait_until(condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn all_good(outcomes: &[OpOutcome]) -> bool {
    outcomes.iter().all(Result::is_ok)
}

/// The generator of Steele, Lea and Flood (2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Slots and the numbers of the blocks in them, oldest first.
pub(crate) fn recovered_numbers(recovered: &Recovered) -> Vec<(u32, u32)> {
    recovered.blocks.iter().map(|block| (block.slot.0, block.identity.position)).collect()
}

/// Random life, power loss at a random moment: everything flushed and not touched since is back and
/// verified; nothing is served that is not exactly what was written. How many blocks had to be
/// there.
///
/// Every other life is one over three directories. Mutation that makes it fail: `cycle` syncs the
/// first slot file alone.
pub(crate) fn crash_and_recover(seed: u64) -> usize {
    const SLOTS: u32 = 6;
    /// Slots so far apart lie in different directories, where there are several.
    const UNIT: u32 = (1 << 20) / BLOCK as u32;
    let mut random = Random(seed);
    let medium = SimMedium::new();
    let step = if seed.is_multiple_of(2) { 1 } else { UNIT };
    let mut config = lazy_config(SLOTS * step);
    if step > 1 {
        config.more_dirs = vec!["1".into(), "2".into()];
    }
    let at = |slot: usize| slot as u32 * step;
    config.compact_slack_records = random.below(12);
    let (engine, _) = open(config.clone(), &medium);
    let mut held: Vec<Option<u64>> = vec![None; SLOTS as usize];
    let mut durable: Vec<Option<u64>> = held.clone();
    for number in 0..random.below(40) {
        let slot = random.below(u64::from(SLOTS)) as usize;
        match random.below(6) {
            0 => {
                assert_eq!(engine.flush(PATIENCE).unwrap().pending_blocks, 0);
                durable.clone_from(&held);
            }
            1 => {
                engine.release(&[BlockId(at(slot))]);
                held[slot] = None;
                durable[slot] = None;
            }
            _ => {
                assert!(all_good(&write(&engine, &[(at(slot), number)])));
                held[slot] = Some(number);
                durable[slot] = None;
            }
        }
    }
    let after = medium.crash(random.next());
    drop(engine);
    let (engine, recovered) = open(config, &after);
    for (slot, number) in durable.iter().enumerate().filter_map(|(slot, number)| Some((slot, (*number)?))) {
        assert!(
            recovered_numbers(&recovered).contains(&(at(slot), number as u32)),
            "seed {seed}: {number} lost"
        );
        assert!(
            is_served(&engine, at(slot), number),
            "seed {seed}: block {number} of slot {slot} is damaged"
        );
    }
    for (slot, number) in recovered_numbers(&recovered) {
        // Right bytes or none: `is_served` compares them.
        let served = is_served(&engine, slot, u64::from(number));
        assert!(served || durable[(slot / step) as usize] != Some(u64::from(number)), "seed {seed}");
    }
    durable.iter().flatten().count()
}
