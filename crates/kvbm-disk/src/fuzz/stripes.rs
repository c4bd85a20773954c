//! The marks of directories that belong together.

use super::input::Input;
use crate::checksum::crc64;
use crate::fault::SimMedium;
use crate::journal::JOURNAL_FILE;
use crate::stripes::{STRIPE_FILE, join, name_in};

/// Directories with these marks are a set, or are refused and left as they are. The input says how
/// many. Of each it has one byte (bit 0: it has a mark; bit 1: it has a journal) and the 24 bytes
/// of its mark before the checksum. The checksum is what the byte's other bits make of it.
pub fn stripes(input: &[u8]) {
    let mut input = Input(input);
    let count = 1 + usize::from(input.byte() % 4);
    let medium = SimMedium::new();
    for member in 0..count {
        let how = input.byte();
        if how & 1 != 0 {
            let mut mark = input.take::<24>().to_vec();
            mark.extend_from_slice(&(crc64(&mark) ^ u64::from(how >> 2)).to_le_bytes());
            medium.edit(&name_in(member, STRIPE_FILE), |bytes| *bytes = mark);
        }
        if how & 2 != 0 {
            medium.edit(&name_in(member, JOURNAL_FILE), |bytes| bytes.push(0));
        }
    }
    let names: Vec<String> = (0..count).map(|member| format!("dir {member}")).collect();
    let before = marks(&medium, count);
    match join(&medium, &names) {
        Err(error) => {
            assert!(error.to_string().contains("dir "), "the directory is named: {error}");
            assert_eq!(marks(&medium, count), before, "what is refused is left alone");
        }
        Ok(()) => is_a_set(&medium, &names, &before),
    }
}

fn marks(medium: &SimMedium, count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|member| medium.bytes(&name_in(member, STRIPE_FILE))).collect()
}

fn is_a_set(medium: &SimMedium, names: &[String], before: &[Vec<u8>]) {
    let after = marks(medium, names.len());
    let kept = before.iter().zip(&after).all(|(before, after)| before.is_empty() || before == after);
    assert!(kept, "a mark that was there stays");
    assert!(
        join(medium, names).is_ok() && marks(medium, names.len()) == after,
        "a set is one the next time too"
    );
    if names.len() < 2 {
        return;
    }
    assert!(join(medium, &names[1..]).is_err(), "a part of a set is none");
    let swapped = SimMedium::new();
    for (member, mark) in after.iter().rev().enumerate() {
        swapped.edit(&name_in(member, STRIPE_FILE), |bytes| bytes.clone_from(mark));
    }
    assert!(join(&swapped, names).is_err(), "neither is one in another order");
}
