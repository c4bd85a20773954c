//! Journals that are right, damaged, or lie with checksums that match (`corpus/make.py` writes them
//! from the description of the format): each is taken for what it is, by the engine and by
//! `offline`, without a panic and without memory that a number in it asks for.

use crate::support::*;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::medium::{Medium, OpenFile};
use kvbm_disk::{DiskEngine, offline};
use std::path::PathBuf;

const SLOTS: u32 = 8;

/// What opening says: blocks by slot and number, and (torn bytes, damaged, invalid, beyond,
/// duplicates).
enum Expected {
    Opens(&'static [(u32, u32)], [u64; 5]),
    Refused(&'static str),
}
use Expected::{Opens, Refused};

const NOTHING: [u64; 5] = [0; 5];
const ALL: &[(u32, u32)] = &[(0, 0), (1, 1), (2, 2)];

const CORPUS: &[(&str, Expected)] = &[
    ("whole", Opens(ALL, NOTHING)),
    ("closed_in_order", Opens(ALL, NOTHING)),
    ("closed_and_gone_on", Opens(&[(0, 0), (1, 1)], NOTHING)),
    ("closed_before_unknown", Opens(ALL, [0, 0, 1, 0, 0])),
    ("empty", Refused("0 bytes")),
    ("magic_only", Refused("8 bytes")),
    ("header_cut", Refused("4095 bytes")),
    ("header_only", Opens(&[], NOTHING)),
    ("header_flipped", Refused("damaged")),
    ("keyed", Refused("give the deployment's secret")),
    ("encrypted", Refused("disk.encrypt")),
    ("version_6", Refused("version 6")),
    ("version_max", Refused("version 4294967295")),
    ("header_bytes_lie", Refused("header_bytes")),
    ("record_bytes_lie", Refused("record_bytes")),
    ("geometry_bytes_lie", Refused("geometry_bytes")),
    ("slots_lie", Opens(&[(0, 0)], NOTHING)),
    ("block_bytes_lie", Refused("block_bytes")),
    ("torn_tail", Opens(&[(0, 0), (1, 1)], [79, 0, 0, 0, 0])),
    ("torn_to_garbage", Opens(&[(0, 0), (1, 1)], [80, 0, 0, 0, 0])),
    ("damaged_middle", Opens(&[(0, 0), (2, 2)], [0, 1, 0, 0, 0])),
    ("all_records_damaged", Opens(&[], [240, 0, 0, 0, 0])),
    ("zeros_behind", Opens(ALL, [247, 0, 0, 0, 0])),
    ("unknown_kind", Opens(&[(0, 0), (2, 2)], [0, 0, 1, 0, 0])),
    ("kind_0", Opens(&[(0, 0)], [0, 0, 1, 0, 0])),
    ("unknown_flags", Opens(&[(1, 1)], [0, 0, 1, 0, 0])),
    ("no_bytes", Opens(&[(1, 1)], [0, 0, 1, 0, 0])),
    ("too_many_bytes", Opens(&[(1, 1)], [0, 0, 1, 0, 0])),
    ("slot_beyond", Opens(&[(1, 1)], [0, 0, 0, 1, 0])),
    ("last_generation", Opens(&[(1, 1), (0, 0)], NOTHING)),
    ("same_generation_twice", Opens(&[(0, 3)], NOTHING)),
    ("older_record_later", Opens(&[(0, 3)], NOTHING)),
    ("one_block_in_two_slots", Opens(&[(1, 0)], [0, 0, 0, 0, 1])),
    ("freed_and_quarantined", Opens(&[(2, 2)], NOTHING)),
    ("of_another_journal", Opens(&[(1, 1)], [0, 1, 0, 0, 0])),
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

/// The journal, beside slots of which nothing was ever written.
fn medium_with(journal: &[u8]) -> SimMedium {
    let medium = SimMedium::new();
    for (name, content) in [(JOURNAL_FILE, journal.to_vec()), (SLOT_FILE, vec![0; 1 << 20])] {
        medium.open(name, OpenFile { create: true, ..OpenFile::default() }).unwrap();
        medium.edit(name, |bytes| *bytes = content);
    }
    medium
}

#[test]
fn every_file_of_the_corpus_is_taken_for_what_it_is() {
    for (name, expected) in CORPUS {
        let journal = std::fs::read(folder().join(name).with_extension("kvbm")).unwrap();
        let medium = medium_with(&journal);
        let opened = DiskEngine::open_on(lazy_config(SLOTS), medium.as_medium());
        match (opened, expected) {
            (Err(error), Refused(why)) => {
                assert!(error.to_string().contains(why), "{name}: {error} names {why}");
                assert!(
                    medium.bytes(JOURNAL_FILE) == journal,
                    "{name}: a journal that is refused is left alone"
                );
            }
            (Ok((engine, recovered)), Opens(blocks, dropped)) => {
                let left = recovered.dropped;
                let found = [
                    left.torn_tail_bytes,
                    left.damaged_records,
                    left.invalid_records,
                    left.beyond_capacity,
                    left.duplicates,
                ];
                assert_eq!((recovered_numbers(&recovered).as_slice(), &found), (*blocks, dropped), "{name}");
                assert_eq!(recovered.clean, *name == "closed_in_order", "{name}");
                // Not a byte of these blocks was ever written.
                assert!(
                    blocks.iter().all(|(slot, number)| !is_served(&engine, *slot, u64::from(*number))),
                    "{name}"
                );
                assert!(all_good(&write(&engine, &[(7, 7)])) && is_served(&engine, 7, 7), "{name}: goes on");
            }
            (Ok((_, recovered)), Refused(why)) => panic!("{name}: {recovered:?} instead of {why}"),
            (Err(error), Opens(..)) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn the_corpus_is_complete() {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|extension| extension == "kvbm"))
        .map(|file| file.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort_unstable();
    let mut named: Vec<_> = CORPUS.iter().map(|(name, _)| (*name).to_owned()).collect();
    named.sort_unstable();
    assert_eq!(files, named);
}

#[test]
fn looking_at_the_corpus_offline_believes_no_number() {
    for (name, expected) in CORPUS {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(folder().join(name).with_extension("kvbm"), dir.path().join(JOURNAL_FILE)).unwrap();
        std::fs::write(dir.path().join(SLOT_FILE), vec![0; SLOTS as usize * BLOCK]).unwrap();
        let quiet = &mut |_: u64, _: u64| ();
        match (offline::verify(&[dir.path().to_owned()], None, quiet), expected) {
            (Ok(found), Opens(blocks, _)) => {
                assert_eq!(found.inspection.blocks, blocks.len() as u64, "{name}");
                assert_eq!(
                    (found.verified, found.damaged.len()),
                    (0, blocks.len()),
                    "{name}: all bytes are zero"
                );
            }
            // Without a configuration to compare with, a header may have any size of blocks.
            (Ok(found), Refused("block_bytes")) => assert_eq!(found.verified, 0, "{name}"),
            (Err(error), Refused(why)) => assert!(error.to_string().contains(why), "{name}: {error}"),
            (Ok(found), Refused(why)) => panic!("{name}: {found:?} instead of {why}"),
            (Err(error), Opens(..)) => panic!("{name}: {error}"),
        }
    }
}
