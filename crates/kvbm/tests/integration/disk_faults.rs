//! Bytes on disk that are not what was written there are never served.
#![cfg(feature = "worker")]

use crate::support::{namespace, serve, slot_file, soon, tokens, unlimited};
use kvbm::config::{Blocks, Bytes, DiskEngine, ModelConfig};
use kvbm::events_plane::{Delivery, EventKind};
use kvbm::metrics::RecoveryOutcome;
use kvbm::{
    BlockId, FailureKind, KvBlockManager, Namespace, OnboardError, Owned, Path, SequenceHash, Tier,
    TokenSequence,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes of a block, and of its slot.
const BLOCK: u64 = 4096;

struct Rig {
    manager: KvBlockManager<Owned>,
    dir: tempfile::TempDir,
}

/// 1 layer x 2 x 16 tokens x 1 head x 64 x bf16: 4 KiB a block.
fn rig(g1: u32, g2: u32, g3: u32) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    Rig { manager: manager_on(dir.path(), [g1, g2, g3]), dir }
}

fn manager_on(dir: &std::path::Path, tiers: [u32; 3]) -> KvBlockManager<Owned> {
    manager_over(dir, &[], tiers)
}

fn manager_over(
    dir: &std::path::Path,
    more_dirs: &[&std::path::Path],
    [g1, g2, g3]: [u32; 3],
) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 64, ..ModelConfig::default() })
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .disk(dir, Blocks(g3))
        .more_disk_dirs(more_dirs.iter().copied())
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            config.disk.engine = DiskEngine::Buffered;
        })
        .build()
        .unwrap()
}

impl Rig {
    fn slots(&self) -> File {
        File::options().read(true).write(true).open(slot_file(self.dir.path())).unwrap()
    }

    /// Serves `sequence` and leaves it on disk only.
    fn store(&self, sequence: &TokenSequence) {
        assert_eq!(serve(&self.manager, sequence), 0);
        self.only_on_disk();
    }

    fn only_on_disk(&self) {
        assert!(self.manager.wait_offloads(soon()));
        for tier in [Tier::G1, Tier::G2] {
            self.manager.clear(tier).unwrap();
        }
    }

    /// Where the blocks of `sequence` lie on disk.
    fn slots_of(&self, sequence: &TokenSequence) -> Vec<BlockId> {
        let prefix = self.manager.match_prefix(sequence);
        assert_eq!(prefix.count(Tier::G3), sequence.num_blocks());
        prefix.blocks().iter().map(|block| block.block).collect()
    }

    fn read(&self, slot: BlockId) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        self.slots().read_exact_at(&mut bytes, u64::from(slot.0) * BLOCK).unwrap();
        bytes
    }

    fn write(&self, slot: BlockId, bytes: &[u8]) {
        self.slots().write_all_at(bytes, u64::from(slot.0) * BLOCK).unwrap();
    }

    fn flip(&self, slot: BlockId, bit: u64) {
        let mut bytes = self.read(slot);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        self.write(slot, &bytes);
    }

    fn onboard(&self, sequence: &TokenSequence) -> OnboardError {
        let error = self.manager.onboard(self.manager.match_prefix(sequence)).wait();
        error.expect_err("a bad block is not served")
    }

    fn corrupt(&self) -> u64 {
        self.manager.metrics().tier(Tier::G3).corrupt.get()
    }

    fn quarantined(&self) -> u64 {
        self.manager.status().disks.iter().map(|disk| disk.engine.quarantined_slots).sum()
    }
}

