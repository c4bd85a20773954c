//! What must hold whatever a peer sends for its block set: the body of the fuzz target `block_set`
//! (`cargo xtask fuzz`). It panics where it does not hold.

use crate::codec::{MAGIC, decode, encode};
use crate::{BlockSet, ImportError, SerializedBlockSet, UnixMillis};
use crc_fast::{CrcAlgorithm, checksum};
use kvbm_layout::BlockLayout;

/// What stands behind the format version and before the agent's name.
const HEAD: usize = 70;
/// Magic, version and a reserved field of a serialized layout, which its length follows.
const LAYOUT: &[u8] = b"KVBMLAYT\x01\0\0\0";
/// Cells of a layer that are looked at: a message says in few bytes that there are many.
const CELLS: usize = 64;

/// A set that is accepted has this one form, is imported for its own namespace while its lease
/// lasts and at no other time, and its blocks lie in the memory that it names. For what the input
/// says see [`message`].
pub fn block_set(input: &[u8]) {
    let bytes = message(input);
    let set = match decode(&bytes) {
        Ok(set) => set,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(matches!(encode(&set), Ok(again) if again == bytes), "what is accepted has one form: {set:?}");
    is_imported_in_time(&set, bytes);
    lies_in_its_memory(&set);
}

fn is_imported_in_time(set: &BlockSet, bytes: Vec<u8>) {
    let sent = SerializedBlockSet::from_bytes(bytes);
    let import = |now| sent.import(&set.namespace, UnixMillis(now));
    let end = set.lease.expires.0;
    if let Some(before) = end.checked_sub(1) {
        assert_eq!(import(before).as_ref(), Ok(set));
    }
    for late in [end, u64::MAX] {
        assert!(matches!(import(late), Err(ImportError::Expired { .. })));
    }
}

fn lies_in_its_memory(set: &BlockSet) {
    let layout = set.layout.layout();
    let config = layout.config();
    for layer in [0, config.num_layers - 1] {
        for cell in config.cells().take(CELLS) {
            let view = layout.view(layer, cell).unwrap_or_else(|error| panic!("{layer}, {cell}: {error}"));
            let last = u128::from(config.num_blocks - 1) * u128::from(view.block_stride);
            let end = u128::from(view.offset) + last + u128::from(view.span());
            let region = view.region as usize;
            assert!(end <= u128::from(layout.regions()[region].bytes), "{layer}, {cell}: {end}");
            let memory = set.layout.memory()[region];
            let end = u128::from(memory.base_offset) + end;
            assert!(end <= u128::from(memory.bytes), "{layer}, {cell}: {end} of {memory:?}");
        }
    }
}

/// A message: the input itself, if it begins as one does. Else it says one in few bytes, whose
/// lengths and checksums are right, for nobody guesses those:
///
/// | bytes | what |
/// |---|---|
/// | 70 | from the group to the end of the lease |
/// | 1, n | the agent's name |
/// | 1, n | its metadata |
/// | rest | the layout, from its type on |
fn message(input: &[u8]) -> Vec<u8> {
    if input.starts_with(&MAGIC) {
        return input.to_vec();
    }
    let (head, mut rest) = input.split_at(HEAD.min(input.len()));
    let mut bytes = [&MAGIC[..], &[1, 0], head].concat();
    bytes.resize(MAGIC.len() + 2 + HEAD, 0);
    let mut short = || {
        let (length, behind) = rest.split_first().unwrap_or((&0, &[]));
        let (text, behind) = behind.split_at(behind.len().min(usize::from(*length)));
        rest = behind;
        text
    };
    let (agent, metadata) = (short(), short());
    bytes.extend((agent.len() as u16).to_le_bytes());
    bytes.extend(agent);
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(metadata);
    let length = LAYOUT.len() + 4 + rest.len() + 8;
    bytes.extend((length as u32).to_le_bytes());
    bytes.extend(sealed([LAYOUT, &(length as u32).to_le_bytes(), rest].concat()));
    sealed(bytes)
}

/// With its checksum behind it.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(checksum(CrcAlgorithm::Crc64Nvme, &bytes).to_le_bytes());
    bytes
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds() {
        assert!(corpus::run("block_set", &[], block_set) > 0);
    }

    /// Otherwise nothing behind the checksums is reached.
    #[test]
    fn the_corpus_has_sets_of_each_kind_of_layout() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/block_set");
        let mut kinds: Vec<_> = folder.read_dir().expect("committed").collect();
        let mut found = std::collections::BTreeSet::new();
        for file in kinds.drain(..) {
            let bytes = std::fs::read(file.expect("a file").path()).expect("a file");
            if let Ok(set) = decode(&message(&bytes)) {
                found.insert(format!("{:?}", set.layout.layout().layout_type()));
            }
        }
        assert_eq!(found.len(), 5, "{found:?}");
    }
}
