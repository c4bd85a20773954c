//! What must hold whatever a peer sends for its block set, announces or notifies: the bodies of the
//! fuzz targets `block_set`, `announcement` and `peer` (`cargo xtask fuzz`). They panic where it
//! does not hold.

use crate::announcement::{self, MAX_BLOCK_SETS};
use crate::codec::{MAGIC, VERSION, decode, encode};
use crate::in_process::wire as in_process;
use crate::node::messages;
use crate::{BlockSet, ImportError, NodeAnnouncement, SerializedBlockSet};
use crc_fast::{CrcAlgorithm, checksum};
use kvbm_keys::DeploymentKey;
use kvbm_layout::BlockLayout;
use kvbm_plan::NamespaceTag;

/// What stands behind the format version and before the agent's name.
const HEAD: usize = 54;
/// Magic, version and a reserved field of a serialized layout, which its length follows.
const LAYOUT: &[u8] = b"KVBMLAYT\x01\0\0\0";
/// Cells of a layer that are looked at: a message says in few bytes that there are many.
const CELLS: usize = 64;

/// A set that is accepted has this one form, is imported for its own namespace and for no other,
/// and its blocks lie in the memory that it names. For what the input says see [`message`].
pub fn block_set(input: &[u8]) {
    let bytes = message(input);
    let set = match decode(&bytes) {
        Ok(set) => set,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(matches!(encode(&set), Ok(again) if again == bytes), "what is accepted has one form: {set:?}");
    is_imported_for_its_namespace(&set, bytes);
    lies_in_its_memory(&set);
}

fn is_imported_for_its_namespace(set: &BlockSet, bytes: Vec<u8>) {
    let sent = SerializedBlockSet::from_bytes(bytes);
    assert_eq!(sent.import(&set.namespace).as_ref(), Ok(set));
    let other = NamespaceTag::from_bytes(set.namespace.as_bytes().map(|byte| !byte));
    assert!(matches!(sent.import(&other), Err(ImportError::Namespace { .. })));
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
/// | 54 | from the group to the number of heads |
/// | 1, n | the agent's name |
/// | 1, n | its metadata |
/// | rest | the layout, from its type on |
fn message(input: &[u8]) -> Vec<u8> {
    if input.starts_with(&MAGIC) {
        return input.to_vec();
    }
    let (head, rest) = input.split_at(HEAD.min(input.len()));
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), head].concat();
    bytes.resize(MAGIC.len() + 2 + HEAD, 0);
    let (agent, rest) = short(rest);
    let (metadata, rest) = short(rest);
    bytes.extend((agent.len() as u16).to_le_bytes());
    bytes.extend(agent);
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(metadata);
    let length = LAYOUT.len() + 4 + rest.len() + 8;
    bytes.extend((length as u32).to_le_bytes());
    bytes.extend(sealed([LAYOUT, &(length as u32).to_le_bytes(), rest].concat()));
    sealed(bytes)
}

/// Node, epoch and sequence of an announcement.
const ANNOUNCEMENT_HEAD: usize = 20;
/// Where a block set names its node.
const NODE_OF_SET: std::ops::Range<usize> = 20..24;

