//! Tenants, and what of a tier each may count on.

use kvbm_plan::NamespaceId;
use std::fmt;

/// A part of a tier, from 0 to 1, in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share(u32);

impl Share {
    const WHOLE: u32 = 1_000_000;

    /// None where `share` is not from 0 to 1.
    pub fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then(|| Self((share * f64::from(Self::WHOLE)).round() as u32))
    }

    /// From 0 to 1.
    pub fn get(self) -> f64 {
        f64::from(self.0) / f64::from(Self::WHOLE)
    }

    /// So much of `blocks`, rounded down.
    pub(crate) fn of(self, blocks: u32) -> u32 {
        (u64::from(blocks) * u64::from(self.0) / u64::from(Self::WHOLE)) as u32
    }

    /// What shares leave; none where they are more than there is.
    pub(crate) fn rest(shares: impl Iterator<Item = Self>) -> Option<Self> {
        let sum: u64 = shares.map(|share| u64::from(share.0)).sum();
        u64::from(Self::WHOLE).checked_sub(sum).map(|rest| Self(rest as u32))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// A tenant: its index in [`RegistryConfig::tenants`](crate::RegistryConfig::tenants).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u8);

/// A tenant with a share of every tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantConfig {
    /// The share.
    pub share: Share,
    /// Namespaces whose blocks are the tenant's; more come by
    /// [`Registry::assign`](crate::Registry::assign).
    pub namespaces: Vec<NamespaceId>,
}

/// What a tenant has on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// The tenant; none for the blocks of namespaces without a tenant, which share what the
    /// tenants' shares leave.
    pub tenant: Option<TenantId>,
    /// Its share.
    pub share: Share,
    /// The share in blocks.
    pub limit: u32,
    /// Slots with its blocks: on the tier, copies of these, on their way there, and removed while
    /// in use.
    pub blocks: u32,
    /// Slots in exclusive batches that were allocated for it.
    pub held: u32,
    /// Its blocks that were given up because their slot was needed.
    pub evicted: u64,
}

/// Tenants that cannot be as asked. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// No such tenant.
    #[error("there is no tenant {}: {tenants} are configured; configure it before the start", tenant.0)]
    Unknown {
        /// Asked for.
        tenant: TenantId,
        /// Tenants that there are.
        tenants: usize,
    },
    /// More was promised than there is.
    #[error("with a share of {share} for tenant {} all shares are more than 1: lower others first", tenant.0)]
    Shares {
        /// Whose share.
        tenant: TenantId,
        /// The share.
        share: Share,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_parts_of_a_whole() {
        for wrong in [-0.1, 1.000_001, f64::NAN, f64::INFINITY] {
            assert_eq!(Share::new(wrong), None, "{wrong}");
        }
        let share = |share| Share::new(share).unwrap();
        assert_eq!([0.0, 0.1, 0.5, 1.0].map(|part| share(part).of(1001)), [0, 100, 500, 1001]);
        assert_eq!(share(0.3).of(u32::MAX), 1_288_490_188);
        assert_eq!(share(0.25).to_string(), "0.25");
        assert_eq!(Share::rest([share(0.3), share(0.6)].into_iter()), Some(share(0.1)));
        assert_eq!(Share::rest([share(0.5), share(0.500_001)].into_iter()), None);
    }
}
