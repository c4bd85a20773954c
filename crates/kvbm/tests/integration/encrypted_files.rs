//! Keys of operators, and whether files have the bytes of blocks.
#![cfg(feature = "worker")]

use kvbm::{KvBlockManager, Owned, Tier, TokenSequence};
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Writes an operator's key, which consists of `digit`.
pub(crate) fn key_file(dir: &Path, digit: char) -> PathBuf {
    let path = dir.join(format!("operator-{digit}.key"));
    std::fs::write(&path, format!("0{}\n", digit.to_string().repeat(63))).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("mode");
    path
}

/// All files below a directory.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.flat_map(below).collect()
}

/// Samples of `LEN` bytes of a request's blocks, as host memory has them.
pub(crate) fn samples<const LEN: usize>(
    manager: &KvBlockManager<Owned>,
    sequence: &TokenSequence,
) -> Vec<[u8; LEN]> {
    manager.clear(Tier::G1).expect("ours");
    let mut samples = Vec::new();
    for rank in manager.workers().iter() {
        let g2 = rank.g2().expect("configured").clone();
        for block in manager.match_prefix(sequence).blocks() {
            assert_eq!(block.tier, Tier::G2);
            let mut bytes = vec![0; g2.bytes_per_block() as usize];
            // SAFETY: nobody writes a block that is registered.
            unsafe { g2.read_block(block.block.0, &mut bytes) }.expect("host memory");
            samples.extend(bytes.as_chunks::<LEN>().0.iter().step_by(37).copied());
        }
    }
    samples.retain(|sample| sample.iter().any(|byte| *byte != sample[0]));
    assert!(samples.len() > 10);
    samples
}

/// Fails where a file has one of the samples.
pub(crate) fn assert_none_has<const LEN: usize>(files: Vec<PathBuf>, samples: &[[u8; LEN]]) {
    for path in files {
        let bytes = std::fs::read(&path).expect("a file");
        let windows: HashSet<&[u8]> = bytes.windows(LEN).collect();
        let found = samples.iter().filter(|sample| windows.contains(sample.as_slice())).count();
        assert_eq!(found, 0, "{} has bytes of blocks", path.display());
    }
}
