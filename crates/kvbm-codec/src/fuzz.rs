//! What must hold whatever a store gives back: the body of the fuzz target `frame`
//! (`cargo xtask fuzz`). It panics where it does not hold.

use crate::{Codec, Compressor, Element, Expander, FRAME_HEADER_BYTES, Lossy, LossyForm, lossy_frame};
use crc_fast::{CrcAlgorithm, checksum};

/// Longest content that is asked for.
const MOST: u64 = 1 << 16;

/// A frame opens to a content whose checksum it has, or does not open. What was opened comes back
/// from a frame of it. The first byte of the input says how the length is asked for; the rest is
/// the frame.
pub fn frame(input: &[u8]) {
    let Some((how, frame)) = input.split_first() else { return };
    let mut frame = frame.to_vec();
    let said =
        frame.get(8..16).map_or(0, |length| length.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)));
    let asked = if how.is_multiple_of(4) { u64::from(*how) * 16 } else { said.min(MOST) };
    if how % 4 == 1 && frame.len() >= FRAME_HEADER_BYTES {
        // Beyond the comparison of lengths.
        frame[8..16].copy_from_slice(&asked.to_le_bytes());
    }
    let mut content = vec![0; asked as usize];
    if let Some(form) = form_of(&frame) {
        lossy(form, &frame, &mut content);
        return;
    }
    if let Err(error) = Expander::default().open(&frame, &mut content) {
        assert!(!error.to_string().is_empty());
        return;
    }
    check_sum(&frame, &content);
    comes_back(&content, Some(u32::from(frame[1])));
    comes_back(&content, None);
}

fn check_sum(frame: &[u8], content: &[u8]) {
    let sum = checksum(CrcAlgorithm::Crc64Nvme, content).to_le_bytes();
    assert_eq!(frame[16..24], sum, "it has the sum of what comes back from it");
}

/// The lossy form that a frame says to be of.
fn form_of(frame: &[u8]) -> Option<LossyForm> {
    let [lossy, element, ..] = frame else { return None };
    let lossy = Lossy::ALL.into_iter().find(|known| *known as u8 == *lossy)?;
    let element = Element::ALL.into_iter().find(|known| *known as u8 == *element)?;
    Some(LossyForm { lossy, element })
}

/// A lossy frame does not open for who is exact. A frame of what was opened gives the same back.
fn lossy(form: LossyForm, frame: &[u8], content: &mut [u8]) {
    assert!(Expander::default().open(frame, content).is_err(), "it is lossy");
    if let Err(error) = Expander::default().open_lossy(form, frame, content) {
        assert!(!error.to_string().is_empty());
        return;
    }
    check_sum(frame, content);
    for codec in Codec::ALL {
        let mut packer = Compressor::new(codec).ok();
        let Some(frame) = lossy_frame(form, content, packer.as_mut()) else { continue };
        let mut opened = vec![0; content.len()];
        assert_eq!(Expander::default().open_lossy(form, &frame, &mut opened), Ok(()), "{codec}");
        assert!(opened == content, "{form:?} {codec}");
    }
}

fn comes_back(content: &[u8], width: Option<u32>) {
    for codec in Codec::ALL {
        let Ok(mut compressor) = Compressor::new(codec) else { continue };
        let Some(frame) = compressor.frame(content, width) else { continue };
        let mut opened = vec![0; content.len()];
        assert_eq!(Expander::default().open(&frame, &mut opened), Ok(()), "{codec}");
        assert!(opened == content && frame.len() < content.len(), "{codec}");
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds() {
        assert!(corpus::run("frame", &[], frame) > 0);
    }
}