#[test]
fn invariant_5_none_of_a_thousand_bit_flips_on_disk_is_served() {
    let rig = rig(256, 512, 1100);
    let all: Vec<_> = (0..1000).map(|start| tokens(&rig.manager, start, 1)).collect();
    for part in all.chunks(200) {
        for sequence in part {
            assert_eq!(serve(&rig.manager, sequence), 0);
        }
        rig.only_on_disk();
    }
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for sequence in &all {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        rig.flip(rig.slots_of(sequence)[0], (random >> 33) % (8 * BLOCK));
    }
    for sequence in &all {
        let error = rig.onboard(sequence);
        assert_eq!(error.arrived.len(), 0);
        let failed = &error.failures[0];
        assert_eq!((failed.path, failed.failure.kind), (Path::G3_G1, FailureKind::Corrupt), "{error}");
        assert!(rig.manager.look_up(sequence).is_empty(), "a miss from now on");
    }
    assert_eq!(rig.corrupt(), 1000);
    assert_eq!(rig.manager.status().tiers[2].quarantined, 1000);
    assert_eq!(rig.manager.metrics().tier(Tier::G3).quarantined.get(), 1000);
    assert_eq!(rig.manager.metrics().tier(Tier::G3).hits.get(), 0);
    for sequence in &all[..20] {
        rig.store(sequence);
        assert_eq!(serve(&rig.manager, sequence), 1, "computed again, stored elsewhere and served");
    }
    assert_eq!(rig.corrupt(), 1000);
}

