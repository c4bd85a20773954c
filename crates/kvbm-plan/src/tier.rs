//! The four memory tiers.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A memory tier. Order is by distance from the compute: `G1 < G2 < G3 < G4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Tier {
    /// Accelerator memory (HBM).
    G1 = 0,
    /// Host memory, page-locked where a device needs it.
    G2 = 1,
    /// SSD, local or mounted.
    G3 = 2,
    /// Blob store, opaque to us.
    G4 = 3,
}

impl Tier {
    /// Every tier, nearest first.
    pub const ALL: [Self; 4] = [Self::G1, Self::G2, Self::G3, Self::G4];

    /// The tiers whose slots the registry tracks by block id, nearest first. G4 is addressed by
    /// hash.
    pub const SLOTTED: [Self; 3] = [Self::G1, Self::G2, Self::G3];

    /// 0 for G1 up to 3 for G4.
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Lower-case name as used in metrics, JSON and on the command line: `g1`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::G1 => "g1",
            Self::G2 => "g2",
            Self::G3 => "g3",
            Self::G4 => "g4",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::G1 => "G1",
            Self::G2 => "G2",
            Self::G3 => "G3",
            Self::G4 => "G4",
        })
    }
}

/// A tier name that is none of `g1`, `g2`, `g3`, `g4`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a tier: expected g1, g2, g3 or g4")]
pub struct UnknownTier(String);

impl FromStr for Tier {
    type Err = UnknownTier;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|tier| tier.as_str().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownTier(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_order_is_by_distance() {
        for (index, tier) in Tier::ALL.into_iter().enumerate() {
            assert_eq!(tier.as_str().parse::<Tier>(), Ok(tier));
            assert_eq!(tier.to_string().parse::<Tier>(), Ok(tier));
            assert_eq!(tier.index(), index);
        }
        assert!(Tier::G1 < Tier::G4);
        let error = "g5".parse::<Tier>().unwrap_err();
        assert!(error.to_string().contains("'g5'"));
    }
}
