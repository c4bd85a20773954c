//! Directories of the disk tier that take no writes any more: copies go elsewhere, and what can be read stays.
#![cfg(feature = "worker")]

use crate::support::{namespace, serve, slot_file, soon, tokens, unlimited};
use kvbm::config::{Blocks, DiskEngine, ModelConfig};
use kvbm::{KvBlockManager, Owned, Tier};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A megabyte of neighbouring slots of 16 KiB lies in each directory in turn.
const STRIPE: u32 = 64;
const BLOCKS: u32 = 32 * STRIPE;
/// Slots that rest where nothing is written any more.
const CREDIT: u32 = BLOCKS / 16;

fn manager(dirs: &[&Path]) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 256, ..ModelConfig::default() })
        .namespace(namespace())
        .device(Blocks(64))
        .host(Blocks(128))
        .disk(dirs[0], Blocks(BLOCKS))
        .more_disk_dirs(dirs[1..].iter().copied())
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            // The ring has files of its own, which nobody can replace.
            config.disk.engine = DiskEngine::Buffered;
        })
        .build()
        .unwrap()
}

/// From now on this process cannot write to a file that it has open, or can again.
fn open_anew(file: &Path, writable: bool) {
    let other = File::options().read(true).write(writable).open(file).unwrap();
    let is_it = |fd: &i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|path| path == file);
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let all = all.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<i32>().unwrap());
    let open: Vec<i32> = all.filter(is_it).filter(|&fd| fd != other.as_raw_fd()).collect();
    assert!(!open.is_empty());
    for fd in open {
        // SAFETY: both are open files of this process, the same one before and after: who owns the descriptor still does.
        let replaced = unsafe { libc::dup2(other.as_raw_fd(), fd) };
        assert_eq!(replaced, fd);
    }
}

/// Serves so many new blocks, one by one, and waits for their copies: how many came to the disk.
fn copied(manager: &KvBlockManager<Owned>, next: &mut u32, blocks: u32) -> usize {
    let all: Vec<_> = (*next..*next + blocks).map(|start| tokens(manager, start, 1)).collect();
    *next += blocks;
    for sequence in &all {
        assert_eq!(serve(manager, sequence), 0);
        assert!(manager.wait_offloads(soon()));
    }
    all.iter()
        .filter(|sequence| manager.look_up(*sequence).iter().any(|at| at.tiers.contains(Tier::G3)))
        .count()
}

/// Mutation that makes it fail: `Resting::hears` lets nothing rest.
#[test]
fn copies_go_to_the_directories_that_take_them() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manager = manager(&[first.path(), second.path()]);
    let mut next = 1;
    assert_eq!(copied(&manager, &mut next, BLOCKS), BLOCKS as usize, "the tier is full");

    let slots = slot_file(second.path());
    open_anew(&slots, false);
    let came = copied(&manager, &mut next, BLOCKS);
    let resting = manager.status().disk_resting;
    assert_eq!(came as u32 + resting, BLOCKS, "each slot failed once");
    assert!((BLOCKS / 2 - STRIPE..=BLOCKS / 2).contains(&resting), "{resting}");
    assert_eq!(copied(&manager, &mut next, STRIPE), STRIPE as usize, "nothing is in their way");
    let line = format!("kvbm_tier_slots{{tier=\"g3\",state=\"resting\"}} {resting}\n");
    let text = manager.metrics().encode();
    assert!(text.contains(&line), "{line} in {text}");
}

/// Mutation that makes it fail: `Resting::hears` gives credit for what failed.
#[test]
fn a_disk_that_can_only_be_read_keeps_its_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(&[dir.path()]);
    let mut next = 1;
    assert_eq!(copied(&manager, &mut next, BLOCKS), BLOCKS as usize);

    let slots = slot_file(dir.path());
    open_anew(&slots, false);
    assert_eq!(copied(&manager, &mut next, 2 * CREDIT), 0);
    let status = manager.status();
    let [_, _, disk, _] = &status.tiers[..] else { panic!("four tiers") };
    // Those that rest, and the one that is taken again and again.
    assert_eq!((status.disk_resting, disk.inactive, disk.free), (CREDIT, BLOCKS - CREDIT - 1, 1));

    open_anew(&slots, true);
    assert_eq!(copied(&manager, &mut next, STRIPE), STRIPE as usize);
}
