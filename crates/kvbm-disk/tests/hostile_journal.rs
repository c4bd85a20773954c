//! A journal sizes no allocation by what it says. The test measures its process, so it stands
//! alone.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod support;

use kvbm_disk::{
    Archive, ContentCrc, DiskConfig, DiskEngine, EngineMode, FileAccess, IoBatch, OwnedBuffer, offline,
};
use kvbm_plan::BlockId;
use std::path::Path;
use std::sync::{Arc, mpsc};
use support::PATIENCE;

const HEADER: usize = 4096;
const RECORD: usize = 80;
/// Slots that the header claims.
const SLOTS: u32 = 4_000_000;
/// Bytes of a block that header and record claim.
const BLOCK_BYTES: u64 = 128 << 20;
const LIMIT: u64 = 32 << 20;

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn crc(bytes: &[u8]) -> [u8; 8] {
    let mut crc = ContentCrc::new();
    crc.update(bytes);
    crc.finish().to_le_bytes()
}

/// A directory with one block.
fn one_block(dir: &Path) {
    let mut config = DiskConfig::new(dir, 4, support::BLOCK as u64, [7; 16]);
    config.engine = EngineMode::Buffered;
    let (engine, _) = DiskEngine::open(config).unwrap();
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    let block = Arc::new(OwnedBuffer::from_slice(&[1; support::BLOCK]));
    batch.write_buffer(BlockId(0), support::identity(0), &block);
    engine.submit(batch).unwrap();
    let _ = outcomes.recv_timeout(PATIENCE).unwrap();
    engine.flush(PATIENCE).unwrap();
}

/// Rewrites header and record with sound checksums.
fn edit(dir: &Path, slots: u32, stride: u64, slot: u32, block_bytes: u64) {
    let journal = dir.join("journal.kvbm");
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes[20..24].copy_from_slice(&slots.to_le_bytes());
    bytes[48..56].copy_from_slice(&block_bytes.to_le_bytes());
    bytes[56..64].copy_from_slice(&stride.to_le_bytes());
    let sum = crc(&bytes[..HEADER - 8]);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum);
    bytes[HEADER + 4..HEADER + 8].copy_from_slice(&slot.to_le_bytes());
    bytes[HEADER + 64..HEADER + 72].copy_from_slice(&block_bytes.to_le_bytes());
    let mut covered = bytes[24..32].to_vec();
    covered.extend_from_slice(&bytes[HEADER..HEADER + RECORD - 8]);
    let sum = crc(&covered);
    bytes[HEADER + RECORD - 8..HEADER + RECORD].copy_from_slice(&sum);
    std::fs::write(&journal, &bytes).unwrap();
}

#[test]
fn invariant_5_far_slots_and_long_blocks_of_a_journal_take_no_memory() {
    let root = tempfile::tempdir().unwrap();
    let dirs = [root.path().to_owned()];
    one_block(root.path());
    // Sparse: it has room for whatever the journal claims and takes no space.
    let slots = std::fs::File::options().write(true).open(root.path().join("slots.kvbm")).unwrap();
    slots.set_len(2 * BLOCK_BYTES).unwrap();
    for (slots, stride, slot, block_bytes) in
        [(SLOTS, 1, SLOTS - 1, support::BLOCK as u64), (1, BLOCK_BYTES, 0, BLOCK_BYTES)]
    {
        edit(root.path(), slots, stride, slot, block_bytes);
        let before = peak_bytes();
        assert_eq!(offline::inspect(&dirs, None).unwrap().blocks, 1);
        assert_eq!(offline::verify(&dirs, None, &mut |_, _| {}).unwrap().damaged, [BlockId(slot)]);
        assert_eq!(Archive::open(&dirs, FileAccess::Owner, None).unwrap().blocks().len(), 1);
        let grown = peak_bytes() - before;
        assert!(grown < LIMIT, "{} MiB for one record of slot {slot}", grown >> 20);
    }
}
