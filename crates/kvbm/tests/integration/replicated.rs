//! Ranks that hold the same bytes (MLA, more ranks than KV heads): G3 has one copy, which one rank
//! writes and all read, and so has G2 where `host.one_copy` is set.
#![cfg(feature = "worker")]

use crate::support::heads::{self, serve};
use crate::support::{expected, host, namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, Config, ModelConfig, VerifyHost};
use kvbm::storage::{BoundLayout, RegionBytes};
use kvbm::{BlockId, Engine, FailureKind, G1Memory, KvBlockManager, Owned, Path, Rank, Tier, TokenSequence};
use kvbm::{TookOver, WorkerServer};
use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;

const BLOCKS: u32 = 6;
/// Blocks of the engine.
const G1: u32 = 16;

/// One latent of a token in each layer, which all ranks hold.
fn latent() -> ModelConfig {
    ModelConfig { num_kv_heads: 1, outer_dim: 1, head_dim: 64, ..heads::model() }
}

fn open(model: ModelConfig, dir: &FilePath, ranks: u32) -> KvBlockManager<Owned> {
    heads::on_disk(model, dir, ranks).build().expect("a manager")
}

/// Opens the directory; how many blocks of the request came from the disk, all compared, and what
/// was taken over.
fn hits(model: ModelConfig, dir: &FilePath, ranks: u32) -> (usize, Vec<TookOver>) {
    let manager = open(model, dir, ranks);
    let hits = serve(&manager, &tokens(&manager, 1, BLOCKS));
    assert!(manager.metrics().path(Path::G3_G1).blocks.get() >= hits as u64, "they come from the disk");
    let took_over = manager.workers().took_over().to_vec();
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    (hits, took_over)
}

/// Slot files below a directory.
fn slot_files(dir: &FilePath) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let below = |path: PathBuf| if path.is_dir() { slot_files(&path) } else { vec![path] };
    entries.flat_map(below).filter(|path| path.ends_with("slots.kvbm")).collect()
}

fn slot_bytes(dir: &FilePath) -> u64 {
    slot_files(dir).iter().map(|file| file.metadata().expect("a file").len()).sum()
}

/// Mutations that make it fail: a rank that holds the same bytes opens a folder of its own; it
/// notes nothing of what its writer writes.
#[test]
fn one_copy_is_written_and_every_rank_reads_it() {
    let mut all = Vec::new();
    for ranks in [1, 2, 4] {
        let dir = tempfile::tempdir().expect("a directory");
        let manager = open(latent(), dir.path(), ranks);
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &sequence), 0);
        let written = manager.metrics().path(Path::G2_G3).bytes.get();
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).expect("a tier of ours");
        }
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "{ranks} ranks");
        drop(manager);
        assert_eq!(slot_files(dir.path()).len(), 1, "{ranks} ranks");
        all.push((written, slot_bytes(dir.path())));
        assert_eq!(hits(latent(), dir.path(), ranks), (BLOCKS as usize, Vec::new()), "after a restart");
    }
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
}

#[test]
fn ranks_of_another_number_find_the_copy() {
    for (before, after) in [(4, 2), (2, 4), (4, 1), (1, 4)] {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(hits(latent(), dir.path(), before).0, 0);
        let whole = vec![TookOver { ranks: before, blocks: BLOCKS.into(), left_behind: 0, refused: None }];
        assert_eq!(hits(latent(), dir.path(), after), (BLOCKS as usize, whole), "{before} to {after}");
        assert_eq!(hits(latent(), dir.path(), after), (BLOCKS as usize, Vec::new()));
        assert_eq!(slot_files(dir.path()).len(), 2, "one of each deployment");
    }
}

/// Four heads and eight ranks: each head has a writer, and another rank that reads what it wrote.
#[test]
fn more_ranks_than_heads_write_each_head_once() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(hits(heads::model(), dir.path(), 8).0, 0);
    let four = tempfile::tempdir().expect("a directory");
    assert_eq!(hits(heads::model(), four.path(), 4).0, 0);
    assert_eq!(slot_files(dir.path()).len(), 4);
    assert_eq!(slot_bytes(dir.path()), slot_bytes(four.path()));
    assert_eq!(hits(heads::model(), dir.path(), 8), (BLOCKS as usize, Vec::new()));
}

/// Ranks whose bytes are not the same, whatever the model says: nothing is stored, since one copy
/// would be right for one of them alone.
#[test]
fn ranks_that_hold_other_bytes_store_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let manager = open(latent(), dir.path(), 2);
    let sequence = tokens(&manager, 1, BLOCKS);
    let fresh = manager.allocate(BLOCKS as usize).expect("room");
    for (&block, &hash) in fresh.block_ids().iter().zip(sequence.hashes()) {
        heads::compute_unlike(&manager, block, hash);
    }
    let (done, _) = manager.commit(fresh, &sequence, 0).expect("commit");
    drop(manager.register(done).expect("register"));
    assert!(manager.wait_offloads(soon()));
    let failed = manager.metrics().path(Path::G2_G3).failures(FailureKind::Unsupported).get();
    assert_eq!(failed, u64::from(BLOCKS));
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
    assert_eq!(manager.match_prefix(&sequence).len(), 0);
    drop(manager);
    assert_eq!(open(latent(), dir.path(), 2).match_prefix(&sequence).len(), 0, "nor after a restart");
}

