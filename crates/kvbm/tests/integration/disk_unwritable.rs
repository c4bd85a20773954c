//! Directories of the disk tier that take no writes any more: copies go elsewhere, and what can be
//! read stays.
#![cfg(feature = "worker")]

use crate::support::{namespace, serve, slot_file, soon, tokens, unlimited};
use kvbm::config::{Blocks, DiskEngine, ModelConfig};
use kvbm::metrics::DropReason;
use kvbm::{CircuitState, FailureKind, KvBlockManager, Owned, Path, Tier};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// A megabyte of neighbouring slots of 16 KiB lies in each directory in turn.
const STRIPE: u32 = 64;
const BLOCKS: u32 = 32 * STRIPE;

fn manager(dirs: &[&std::path::Path]) -> KvBlockManager<Owned> {
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
pub(crate) fn open_anew(file: &std::path::Path, writable: bool) {
    let other = File::options().read(true).write(writable).open(file).unwrap();
    let is_it = |fd: &i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|path| path == file);
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let all = all.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<i32>().unwrap());
    let open: Vec<i32> = all.filter(is_it).filter(|&fd| fd != other.as_raw_fd()).collect();
    assert!(!open.is_empty());
    for fd in open {
        // SAFETY: both are open files of this process, the same one before and after: who owns the
        // descriptor still does.
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

/// Mutation that makes it fail: `Directories::withhold_unwritable` withholds nothing.
#[test]
fn copies_go_to_the_directories_that_take_them() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manager = manager(&[first.path(), second.path()]);
    let mut next = 1;
    assert_eq!(copied(&manager, &mut next, BLOCKS), BLOCKS as usize, "the tier is full");

    let slots = slot_file(second.path());
    open_anew(&slots, false);
    let began = Instant::now();
    let arrived = copied(&manager, &mut next, BLOCKS);
    // Two failures open the breaker. After that one copy fails in each pause of at least 500 ms.
    let probes = began.elapsed().as_millis() as u64 / 500;
    let failed = manager.metrics().path(Path::G2_G3).dropped(DropReason::Failed).get();
    assert!((2..=2 + probes).contains(&failed), "{failed}, at most {probes} probes");
    let status = manager.status();
    let [well, bad] = &status.disk_directories[..] else { panic!("two directories") };
    assert_eq!((well.writes, well.withheld_slots), (CircuitState::Closed, 0));
    assert_ne!(bad.writes, CircuitState::Closed);
    assert_eq!((bad.reads, status.disk_down), (CircuitState::Closed, false), "it can be read");
    assert!(bad.failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::Io));
    let withheld = bad.withheld_slots;
    assert_eq!(arrived as u32 + withheld, BLOCKS, "the other directory has the last {arrived} copies");
    let text = manager.metrics().encode();
    for line in [
        format!("kvbm_tier_slots{{tier=\"g3\",state=\"withheld\"}} {withheld}\n"),
        "kvbm_disk_directory_down{directory=\"0\",operation=\"write\"} 0\n".into(),
        "kvbm_disk_directory_down{directory=\"1\",operation=\"write\"} 1\n".into(),
        "kvbm_disk_directory_down{directory=\"1\",operation=\"read\"} 0\n".into(),
    ] {
        assert!(text.contains(&line), "{line} in {text}");
    }
}

/// Mutation that makes it fail: `Directories::writable` allows all blocks.
#[test]
fn a_disk_that_can_only_be_read_keeps_its_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(&[dir.path()]);
    let mut next = 1;
    assert_eq!(copied(&manager, &mut next, BLOCKS), BLOCKS as usize);

    let slots = slot_file(dir.path());
    open_anew(&slots, false);
    assert_eq!(copied(&manager, &mut next, 4 * STRIPE), 0);
    let status = manager.status();
    // Probes write to the slots that failed first.
    assert_eq!((status.disk_directories[0].withheld_slots, status.tiers[2].inactive), (2, BLOCKS - 2));
    let dropped = manager.metrics().path(Path::G2_G3).dropped(DropReason::DiskDown).get();
    assert!(dropped > u64::from(3 * STRIPE), "{dropped} were not tried");

    open_anew(&slots, true);
    // After the pause, which is at most 30 s, one copy probes the disk.
    let until = soon();
    while copied(&manager, &mut next, 1) == 0 {
        assert!(Instant::now() < until, "it was probed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(copied(&manager, &mut next, STRIPE), STRIPE as usize);
}
