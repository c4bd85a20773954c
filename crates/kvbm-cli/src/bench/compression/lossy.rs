//! What is lost: the ways of `volumes.lossy`, and how far what comes back is from what was there.

use anyhow::Result;
use kvbm::layout::DType;
use kvbm_codec::{Codec, Compressor, Element, LOSSY_PIECE, Lossy, LossyForm};
use serde::Serialize;

use super::Way;

/// How far what comes back is from what was there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Errors {
    /// Sum of all differences, by the sum of all magnitudes.
    pub mean_error: f64,
    /// The largest difference, by the largest magnitude of the 32 numbers that it is among.
    pub largest_error: f64,
}

/// Each kind of code, alone and with Zstandard behind it; none for elements that have no lossy
/// form.
pub(super) fn ways(dtype: DType) -> Result<Vec<(String, Way)>> {
    let element = match dtype {
        DType::BF16 => Element::Bf16,
        DType::F16 => Element::F16,
        DType::F32 => Element::F32,
        _ => return Ok(Vec::new()),
    };
    let mut ways = Vec::new();
    for lossy in Lossy::ALL {
        let form = LossyForm { lossy, element };
        ways.push((lossy.to_string(), Way::Lossy(form, None)));
        let packer = Compressor::new(Codec::Zstd)?;
        ways.push((format!("{lossy}, zstd 1"), Way::Lossy(form, Some(packer))));
    }
    Ok(ways)
}

/// Sums over blocks.
#[derive(Debug, Default)]
pub(super) struct Sums {
    differences: f64,
    magnitudes: f64,
    largest: f64,
}

impl Sums {
    pub(super) fn add(&mut self, element: Element, before: &[u8], after: &[u8]) {
        let bytes = LOSSY_PIECE * element.width();
        for (before, after) in before.chunks(bytes).zip(after.chunks(bytes)) {
            let (mut most, mut largest) = (0.0_f64, 0.0_f64);
            for (before, after) in before.chunks(element.width()).zip(after.chunks(element.width())) {
                let [before, after] = [before, after].map(|bytes| f64::from(element.number(bytes)));
                let difference = (before - after).abs();
                self.differences += difference;
                self.magnitudes += before.abs();
                (most, largest) = (most.max(before.abs()), largest.max(difference));
            }
            if most > 0.0 {
                self.largest = self.largest.max(largest / most);
            }
        }
    }

    pub(super) fn errors(&self) -> Errors {
        let mean_error = if self.magnitudes > 0.0 { self.differences / self.magnitudes } else { 0.0 };
        Errors { mean_error, largest_error: self.largest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_of_numbers() {
        for (element, one, half) in [
            (Element::Bf16, &[0x80, 0x3f][..], &[0, 0x3f][..]),
            (Element::F16, &[0, 0x3c], &[0, 0x38]),
            (Element::F32, &[0, 0, 0x80, 0x3f], &[0, 0, 0, 0x3f]),
        ] {
            assert_eq!((element.number(one), element.number(half)), (1.0, 0.5), "{element:?}");
            let mut sums = Sums::default();
            sums.add(element, &[one, half].concat(), &[one, one].concat());
            assert_eq!(sums.errors(), Errors { mean_error: 0.5 / 1.5, largest_error: 0.5 });
        }
        assert_eq!(Element::F16.number(&[1, 0x80]).to_bits(), (-(2_f32.powi(-24))).to_bits());
    }
}