/// An announcement that is accepted has this one form, and only with the key that it was signed
/// with, or without one. What nobody signed is refused where a key is needed. For what the input
/// says see [`announced`].
pub fn announcement(input: &[u8]) {
    let (ours, other) = (DeploymentKey::from_secret(b"ours"), DeploymentKey::from_secret(b"another"));
    let (bytes, is_signed) = announced(input, &ours);
    let key = is_signed.then_some(&ours);
    let with = |key| NodeAnnouncement::decode(&bytes, key);
    let found = match with(key) {
        Ok(found) => found,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!(
        matches!(found.encode(key), Ok(again) if again == bytes),
        "what is accepted has one form: {found:?}"
    );
    assert!(found.sets.iter().all(|set| set.node == found.node), "{found:?}");
    let strangers = if is_signed { [None, Some(&other)] } else { [Some(&ours), Some(&other)] };
    for key in strangers {
        assert!(matches!(with(key), Err(ImportError::Key { .. })), "{found:?}");
    }
}

/// An announcement, and whether it is signed: the input itself, if it begins as one does. Else it
/// says one in few bytes, whose lengths, checksums and signature are right:
///
/// | bytes | what |
/// |---|---|
/// | 1 | odd: signed |
/// | 20 | node, epoch, sequence |
/// | 1, n | the agent's name |
/// | 1, n | its metadata |
/// | 2, n | each block set as [`block_set`] reads it, of the announcing node |
fn announced(input: &[u8], key: &DeploymentKey) -> (Vec<u8>, bool) {
    if input.starts_with(&announcement::MAGIC) {
        return (input.to_vec(), input.get(8) == Some(&2));
    }
    let (flags, rest) = input.split_first().unwrap_or((&0, &[]));
    let is_signed = flags & 1 == 1;
    let (given, rest) = rest.split_at(ANNOUNCEMENT_HEAD.min(rest.len()));
    let mut head = [0; ANNOUNCEMENT_HEAD];
    head[..given.len()].copy_from_slice(given);
    let (agent, rest) = short(rest);
    let (metadata, mut rest) = short(rest);
    let mut sets = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<2>()
        && sets.len() <= MAX_BLOCK_SETS
    {
        let (set, behind) = behind.split_at(behind.len().min(usize::from(u16::from_le_bytes(*length))));
        rest = behind;
        let mut set = message(set);
        if let Some(node) = set.get_mut(NODE_OF_SET) {
            node.copy_from_slice(&head[..4]);
            set.truncate(set.len() - 8);
            set = sealed(set);
        }
        sets.push(set);
    }
    let version = if is_signed { [2, 0] } else { [1, 0] };
    let count = (sets.len() as u16).to_le_bytes();
    let mut bytes = [&announcement::MAGIC[..], &version, &count, &head].concat();
    bytes.extend((agent.len() as u16).to_le_bytes());
    bytes.extend(agent);
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(metadata);
    for set in sets {
        bytes.extend((set.len() as u32).to_le_bytes());
        bytes.extend(set);
    }
    if is_signed { (announcement::signed(bytes, key), true) } else { (sealed(bytes), false) }
}

/// A notification that is accepted, and an in-process agent's metadata, are the same after they are
/// written and read again. The first byte of the input says which of both it is.
pub fn peer(input: &[u8]) {
    match input.split_first() {
        Some((0, metadata)) => match in_process::decode(metadata) {
            Ok((name, ranges)) => {
                let again = in_process::decode(&in_process::encode(&name, &ranges));
                assert!(matches!(again, Ok(found) if found == (name, ranges)));
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        },
        Some((_, notification)) => {
            if let Some(message) = messages::decode(notification) {
                assert_eq!(messages::decode(&messages::encode(&message)).as_ref(), Some(&message));
            }
        }
        None => {}
    }
}

/// Bytes behind their length of one byte, and the rest.
fn short(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (length, behind) = bytes.split_first().unwrap_or((&0, &[]));
    behind.split_at(behind.len().min(usize::from(*length)))
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

    #[test]
    fn the_corpus_of_announcements_holds() {
        assert!(corpus::run("announcement", &[], announcement) > 0);
    }

    #[test]
    fn the_corpus_of_peers_holds() {
        assert!(corpus::run("peer", &[], peer) > 0);
    }

    /// Otherwise the lists of a message are never looked at.
    #[test]
    fn the_corpus_has_each_message_and_a_range_of_each_kind() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/peer");
        let (mut messages_found, mut ranges_found) = (std::collections::HashSet::new(), 0);
        for file in folder.read_dir().expect("committed") {
            let input = std::fs::read(file.expect("a file").path()).expect("a file");
            match input.split_first() {
                Some((0, metadata)) => {
                    let found = in_process::decode(metadata).map_or(0, |(_, ranges)| ranges.len());
                    ranges_found = ranges_found.max(found);
                }
                Some((_, bytes)) => {
                    messages_found.extend(messages::decode(bytes).map(|it| std::mem::discriminant(&it)));
                }
                None => {}
            }
        }
        assert_eq!((messages_found.len(), ranges_found), (17, 3));
    }

    /// Otherwise nothing behind the signature is reached.
    #[test]
    fn the_corpus_has_announcements_that_are_accepted_with_and_without_a_signature() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/announcement");
        let key = DeploymentKey::from_secret(b"ours");
        let mut found = std::collections::BTreeSet::new();
        for file in folder.read_dir().expect("committed") {
            let input = std::fs::read(file.expect("a file").path()).expect("a file");
            let (bytes, is_signed) = announced(&input, &key);
            if let Ok(accepted) = NodeAnnouncement::decode(&bytes, is_signed.then_some(&key)) {
                found.insert((is_signed, accepted.sets.len().min(2)));
            }
        }
        let wanted = [(false, 0), (false, 1), (false, 2), (true, 0), (true, 1), (true, 2)];
        assert!(wanted.iter().all(|kind| found.contains(kind)), "{found:?}");
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