/// A manager whose ranks share host memory.
fn open_shared(model: ModelConfig, dir: &FilePath, ranks: u32) -> KvBlockManager<Owned> {
    let builder = heads::on_disk(model, dir, ranks).configure(|config| config.host.one_copy = true);
    builder.build().expect("a manager")
}

/// Where G2 of each rank begins.
fn host_memory(manager: &KvBlockManager<Owned>) -> Vec<*mut u8> {
    let start = |worker: &kvbm::Worker| match worker.g2().expect("G2").region(0).expect("a region") {
        RegionBytes::Host(region) => region.as_ptr(),
        other => panic!("{other:?}"),
    };
    manager.workers().iter().map(start).collect()
}

/// Ranks with the same bytes read one copy in host memory, which one of them writes: from G1, and
/// from the disk after a restart. Mutations that make it fail: each rank allocates its own G2; a
/// rank that does not write copies its block, too; it keeps claims of its own.
#[test]
fn one_copy_in_host_memory_serves_every_rank() {
    for (model, ranks, writers) in [(latent(), 4, 1), (latent(), 2, 1), (heads::model(), 8, 4)] {
        let dir = tempfile::tempdir().expect("a directory");
        let manager = open_shared(model.clone(), dir.path(), ranks);
        let mut memory = host_memory(&manager);
        memory.dedup();
        assert_eq!(memory.len(), writers, "{ranks} ranks");
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &sequence), 0);
        assert!(manager.wait_offloads(soon()));
        let config = manager.config();
        let copy = config.rank_block_bytes() * writers as u64 * u64::from(BLOCKS);
        assert_eq!(manager.metrics().path(Path::G1_G2).bytes.get(), copy, "{ranks} ranks write one copy");
        manager.clear(Tier::G1).expect("a tier of ours");
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "{ranks} ranks");
        let onboarded = manager.metrics().path(Path::G2_G1).bytes.get();
        assert_eq!(onboarded, config.rank_block_bytes() * u64::from(ranks * BLOCKS), "every rank reads it");
        let report = manager.shutdown(Duration::from_secs(30));
        assert!(report.is_complete(), "{report:?}");
        drop(manager);
        let manager = open_shared(model, dir.path(), ranks);
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "from the disk of {ranks} ranks");
        for tier in [Tier::G1, Tier::G3] {
            assert!(manager.wait_offloads(soon()));
            manager.clear(tier).expect("a tier of ours");
        }
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "from what came up to G2");
    }
}

/// A damaged block in the one copy is a miss for all ranks, whichever reads it first.
#[test]
fn damage_to_the_copy_in_host_memory_is_a_miss_for_all() {
    let dir = tempfile::tempdir().expect("a directory");
    let builder = heads::on_disk(latent(), dir.path(), 4).configure(|config| {
        config.host.one_copy = true;
        config.transfer.verify_host = VerifyHost::Always;
        config.offload.g2_g3.write_through = false;
    });
    let manager = builder.build().expect("a manager");
    let sequence = tokens(&manager, 1, BLOCKS);
    assert_eq!(serve(&manager, &sequence), 0);
    assert!(manager.wait_offloads(soon()));
    let g2 = manager.workers().iter().next().expect("a worker").g2().expect("G2").clone();
    let ones = vec![0xFF; g2.bytes_per_block() as usize];
    for slot in 0..g2.num_blocks() {
        // SAFETY: no transfer runs.
        unsafe { g2.write_block(slot, &ones) }.expect("a block");
    }
    manager.clear(Tier::G1).expect("a tier of ours");
    manager.clear(Tier::G3).expect("a tier of ours");
    assert_eq!(serve(&manager, &sequence), 0, "no rank takes damaged bytes");
    manager.clear(Tier::G1).expect("a tier of ours");
    assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "which was computed again");
}

/// Damage is found by whoever reads first, and is a miss for all ranks.
#[test]
fn damage_to_the_copy_is_a_miss_for_all() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(hits(latent(), dir.path(), 4).0, 0);
    let file = &slot_files(dir.path())[0];
    let mut bytes = std::fs::read(file).expect("a slot file");
    bytes[2 * 4096 + 5] ^= 4;
    std::fs::write(file, bytes).expect("a slot file");
    assert_eq!(hits(latent(), dir.path(), 4).0, 2, "up to the damaged block");
    assert_eq!(hits(latent(), dir.path(), 4).0, BLOCKS as usize, "which was computed again");
}

const RANKS: u16 = 2;

