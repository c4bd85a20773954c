//! What is lost: the ways of `volumes.lossy`, and how far what comes back is from what was there.

use anyhow::Result;
use kvbm::layout::DType;
use kvbm_codec::{Codec, Compressor, Element, Lossy, LossyForm};
use serde::Serialize;

use super::Way;

/// Numbers whose largest one an error is compared with: those that share a scale.
const PIECE: usize = 32;

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
        let bytes = PIECE * element.width();
        for (before, after) in before.chunks(bytes).zip(after.chunks(bytes)) {
            let (mut most, mut largest) = (0.0_f64, 0.0_f64);
            for (before, after) in before.chunks(element.width()).zip(after.chunks(element.width())) {
                let (before, after) = (number(element, before), number(element, after));
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

/// A finite number.
fn number(element: Element, bytes: &[u8]) -> f64 {
    let bits = bytes.iter().rev().fold(0, |bits: u32, byte| bits << 8 | u32::from(*byte));
    match element {
        Element::F32 => f32::from_bits(bits).into(),
        Element::Bf16 => f32::from_bits(bits << 16).into(),
        Element::F16 => {
            let (exponent, mantissa) = ((bits >> 10 & 31).cast_signed(), f64::from(bits & 0x3ff));
            // Those of the least exponent have no leading one.
            let leading = if exponent == 0 { 0.0 } else { 1024.0 };
            let magnitude = (leading + mantissa) * 2_f64.powi(exponent.max(1) - 25);
            if bits & 0x8000 == 0 { magnitude } else { -magnitude }
        }
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
            assert_eq!((number(element, one), number(element, half)), (1.0, 0.5), "{element:?}");
            let mut sums = Sums::default();
            sums.add(element, &[one, half].concat(), &[one, one].concat());
            assert_eq!(sums.errors(), Errors { mean_error: 0.5 / 1.5, largest_error: 0.5 });
        }
        assert_eq!(number(Element::F16, &[1, 0x80]).to_bits(), (-(2_f64.powi(-24))).to_bits());
    }
}
