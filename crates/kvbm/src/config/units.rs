//! Amounts of memory as people write them: `8GiB`, `64KiB`, `16000 blocks`.

use std::fmt;
use std::str::FromStr;

/// Units in the order in which they are tried: longer suffixes first, so that `KiB` is not read as
/// `B`.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

/// An amount of memory in bytes.
///
/// Text form: a number with a unit, binary (`KiB`, `MiB`, `GiB`, `TiB`) or decimal (`kB`, `MB`,
/// `GB`, `TB`); a number alone is bytes.
///
/// ```
/// # use kvbm::config::Bytes;
/// assert_eq!("64KiB".parse(), Ok(Bytes::kib(64)));
/// assert_eq!("1.5 GiB".parse(), Ok(Bytes::mib(1536)));
/// assert_eq!(Bytes::mib(1536).to_string(), "1536MiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` KiB (1024 bytes each); saturates at `u64::MAX` bytes, as the other units do.
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// `n` TiB.
    pub const fn tib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 40))
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The shortest exact form with a binary unit: `8GiB`, `1536MiB`, `100B`. It parses back to the
/// same amount.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, size) = UNITS[..4]
            .iter()
            .rev()
            .find(|(_, size)| self.0 != 0 && self.0.is_multiple_of(*size))
            .unwrap_or(&("B", 1));
        f.pad(&format!("{}{unit}", self.0 / size))
    }
}

/// Text that is no amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a size: {reason}; write it like 64KiB, 512MiB or 8GiB")]
pub struct ParseBytesError {
    /// What was given, cut to 64 characters.
    pub text: String,
    reason: &'static str,
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_bytes(text.trim())
            .map(Self)
            .map_err(|reason| ParseBytesError { text: text.chars().take(64).collect(), reason })
    }
}

fn parse_bytes(text: &str) -> Result<u64, &'static str> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '_'))).unwrap_or(text.len());
    let (number, unit) = (text[..end].replace('_', ""), text[end..].trim());
    let size = match unit {
        "" => 1,
        unit => UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, size)| *size)
            .ok_or("the unit is none of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB")?,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() || (number.contains('.') && fraction.is_empty()) {
        return Err("it has no number before the unit");
    }
    if fraction.len() > 12 || fraction.contains('.') {
        return Err("the number has too many decimal places");
    }
    let whole: u64 = whole.parse().map_err(|_| "the number is too large")?;
    let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| "not a number")? };
    // A number of twenty digits with twelve decimal places is beyond 128 bits.
    let scaled =
        (u128::from(whole) * scale + part).checked_mul(size.into()).ok_or("the number is too large")?;
    if !scaled.is_multiple_of(scale) {
        return Err("it is not a whole number of bytes");
    }
    u64::try_from(scaled / scale).map_err(|_| "the number is too large")
}

/// A number of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Blocks(pub u32);

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{} blocks", self.0))
    }
}

/// How much a tier holds: so many blocks, or as many as fit into so many bytes. Nothing means that
/// there is no such tier.
///
/// Text form: a number alone (or with `blocks`) counts blocks; a number with a unit is an amount of
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Capacity {
    /// So many blocks.
    Blocks(Blocks),
    /// As many blocks as fit, on each rank.
    Bytes(Bytes),
}

impl Capacity {
    /// No such tier.
    pub const NONE: Self = Self::Blocks(Blocks(0));

    /// Whether there is no such tier.
    pub const fn is_none(self) -> bool {
        matches!(self, Self::Blocks(Blocks(0)) | Self::Bytes(Bytes(0)))
    }

    /// Blocks of `bytes_per_block` bytes that this holds; 0 if blocks have no bytes.
    pub const fn blocks(self, bytes_per_block: u64) -> u64 {
        match self {
            Self::Blocks(Blocks(blocks)) => blocks as u64,
            Self::Bytes(Bytes(bytes)) => match bytes.checked_div(bytes_per_block) {
                Some(blocks) => blocks,
                None => 0,
            },
        }
    }
}

impl Default for Capacity {
    fn default() -> Self {
        Self::NONE
    }
}

impl From<Blocks> for Capacity {
    fn from(blocks: Blocks) -> Self {
        Self::Blocks(blocks)
    }
}

impl From<Bytes> for Capacity {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(blocks) => blocks.fmt(f),
            Self::Bytes(bytes) => bytes.fmt(f),
        }
    }
}

/// Text that is no capacity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a capacity: write blocks like 16000 (at most {}) or memory like 8GiB", u32::MAX)]
pub struct ParseCapacityError {
    /// What was given, cut to 64 characters.
    pub text: String,
}

impl FromStr for Capacity {
    type Err = ParseCapacityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let blocks = trimmed.strip_suffix("blocks").unwrap_or(trimmed).trim_end().replace('_', "");
        if !blocks.is_empty() && blocks.bytes().all(|byte| byte.is_ascii_digit()) {
            if let Ok(blocks) = blocks.parse() {
                return Ok(Self::Blocks(Blocks(blocks)));
            }
        } else if let Ok(bytes) = trimmed.parse() {
            return Ok(Self::Bytes(bytes));
        }
        Err(ParseCapacityError { text: text.chars().take(64).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_with_units_and_fractions() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 65_536),
            (" 64 kib ", 65_536),
            ("1.5GiB", 3 << 29),
            ("2TB", 2_000_000_000_000),
            ("1_000B", 1000),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in [
            "",
            "GiB",
            "8G",
            "8 gigs",
            "-1",
            "1.3B",
            "1..2KiB",
            "1.",
            ".",
            "99999999TiB",
            "18446744073709551615.5TiB",
            "18446744073709551615.000000000001TiB",
            "٣KiB",
        ] {
            let error = text.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains("64KiB"), "{text}: {error}");
        }
    }

    #[test]
    fn capacities_are_blocks_without_a_unit_and_bytes_with_one() {
        assert_eq!("16000".parse(), Ok(Capacity::Blocks(Blocks(16_000))));
        assert_eq!("16_000 blocks".parse(), Ok(Capacity::Blocks(Blocks(16_000))));
        assert_eq!("1GiB".parse(), Ok(Capacity::Bytes(Bytes::gib(1))));
        assert!("99999999999".parse::<Capacity>().is_err());
        assert!("blocks".parse::<Capacity>().is_err());
        assert_eq!(Capacity::from(Bytes::mib(1)).blocks(300_000), 3);
        assert_eq!(Capacity::from(Bytes::mib(1)).blocks(0), 0);
        assert_eq!(Capacity::from(Blocks(7)).blocks(300_000), 7);
        assert!(Capacity::default().is_none());
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(bytes: u64, blocks: u32) {
            prop_assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
            let capacity = Capacity::Blocks(Blocks(blocks));
            prop_assert_eq!(capacity.to_string().parse(), Ok(capacity));
        }

        #[test]
        fn any_text_is_answered(text in ".{0,80}") {
            prop_assert!(text.parse::<Bytes>().err().is_none_or(|error| error.to_string().contains("64KiB")));
            prop_assert!(text.parse::<Capacity>().err().is_none_or(|error| error.to_string().contains("8GiB")));
        }
    }
}
