//! What must hold of any bytes that come over the daemon's socket, or from a daemon that hands its
//! memory over. This is the body of the fuzz target `node` (`cargo xtask fuzz`). It panics where it
//! does not hold.

use crate::handover::RankIndex;
use crate::protocol::{Ask, Call, DaemonNotice, Moved, Terms, Welcome, decode, encode};
use crate::shape::ModelShape;
use crate::slots;
use kvbm::GroupKind;
use kvbm::plan::wire;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most characters of what differs.
const MAX_SHOWN: usize = 1200;

/// A message that is read is written, and read again, as the same. Terms that differ from what the
/// daemon has are refused with a text of a bounded length. A call that is carried out has as
/// many ids as its cache groups say, and its run is one. Memory that is described has slots, or is
/// refused. The first byte of the input says which message it is.
pub fn node(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind {
        0 => terms(bytes),
        1 => call(bytes),
        2 => drop(read::<DaemonNotice>(bytes)),
        3 => {
            if let Some(Moved::Message(message)) = read(bytes) {
                // What it says is checked where plans are read.
                let _any = wire::decode_message(&message.0);
            }
        }
        4 => {
            let Some(Welcome { memory: Some(memory), .. }) = read(bytes) else { return };
            match slots::layouts(&memory) {
                Ok(layouts) => assert!(layouts.iter().all(|slots| slots.config().num_blocks == memory.slots)),
                Err(why) => assert!(!why.is_empty()),
            }
        }
        5 => drop(read::<Vec<RankIndex>>(bytes)),
        _ => {}
    }
}

fn read<T: DeserializeOwned + Serialize + PartialEq>(bytes: &[u8]) -> Option<T> {
    match decode::<T>(bytes) {
        Ok(message) => {
            assert!(decode::<T>(&encode(&message)).is_ok_and(|again| again == message));
            Some(message)
        }
        Err(why) => {
            assert!(!why.is_empty());
            None
        }
    }
}

fn terms(bytes: &[u8]) {
    let Some(Terms { model, .. }) = read(bytes) else { return };
    for kinds in [&[GroupKind::Full][..], &[GroupKind::SlidingWindow(31), GroupKind::Full, GroupKind::State]]
    {
        let ours = ModelShape::new(kinds, []);
        let Some(found) = model.difference(&ours) else {
            assert!(model == ours);
            continue;
        };
        let texts = [found.name, found.theirs, found.ours];
        assert!(
            !texts[0].is_empty() && texts.map(|text| text.chars().count()).iter().sum::<usize>() < MAX_SHOWN
        );
    }
}

fn call(bytes: &[u8]) {
    let Some(Call { ask, .. }) = read(bytes) else { return };
    if ask.check().is_err() {
        return;
    }
    match &ask {
        Ask::Commit { ids, .. } => {
            let all: usize = ids.places().into_iter().map(|place| ids.all()[place].len()).sum();
            assert_eq!(all, ids.all().len());
        }
        Ask::LookUp { run, .. }
        | Ask::Offload { run, .. }
        | Ask::Prefetch { run }
        | Ask::SessionResumes { run } => {
            let hashes = run.hashes();
            assert_eq!(run.chain(&hashes).len(), hashes.len());
        }
        _ => {}
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    /// The file, all its beginnings, and with each of its bytes changed.
    fn node_around(input: &[u8]) {
        node(input);
        for at in 0..input.len() {
            node(&input[..at]);
            for flip in [0x01, 0x10, 0x80, 0xff] {
                let mut changed = input.to_vec();
                changed[at] ^= flip;
                node(&changed);
            }
        }
    }

    /// Files that mean nothing any more would begin nowhere.
    #[test]
    fn files_of_the_corpus_are_messages_unless_they_lie() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/node");
        let terms = ["left", "mover", "scheduler", "successor"].map(|role| format!("{folder}/terms_{role}"));
        for file in terms {
            let bytes = std::fs::read(&file).unwrap();
            assert!(read::<Terms>(&bytes[1..]).is_some(), "{file}");
        }
    }

    #[test]
    fn the_corpus_and_all_bytes_around_it_hold() {
        assert!(corpus::run("node", &[], node_around) > 20);
    }
}