/// Waits for the scrubbing to have found `bad` blocks.
fn scrubbed(manager: &KvBlockManager<Owned>, bad: u64) {
    let until = soon();
    while manager.metrics().tier(Tier::G3).corrupt.get() < bad {
        assert!(std::time::Instant::now() < until, "not found in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Mutation that makes it fail: the worker keeps what scrubbing found to itself.
#[test]
fn invariant_5_scrubbing_finds_bad_blocks_before_anybody_asks_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let manager = |scrub: Bytes| {
        KvBlockManager::<Owned>::builder()
            .model(ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 64, ..ModelConfig::default() })
            .namespace(namespace())
            .device(Blocks(64))
            .host(Blocks(64))
            .disk(dir.path(), Blocks(64))
            .configure(|config| {
                unlimited(config);
                config.offload.g2_g3.write_through = true;
                config.disk.engine = DiskEngine::Buffered;
                config.disk.scrub = scrub;
            })
            .build()
            .unwrap()
    };
    let first = Rig { manager: manager(Bytes(0)), dir: tempfile::tempdir().unwrap() };
    let all: Vec<_> = (0..24).map(|start| tokens(&first.manager, start, 2)).collect();
    for sequence in &all {
        first.store(sequence);
    }
    let (bad, good) = all.split_at(8);
    let slots: Vec<_> = bad.iter().map(|sequence| first.slots_of(sequence)[1]).collect();
    assert!(first.manager.shutdown(Duration::from_secs(60)).is_complete());
    drop(first);
    let rig = Rig { manager: manager(Bytes::gib(1)), dir };
    let mut subscriber = rig.manager.events().subscribe().unwrap();
    for (bit, &slot) in slots.iter().enumerate() {
        rig.flip(slot, 4001 * bit as u64);
    }
    scrubbed(&rig.manager, 8);
    for sequence in bad {
        assert_eq!(rig.manager.look_up(sequence).len(), 1, "up to the bad block, without a read");
    }
    assert_eq!(rig.manager.status().tiers[2].quarantined, 8);
    assert_eq!(rig.manager.metrics().tier(Tier::G3).hits.get(), 0);
    assert!(rig.manager.events().pump());
    let mut removed = Vec::new();
    while let Some(delivery) = subscriber.next(Duration::ZERO).unwrap() {
        // What was told before we asked is a gap.
        let Delivery::Events { events, .. } = delivery else { continue };
        removed.extend(events.into_iter().filter_map(|event| match event.kind {
            EventKind::Remove(block) => Some((block.location.tier, block.identity.hash)),
            _ => None,
        }));
    }
    removed.sort_unstable_by_key(|&(_, hash)| hash);
    let mut expected: Vec<_> = bad.iter().map(|sequence| (Tier::G3, sequence.hashes()[1])).collect();
    expected.sort_unstable_by_key(|&(_, hash)| hash);
    assert_eq!(removed, expected);
    for sequence in good {
        assert_eq!(serve(&rig.manager, sequence), 2);
    }
    for sequence in bad {
        assert_eq!(serve(&rig.manager, sequence), 1, "the second is computed again");
    }
    assert_eq!(rig.corrupt(), 8);
    assert!(rig.manager.shutdown(Duration::from_secs(60)).is_complete());
}

#[test]
fn invariant_5_the_part_before_a_bad_block_is_served() {
    let rig = rig(16, 32, 64);
    let sequence = tokens(&rig.manager, 1, 6);
    rig.store(&sequence);
    rig.flip(rig.slots_of(&sequence)[3], 12_345);
    let error = rig.onboard(&sequence);
    assert_eq!((error.arrived.len(), error.wanted, rig.corrupt()), (3, 6, 1));
    assert!(crate::support::holds(&rig.manager, error.arrived.block_ids()[2], sequence.hashes()[2]));
    drop(error);
    assert!(rig.manager.wait_offloads(soon()));
    assert_eq!(serve(&rig.manager, &sequence), 3, "the rest is computed again");
    rig.only_on_disk();
    assert_eq!(serve(&rig.manager, &sequence), 6, "and stored in a good slot");
    assert_eq!(rig.manager.status().tiers[2].quarantined, 1);
}

#[test]
fn invariant_5_two_valid_slots_swapped_are_both_refused() {
    let rig = rig(16, 32, 64);
    let [first, second] = [1, 2].map(|start| tokens(&rig.manager, start, 1));
    rig.store(&first);
    rig.store(&second);
    let slots = [&first, &second].map(|sequence| rig.slots_of(sequence)[0]);
    let bytes = slots.map(|slot| rig.read(slot));
    rig.write(slots[0], &bytes[1]);
    rig.write(slots[1], &bytes[0]);
    for sequence in [&first, &second] {
        assert_eq!(rig.onboard(sequence).failures[0].failure.kind, FailureKind::Corrupt);
    }
    assert_eq!((rig.corrupt(), rig.manager.status().tiers[2].quarantined), (2, 2));
    assert_eq!(serve(&rig.manager, &first), 0);
}

#[test]
fn invariant_5_a_stale_slot_is_refused() {
    let rig = rig(16, 32, 1);
    let [old, new] = [1, 2].map(|start| tokens(&rig.manager, start, 1));
    rig.store(&old);
    let slot = rig.slots_of(&old)[0];
    let stale = rig.read(slot);
    rig.store(&new);
    assert_eq!(rig.slots_of(&new), [slot], "the slot was used again");
    assert_ne!(rig.read(slot), stale);
    rig.write(slot, &stale);
    let error = rig.onboard(&new);
    assert_eq!((error.arrived.len(), error.failures[0].failure.kind), (0, FailureKind::Corrupt));
    assert_eq!(rig.corrupt(), 1);
    assert_eq!(serve(&rig.manager, &new), 0, "computed again");
}

#[test]
fn invariant_5_what_a_truncated_file_lost_is_refused_and_the_rest_served() {
    let rig = rig(16, 32, 64);
    let sequence = tokens(&rig.manager, 1, 8);
    rig.store(&sequence);
    let slots = rig.slots_of(&sequence);
    let cut = slots.iter().map(|slot| slot.0).max().unwrap();
    let whole = slots.iter().position(|slot| slot.0 == cut).unwrap();
    rig.slots().set_len(u64::from(cut) * BLOCK + BLOCK / 2).unwrap();
    let error = rig.onboard(&sequence);
    assert_eq!(error.arrived.len(), whole);
    assert_eq!(error.failures[0].failure.kind, FailureKind::Missing, "nothing is wrong with the slot");
    assert_eq!((rig.corrupt(), rig.quarantined()), (0, 0));
    drop(error);
    assert!(rig.manager.wait_offloads(soon()));
    assert_eq!(serve(&rig.manager, &sequence), whole);
}

#[test]
fn a_directory_that_lost_its_blocks_takes_no_other_down() {
    // A megabyte of neighbouring slots lies in each directory in turn.
    const BLOCKS: u32 = 600;
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manager = manager_over(first.path(), &[second.path()], [BLOCKS; 3]);
    let rig = Rig { manager, dir: first };
    let all: Vec<_> = (1..=BLOCKS).map(|start| tokens(&rig.manager, start, 1)).collect();
    for sequence in &all {
        assert_eq!(serve(&rig.manager, sequence), 0);
    }
    rig.only_on_disk();
    let status = rig.manager.status();
    let [disk] = &status.disks[..] else { panic!("one rank") };
    let dirs: Vec<_> = disk.engine.dirs.iter().map(|dir| (dir.io_errors, dir.location.clone())).collect();
    assert_eq!(dirs.len(), 2);
    let text = rig.manager.metrics().encode();
    for (errors, location) in dirs {
        let series = format!("kvbm_disk_errors_total{{rank=\"0\",dir=\"{location}\"}} {errors}");
        assert!(errors == 0 && text.contains(&series), "{series}");
    }
    for series in
        ["failed_snapshots_total", "renewed_blocks_total", "given_up_blocks_total", "unsynced_blocks"]
    {
        let line = format!("kvbm_disk_{series}{{rank=\"0\"}} 0\n");
        assert!(text.contains(&line), "{line} in {text}");
    }

    let slots = slot_file(second.path());
    let lost = std::fs::metadata(&slots).unwrap().len() / BLOCK;
    assert!((100..500).contains(&lost), "{lost}");
    File::options().write(true).open(slots).unwrap().set_len(0).unwrap();
    let served = |&sequence: &&TokenSequence| {
        rig.manager.onboard(rig.manager.match_prefix(sequence)).wait().is_ok_and(|cached| cached.len() == 1)
    };
    assert_eq!(all.iter().filter(served).count() as u64, u64::from(BLOCKS) - lost);
    assert_eq!((rig.corrupt(), rig.quarantined()), (0, 0), "what is lost is lost, and its slots are good");
}

#[test]
fn invariant_5_a_bad_slot_stays_bad_after_a_restart() {
    let rig = rig(16, 32, 64);
    let [bad, good] = [1, 2].map(|start| tokens(&rig.manager, start, 2));
    rig.store(&bad);
    rig.store(&good);
    rig.flip(rig.slots_of(&bad)[0], 7);
    assert_eq!(rig.onboard(&bad).arrived.len(), 0);
    rig.manager.flush(std::time::Duration::from_secs(60)).unwrap();
    let Rig { manager, dir } = rig;
    drop(manager);
    let manager = manager_on(dir.path(), [16, 32, 64]);
    assert!(manager.look_up(&bad).is_empty());
    assert_eq!((serve(&manager, &bad), serve(&manager, &good)), (0, 2));
}

/// Flips a bit in every record of `hash` in the journal beside `slots`.
fn damage_records(slots: &std::path::Path, hash: SequenceHash) -> usize {
    const HEADER: usize = 4096;
    const RECORD: usize = 80;
    let path = slots.with_file_name("journal.kvbm");
    let mut bytes = std::fs::read(&path).unwrap();
    let mut damaged = 0;
    for record in bytes[HEADER..].chunks_exact_mut(RECORD).filter(|record| &record[16..32] == hash.as_bytes())
    {
        record[60] ^= 1;
        damaged += 1;
    }
    std::fs::write(path, bytes).unwrap();
    damaged
}

/// Mutation that makes it fail: `recover` keeps the orphans' slots, or `restore` takes blocks
/// without their parents.
#[test]
fn invariant_5_blocks_whose_parents_record_is_damaged_are_dropped_and_counted() {
    let rig = rig(16, 32, 8);
    let [chain, other] = [(1, 6), (2, 2)].map(|(start, blocks)| tokens(&rig.manager, start, blocks));
    rig.store(&chain);
    rig.store(&other);
    assert!(rig.manager.shutdown(Duration::from_secs(60)).is_complete());
    let Rig { manager, dir } = rig;
    drop(manager);
    let slots = slot_file(dir.path());
    assert_eq!(damage_records(&slots, chain.hashes()[2]), 1);
    let found = kvbm_disk::offline::inspect(&[slots.parent().unwrap().to_owned()], None).unwrap();
    assert_eq!((found.blocks, found.orphans, found.dropped.damaged_records), (7, 3, 1));

    let rig = Rig { manager: manager_on(dir.path(), [16, 32, 8]), dir };
    let counted = |outcome| rig.manager.metrics().recovered(outcome).get();
    let outcomes = [RecoveryOutcome::Restored, RecoveryOutcome::Orphan, RecoveryOutcome::Incomplete];
    assert_eq!(outcomes.map(counted), [4, 3, 0]);
    let text = rig.manager.metrics().encode();
    assert!(text.contains("kvbm_recovered_blocks_total{outcome=\"orphan\"} 3"), "{text}");
    assert_eq!((rig.manager.look_up(&chain).len(), rig.manager.look_up(&other).len()), (2, 2));
    // What nobody can find was not announced either.
    let told = rig.manager.events().snapshot().blocks;
    assert_eq!(told.iter().filter(|block| block.location.tier == Tier::G3).count(), 4);
    // Their slots are free again: eight blocks have room.
    rig.only_on_disk();
    assert_eq!(
        (serve(&rig.manager, &chain), serve(&rig.manager, &other)),
        (2, 2),
        "the rest is computed again"
    );
    rig.only_on_disk();
    assert_eq!((rig.slots_of(&chain).len(), rig.slots_of(&other).len()), (6, 2));
    assert_eq!((serve(&rig.manager, &chain), serve(&rig.manager, &other)), (6, 2));
    assert_eq!((rig.corrupt(), rig.manager.status().tiers[2].quarantined), (0, 0));
}

/// Mutation that makes it fail: `rank_dirs` leaves the number of ranks out, and `geometry` the
/// heads.
#[test]
fn invariant_5_ranks_of_another_deployment_and_other_namespaces_keep_their_disks() {
    let dir = tempfile::tempdir().unwrap();
    let manager = |ranks: u32, weights: &str| {
        KvBlockManager::<Owned>::builder()
            .model(ModelConfig { num_layers: 1, num_kv_heads: 2, head_dim: 64, ..ModelConfig::default() })
            .namespace(Namespace::new("test-model").weights(weights))
            .device(Blocks(4))
            .host(Blocks(4))
            .disk(dir.path(), Blocks(4))
            .tensor_parallel(ranks)
            .configure(|config| {
                config.disk.engine = DiskEngine::Buffered;
                // What is taken over is a matter of `disk_shapes`.
                config.disk.take_over = Duration::ZERO;
            })
            .build()
            .unwrap()
    };
    let durable =
        |manager: &KvBlockManager<Owned>| manager.flush(Duration::from_secs(60)).unwrap().durable_blocks;
    let first = manager(2, "1");
    let chain = tokens(&first, 1, 3);
    let (done, _) = first.commit(first.allocate(3).unwrap(), &chain, 0).unwrap();
    drop(first.register(done).unwrap());
    assert!(first.shutdown(Duration::from_secs(60)).is_complete());
    drop(first);
    // Of four ranks two share a head; of other weights nothing is the same.
    for (ranks, weights) in [(4, "1"), (1, "1"), (2, "2")] {
        let other = manager(ranks, weights);
        assert!(other.look_up(&tokens(&other, 1, 3)).is_empty(), "{ranks} ranks, weights {weights}");
        assert_eq!(durable(&other), 0);
    }
    let again = manager(2, "1");
    assert_eq!(again.look_up(&tokens(&again, 1, 3)).len(), 3);
    assert_eq!(durable(&again), 3);
}
