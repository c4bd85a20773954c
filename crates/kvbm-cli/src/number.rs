//! Whole numbers on the command line. The error of a bad one names the good ones.

use std::ops::RangeInclusive;

/// A parser of the whole numbers of `range`, which a `T` can be.
pub(crate) fn whole<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            format!("give a whole number from {least} to {most}, without units")
        })
    }
}

/// Every `u32` but 0.
pub(crate) const SOME: RangeInclusive<u64> = 1..=u32::MAX as u64;
/// Every `u32`.
pub(crate) const ANY: RangeInclusive<u64> = 0..=u32::MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_wrong_number_names_the_valid_range() {
        let parse = whole::<u32>(1..=20);
        assert_eq!((parse("1"), parse("20")), (Ok(1), Ok(20)));
        for text in ["0", "21", "-1", "x", "", "1.5", "5KiB", "99999999999999999999"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error, "give a whole number from 1 to 20, without units", "{text}");
        }
        assert!(whole::<u32>(0..=u64::MAX)("4294967296").is_err(), "no u32");
        assert_eq!(whole::<u64>(0..=u64::MAX)("18446744073709551615"), Ok(u64::MAX));
    }
}
