//! Checked byte arithmetic: every size in this crate is computed here, so that a hostile shape is
//! an error and never an overflow.

use crate::layout::LayoutError;

/// Largest region and largest total this crate describes: what a signed 64-bit file offset can
/// address.
pub(crate) const MAX_BYTES: u64 = i64::MAX as u64;

/// The product of `factors`, if it is at most [`MAX_BYTES`].
pub(crate) fn product(what: &'static str, factors: &[u64]) -> Result<u64, LayoutError> {
    factors
        .iter()
        .try_fold(1_u64, |acc, &factor| acc.checked_mul(factor))
        .filter(|&bytes| bytes <= MAX_BYTES)
        .ok_or(LayoutError::TooLarge { what })
}

/// The sum of `terms`, if it is at most [`MAX_BYTES`].
pub(crate) fn sum(what: &'static str, terms: &[u64]) -> Result<u64, LayoutError> {
    terms
        .iter()
        .try_fold(0_u64, |acc, &term| acc.checked_add(term))
        .filter(|&bytes| bytes <= MAX_BYTES)
        .ok_or(LayoutError::TooLarge { what })
}

/// `bytes` rounded up to a multiple of `alignment`, which is a power of two.
pub(crate) fn align_up(what: &'static str, bytes: u64, alignment: u64) -> Result<u64, LayoutError> {
    debug_assert!(alignment.is_power_of_two());
    let mask = alignment - 1;
    Ok(sum(what, &[bytes, mask])? & !mask)
}
