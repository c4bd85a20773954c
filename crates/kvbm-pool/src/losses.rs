//! Tiers that lost what they held: nothing that was given out before becomes visible afterwards.

use kvbm_plan::Tier;

/// How many losses there had been when something was given out
/// ([`Registry::losses`](crate::Registry::losses)). With it a caller asks later whether a tier
/// lost what it held since ([`Registry::is_lost`](crate::Registry::is_lost)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Losses(pub(crate) u32);

/// Blocks that were given out before their tier lost what it held
/// ([`Registry::lose`](crate::Registry::lose)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{tier} has lost what it held since these blocks were given out (the memory of a worker with a part of them is gone): drop them, \
     and compute them again in new ones"
)]
pub struct Lost {
    /// The tier.
    pub tier: Tier,
}