/// The configuration of workers that listen for their leader.
fn listening(folder: &FilePath) -> Config {
    let mut config = Config { model: latent(), ..Config::default() };
    unlimited(&mut config);
    config.offload.g2_g3.write_through = true;
    config.namespace.model = "test-model".into();
    config.host.capacity = Blocks(16).into();
    config.disk.capacity = Blocks(16).into();
    config.disk.dir = Some(folder.join("kv"));
    config.parallelism.tensor_parallel = RANKS.into();
    let socket = |rank: u16| folder.join(format!("rank-{rank}.sock"));
    config.parallelism.workers = (0..RANKS).map(socket).collect();
    config
}

fn tensors() -> BoundLayout {
    let model = latent();
    host::host_tensors(host::contiguous(&model, model.num_kv_heads, G1))
}

fn leader(config: &Config) -> KvBlockManager<Engine> {
    let given = config.clone();
    KvBlockManager::<Owned>::builder()
        .model(latent())
        .namespace(namespace())
        .engine_blocks(G1)
        .configure(|own| {
            let namespace = own.namespace.clone();
            *own = given;
            own.namespace = namespace;
        })
        .build()
        .expect("a leader")
}

/// Bytes of a block in the tensors of a rank.
fn bytes(tensors: &BoundLayout, block: BlockId) -> Vec<u8> {
    let mut bytes = vec![0; tensors.bytes_per_block() as usize];
    // SAFETY: the test touches a block only while no transfer does.
    unsafe { tensors.read_block(block.0, &mut bytes) }.expect("a block");
    bytes
}

/// Loads the blocks of a sequence to the engine's blocks of these ids; how many arrived, compared
/// on every rank.
fn loaded(manager: &KvBlockManager<Engine>, ranks: &[BoundLayout], sequence: &TokenSequence) -> usize {
    let ids: Vec<BlockId> = (0..BLOCKS).map(|id| BlockId(G1 - 1 - id)).collect();
    for rank in ranks {
        for id in &ids {
            // SAFETY: as above.
            unsafe { rank.write_block(id.0, &vec![0xA5; rank.bytes_per_block() as usize]) }.expect("a block");
        }
    }
    let prefix = manager.match_prefix(sequence);
    let ids = &ids[..prefix.len()];
    let onboarding = manager.onboard(prefix, ids, None).expect("an onboard");
    let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
    for rank in ranks {
        for (&id, &hash) in ids[..arrived].iter().zip(sequence.hashes()) {
            assert!(bytes(rank, id) == expected(hash, 0, rank.bytes_per_block() as usize), "block {id}");
        }
    }
    arrived
}

/// Workers in processes of their own, as those of an engine are: each has a socket, and the rank
/// that does not write finds what the other one does. A writer that is gone is a miss for all.
#[test]
fn workers_that_listen_share_the_copy() {
    let folder = tempfile::tempdir().expect("a directory");
    let config = listening(folder.path());
    let ranks: Vec<BoundLayout> = (0..RANKS).map(|_| tensors()).collect();
    let bind = |rank: u16| {
        let memory = G1Memory::EngineHost(ranks[usize::from(rank)].clone());
        let socket = &config.parallelism.workers.as_slice()[usize::from(rank)];
        WorkerServer::bind(&config, Rank(rank), &memory, socket).expect("a server")
    };
    let [writer, reader] = [bind(0), bind(1)];
    let (stop_writer, stop_reader) = (writer.stopper(), reader.stopper());
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || writer.serve());
        let reader = scope.spawn(move || reader.serve());
        let ids: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
        for life in 0..3 {
            let manager = leader(&config);
            let sequence = manager.sequence(&(0..16 * BLOCKS).collect::<Vec<u32>>(), b"").expect("tokens");
            if life == 0 {
                for rank in &ranks {
                    for (&id, &hash) in ids.iter().zip(sequence.hashes()) {
                        let bytes = expected(hash, 0, rank.bytes_per_block() as usize);
                        // SAFETY: no transfer touches the block yet.
                        unsafe { rank.write_block(id.0, &bytes) }.expect("a block");
                    }
                }
                let offload = manager.offload(&ids, &sequence, 0, None).expect("an offload");
                assert_eq!(offload.started, ids.len());
                assert!(manager.wait_offloads(soon()));
                manager.clear(Tier::G2).expect("a tier of ours");
            }
            assert_eq!(loaded(&manager, &ranks, &sequence), ids.len(), "life {life}");
            let report = manager.shutdown(Duration::from_secs(30));
            assert!(report.is_complete(), "{report:?}");
        }
        assert_eq!(slot_files(folder.path()).len(), 1);

        let manager = leader(&config);
        let sequence = manager.sequence(&(0..16 * BLOCKS).collect::<Vec<u32>>(), b"").expect("tokens");
        assert_eq!(manager.match_prefix(&sequence).len(), ids.len());
        stop_writer();
        writer.join().expect("no panic");
        assert_eq!(loaded(&manager, &ranks, &sequence), 0, "a rank has no disk any more");
        drop(manager);
        stop_reader();
        reader.join().expect("no panic");
    });
}
