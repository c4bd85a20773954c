//! Promises that hold: a prefix is brought to G2 and pinned there before it is promised.
#![cfg(feature = "worker")]

use crate::support::host::{host_tensors, layer_separate};
use crate::support::{compute, expected, holds, model, namespace, slot_file, soon, unlimited};
use kvbm::config::Blocks;
use kvbm::{BlockId, Engine, KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

const G1: u32 = 32;

fn manager(g2: u32, disk: &FilePath) -> KvBlockManager<Engine> {
    let model = model();
    let tensors = host_tensors(layer_separate(&model, G1));
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .engine_host(vec![tensors])
        .host(Blocks(g2))
        .disk(disk, Blocks(64))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
        })
        .build()
        .unwrap()
}

fn ids(blocks: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    blocks.into_iter().map(BlockId).collect()
}

/// A sequence whose blocks are on G3 alone.
fn on_disk(manager: &KvBlockManager<Engine>, blocks: u32) -> TokenSequence {
    let page = model().page_size;
    let tokens = manager.sequence(&(0..blocks * page).collect::<Vec<_>>(), b"").unwrap();
    for (id, &hash) in ids(0..blocks).into_iter().zip(tokens.hashes()) {
        compute(manager, id, hash);
    }
    assert_eq!(manager.offload(&ids(0..blocks), &tokens, 0, None).unwrap().refused, []);
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G2).unwrap();
    tokens
}

fn load(manager: &KvBlockManager<Engine>, to: &[BlockId]) -> usize {
    manager.tickets().commit("a", to, None).unwrap();
    let until = soon();
    loop {
        if let Some(load) = manager.tickets().finished().pop() {
            assert_eq!((load.wanted, load.failures.len()), (to.len(), 0));
            return load.arrived;
        }
        assert!(Instant::now() < until, "a load ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Flips a bit of block `at` of the sequence on the disk.
fn damage(disk: &FilePath, tokens: &TokenSequence, at: usize) {
    let path = slot_file(disk);
    let mut bytes = std::fs::read(&path).unwrap();
    let block = expected(tokens.hashes()[at], 0, 256);
    let place = bytes.windows(block.len()).position(|window| window == block).unwrap();
    bytes[place + 100] ^= 4;
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn what_is_promised_was_read_and_verified_before() {
    let disk = tempfile::tempdir().unwrap();
    let manager = manager(32, disk.path());
    let tokens = on_disk(&manager, 6);
    let copied = |path| manager.metrics().path(path).blocks.get();
    assert_eq!(manager.tickets().stage("a", &tokens, 2, soon()).unwrap(), 4);
    assert_eq!((copied(Path::G3_G2), manager.status().tiers[1].active), (6, 4), "four are pinned on G2");
    assert_eq!(manager.tickets().stage("a", &tokens, 2, soon()).unwrap(), 4, "the same answer");
    assert_eq!((copied(Path::G3_G2), manager.status().tiers[1].active), (6, 4));
    manager.clear(Tier::G3).unwrap();
    assert_eq!(load(&manager, &ids(20..24)), 4);
    assert!(ids(20..24).into_iter().zip(&tokens.hashes()[2..]).all(|(id, &hash)| holds(&manager, id, hash)));
    assert_eq!((copied(Path::G2_G1), copied(Path::G3_G1)), (4, 0));
    assert_eq!((manager.status().tiers[1].active, manager.tickets().counts()), (0, (0, 0)));
}

#[test]
fn what_is_late_is_not_promised_and_found_later() {
    let disk = tempfile::tempdir().unwrap();
    let manager = manager(32, disk.path());
    let tokens = on_disk(&manager, 6);
    let promised = manager.tickets().stage("a", &tokens, 0, Instant::now()).unwrap();
    assert!(promised < 6, "nobody waited for it");
    let until = soon();
    while manager.tickets().stage("b", &tokens, 0, soon()).unwrap() < 6 {
        manager.tickets().abandon("b");
        assert!(Instant::now() < until, "the copies went on");
    }
    assert_eq!(manager.metrics().path(Path::G3_G2).blocks.get(), 6, "each was read once");
}

#[test]
fn damaged_blocks_are_not_promised() {
    let disk = tempfile::tempdir().unwrap();
    let manager = manager(32, disk.path());
    let tokens = on_disk(&manager, 6);
    damage(disk.path(), &tokens, 3);
    assert_eq!(manager.tickets().stage("a", &tokens, 0, soon()).unwrap(), 3);
    assert_eq!(load(&manager, &ids(20..23)), 3);
}

#[test]
fn one_call_brings_at_most_a_quarter_of_g2() {
    let disk = tempfile::tempdir().unwrap();
    let manager = manager(16, disk.path());
    let tokens = on_disk(&manager, 12);
    assert_eq!(manager.tickets().stage("a", &tokens, 0, soon()).unwrap(), 4);
    assert!(manager.tickets().abandon("a"));
    assert_eq!(manager.tickets().stage("a", &tokens, 4, soon()).unwrap(), 4, "the next part");
}
