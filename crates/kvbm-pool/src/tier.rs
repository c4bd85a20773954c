//! Tier tags: zero-sized types over one core that does not know them.

use kvbm_plan::Tier;
use std::fmt;

/// Number of tiers whose slots have ids.
pub(crate) const TIERS: usize = Tier::SLOTTED.len();

mod sealed {
    pub trait Sealed {}
}

/// A tier that the type system can tell from another, so that a host block is never passed for a
/// device block.
pub trait TierTag: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The tier.
    const TIER: Tier;
}

macro_rules! tag {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name;
        impl sealed::Sealed for $name {}
        impl TierTag for $name {
            const TIER: Tier = Tier::$name;
        }
    };
}

tag!(
    /// Accelerator memory.
    G1
);
tag!(
    /// Host memory.
    G2
);
tag!(
    /// SSD.
    G3
);

/// A set of slotted tiers.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TierMask(u8);

impl TierMask {
    /// No tier.
    pub const NONE: Self = Self(0);
    /// G1, G2 and G3.
    pub const ALL: Self = Self(0b111);

    /// The set of `tier` alone; empty for G4, which has no slots.
    pub const fn only(tier: Tier) -> Self {
        Self((1 << tier.index()) & Self::ALL.0)
    }

    /// This set and `tier`.
    #[must_use]
    pub const fn with(self, tier: Tier) -> Self {
        Self(self.0 | Self::only(tier).0)
    }

    /// Whether `tier` is in the set.
    pub const fn contains(self, tier: Tier) -> bool {
        self.0 & Self::only(tier).0 != 0
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The tier nearest to the compute.
    pub fn nearest(self) -> Option<Tier> {
        self.iter().next()
    }

    /// The tiers, nearest first.
    pub fn iter(self) -> impl Iterator<Item = Tier> {
        Tier::SLOTTED.into_iter().filter(move |&tier| self.contains(tier))
    }
}

impl fmt::Debug for TierMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<Tier> for TierMask {
    fn from_iter<I: IntoIterator<Item = Tier>>(tiers: I) -> Self {
        tiers.into_iter().fold(Self::NONE, Self::with)
    }
}
