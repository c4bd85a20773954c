//! The journal: how long it gets, and what is found where it is damaged.

use super::{HEADER, RECORD};
use crate::support::*;
use kvbm_disk::DiskEngine;
use kvbm_disk::fault::{JOURNAL_FILE, SLOT_FILE, SimMedium};
use kvbm_disk::medium::{Medium, OpenFile};
use kvbm_plan::BlockId;
use proptest::prelude::*;
use std::sync::Arc;

#[test]
fn a_torn_tail_is_cut_and_a_damaged_middle_skipped() {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(8), &medium);
    for number in 0..4 {
        assert!(all_good(&write(&engine, &[(number as u32, number)])));
        engine.flush(PATIENCE).unwrap();
    }
    drop(engine);
    medium.edit(JOURNAL_FILE, |bytes| {
        bytes[HEADER + RECORD + 20] ^= 1;
        bytes.truncate(HEADER + 4 * RECORD - 1);
    });
    let (engine, recovered) = open(lazy_config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0), (2, 2)]);
    assert_eq!(
        (recovered.dropped.damaged_records, recovered.dropped.torn_tail_bytes),
        (1, RECORD as u64 - 1)
    );
    // What is appended now stands where the torn record stood.
    assert!(all_good(&write(&engine, &[(5, 5)])));
    drop(engine);
    let (_, recovered) = open(lazy_config(8), &medium);
    assert_eq!(recovered_numbers(&recovered), [(0, 0), (2, 2), (5, 5)]);
    assert_eq!(recovered.dropped.torn_tail_bytes, 0);
}

#[test]
fn compaction_keeps_the_state_and_bounds_the_journal() {
    let medium = SimMedium::new();
    let mut config = lazy_config(4);
    config.compact_slack_records = 3;
    let (engine, _) = open(config.clone(), &medium);
    for number in 0..40 {
        assert!(all_good(&write(&engine, &[((number % 3) as u32, number)])));
        if number == 30 {
            engine.quarantine(&[BlockId(3)]);
        }
        engine.flush(PATIENCE).unwrap();
        assert!(medium.bytes(JOURNAL_FILE).len() <= HEADER + (4 + 3) * RECORD);
    }
    assert!(engine.stats().compactions >= 3);
    drop(engine);
    let (_, recovered) = open(config, &medium);
    assert_eq!(recovered_numbers(&recovered), [(1, 37), (2, 38), (0, 39)]);
    assert_eq!(recovered.quarantined, [BlockId(3)]);
}

#[test]
fn an_entry_takes_less_than_a_hundred_bytes_however_often_it_was_replaced() {
    const SLOTS: u32 = 500;
    let medium = SimMedium::new();
    let mut config = lazy_config(SLOTS);
    config.compact_slack_records = 10;
    config.queue_depth = SLOTS as usize;
    let (engine, _) = open(config, &medium);
    for round in 0..6 {
        for part in 0..10 {
            let slots = (part * 50..(part + 1) * 50).map(|slot| (slot, u64::from(slot + round * SLOTS)));
            assert!(all_good(&write(&engine, &slots.collect::<Vec<_>>())));
            engine.flush(PATIENCE).unwrap();
            if round > 0 {
                let entries = medium.bytes(JOURNAL_FILE).len() - HEADER;
                assert!(entries <= 100 * SLOTS as usize, "{} bytes an entry", entries / SLOTS as usize);
            }
        }
    }
    assert!((5..=50).contains(&engine.stats().compactions), "{}", engine.stats().compactions);
}

/// A journal with every kind of record, from an engine.
fn journal() -> Vec<u8> {
    let medium = SimMedium::new();
    let (engine, _) = open(lazy_config(8), &medium);
    for number in 0..6 {
        assert!(all_good(&write(&engine, &[(number as u32, number)])));
        engine.flush(PATIENCE).unwrap();
    }
    engine.release(&[BlockId(0)]);
    engine.quarantine(&[BlockId(1)]);
    drop(engine);
    medium.bytes(JOURNAL_FILE)
}

#[derive(Clone, Debug)]
enum Harm {
    Flip(usize),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Zero(usize, usize),
    Repeat(usize, usize),
}

fn harm() -> impl Strategy<Value = Harm> {
    let at = || prop_oneof![0_usize..200, HEADER - 16..HEADER + 10 * RECORD];
    prop_oneof![
        (0_usize..(HEADER + 10 * RECORD) * 8).prop_map(Harm::Flip),
        at().prop_map(Harm::Cut),
        (at(), proptest::collection::vec(any::<u8>(), 0..200))
            .prop_map(|(at, bytes)| Harm::Insert(at, bytes)),
        (at(), 0_usize..300).prop_map(|(at, len)| Harm::Zero(at, len)),
        (at(), 0_usize..300).prop_map(|(at, len)| Harm::Repeat(at, len)),
    ]
}

fn do_harm(bytes: &mut Vec<u8>, harm: &Harm) {
    let range = |at: usize, len: usize| at.min(bytes.len())..(at + len).min(bytes.len());
    match harm {
        Harm::Flip(bit) => {
            if let Some(byte) = bytes.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
        }
        Harm::Cut(at) => bytes.truncate(*at),
        Harm::Insert(at, extra) => drop(bytes.splice(range(*at, 0), extra.iter().copied())),
        Harm::Zero(at, len) => {
            let range = range(*at, *len);
            bytes[range].fill(0);
        }
        Harm::Repeat(at, len) => bytes.extend_from_within(range(*at, *len)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Hostile bytes for a journal: no panic, and only blocks that were written come back.
    #[test]
    fn harmed_journals_never_panic_and_never_invent_blocks(harms in proptest::collection::vec(harm(), 1..6)) {
        static JOURNAL: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let mut bytes = JOURNAL.get_or_init(journal).clone();
        for harm in &harms {
            do_harm(&mut bytes, harm);
        }
        let medium = SimMedium::new();
        medium.edit(JOURNAL_FILE, |file| *file = bytes);
        if let Ok((engine, recovered)) = DiskEngine::open_on(lazy_config(8), Arc::new(medium)) {
            for block in &recovered.blocks {
                prop_assert_eq!(block.identity, identity(u64::from(block.slot.0)));
                prop_assert!(!is_served(&engine, block.slot.0, u64::from(block.slot.0)), "an empty slot file");
            }
        }
    }

    /// Arbitrary files are refused.
    #[test]
    fn garbage_is_no_journal(bytes in proptest::collection::vec(any::<u8>(), 0..6000)) {
        let medium = SimMedium::new();
        medium.edit(JOURNAL_FILE, |file| file.clone_from(&bytes));
        prop_assert!(DiskEngine::open_on(lazy_config(8), Arc::new(medium.clone())).is_err());
        prop_assert_eq!(medium.bytes(JOURNAL_FILE), bytes);
        prop_assert!(medium.open(SLOT_FILE, OpenFile::default()).is_err());
    }
}
