//! What a registry is made of.

use crate::share::{Share, TenantConfig};
use crate::tier::TIERS;
use kvbm_plan::{Epoch, GroupKind, NamespaceId, Tier};

/// One cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// How the group's blocks are used.
    pub kind: GroupKind,
    /// Tokens in one block of the group: how many blocks a sliding window spans.
    pub tokens_per_block: u32,
}

impl GroupConfig {
    /// A full attention group.
    pub const fn full(tokens_per_block: u32) -> Self {
        Self { kind: GroupKind::Full, tokens_per_block }
    }

    /// Blocks at the end of a prefix that the group needs; `None` for all of them.
    pub const fn blocks_needed(self) -> Option<usize> {
        match self.kind {
            GroupKind::Full => None,
            GroupKind::SlidingWindow(tokens) => Some(tokens.div_ceil(self.tokens_per_block) as usize),
            GroupKind::State => Some(1),
        }
    }
}

/// Which unpinned block leaves a full tier first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyKind {
    /// The least recently used block that no other block on the tier continues.
    #[default]
    LruLeaf,
    /// Learns which blocks are used again and evicts the least likely ([`Hazard`](crate::Hazard)).
    Hazard,
}

/// What [`Registry::new`](crate::Registry::new) builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Slots of G1, G2 and G3; 0 where there is no such tier.
    pub capacity: [u32; TIERS],
    /// Cache groups, indexed by [`GroupId`](kvbm_plan::GroupId).
    pub groups: Vec<GroupConfig>,
    /// Events that wait for [`drain_events`](crate::Registry::drain_events) before the oldest are
    /// given up (and counted), rounded up to a power of two; 0 turns events off. Where so many
    /// waited once, the memory for as many stays: 48 bytes each.
    pub event_capacity: u32,
    /// Eviction policy of every tier.
    pub policy: PolicyKind,
    /// Seed of the policies that draw samples: the same seed and the same calls give the same
    /// victims.
    pub policy_seed: u64,
    /// Life of the leader, quoted with events.
    pub epoch: Epoch,
    /// Tenants with shares of the tiers, by [`TenantId`](crate::TenantId). Blocks of namespaces
    /// without a tenant have what the shares leave. Empty: all blocks compete for all slots.
    pub tenants: Vec<TenantConfig>,
}

impl RegistryConfig {
    /// Most slots of one tier: reference counts and the policy's lists have room for no more.
    pub const MAX_CAPACITY: u32 = (1 << 28) - 1;

    /// Most blocks evicted in one hold of the lock: a longer call lets others in between.
    pub const MOST_EVICTED_AT_ONCE: usize = 32;

    /// Longest time to live ([`Registry::set_ttl`](crate::Registry::set_ttl)), in iterations.
    pub const MAX_TTL: u64 = 1 << 15;
    /// The same in seconds ([`Registry::set_ttl_time`](crate::Registry::set_ttl_time)): a year.
    pub const MAX_TTL_SECONDS: u64 = 365 * 86_400;

    /// Most tenants with shares.
    pub const MAX_TENANTS: usize = 63;

    /// Most cache groups.
    pub const MAX_GROUPS: usize = 256;

    /// Most blocks of a tier of `capacity` slots that [`Registry::pin`](crate::Registry::pin) keeps
    /// at a time: half of them, so that pins leave room to work in.
    pub const fn most_pinned(capacity: u32) -> u32 {
        capacity / 2
    }

    /// One full attention group of 16-token blocks, 64 Ki waiting events, `lru-leaf`, epoch 0.
    pub fn new(capacity: [u32; TIERS]) -> Self {
        Self {
            capacity,
            groups: vec![GroupConfig::full(16)],
            event_capacity: 1 << 16,
            policy: PolicyKind::LruLeaf,
            policy_seed: 0,
            epoch: Epoch(0),
            tenants: Vec::new(),
        }
    }

    /// Says what is wrong, if anything is.
    ///
    /// # Errors
    /// The first field that a registry cannot be built with, its value, and what is allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (tier, capacity) in Tier::SLOTTED.into_iter().zip(self.capacity) {
            if capacity > Self::MAX_CAPACITY {
                return Err(ConfigError::Capacity { tier, capacity });
            }
        }
        if self.capacity.iter().all(|&capacity| capacity == 0) {
            return Err(ConfigError::NoTier);
        }
        if self.event_capacity > Self::MAX_CAPACITY {
            return Err(ConfigError::Events { event_capacity: self.event_capacity });
        }
        if self.groups.is_empty() || self.groups.len() > Self::MAX_GROUPS {
            return Err(ConfigError::Groups { groups: self.groups.len() });
        }
        for (group, config) in self.groups.iter().enumerate() {
            let empty_window = matches!(config.kind, GroupKind::SlidingWindow(0));
            if config.tokens_per_block == 0 || empty_window {
                return Err(ConfigError::Group { group, config: *config });
            }
        }
        self.check_tenants()
    }

    fn check_tenants(&self) -> Result<(), ConfigError> {
        let tenants = &self.tenants;
        if tenants.len() > Self::MAX_TENANTS {
            return Err(ConfigError::Tenants { tenants: tenants.len() });
        }
        if Share::rest(tenants.iter().map(|tenant| tenant.share)).is_none() {
            return Err(ConfigError::Shares);
        }
        let mut all: Vec<NamespaceId> = tenants.iter().flat_map(|tenant| tenant.namespaces.clone()).collect();
        all.sort_unstable();
        match all.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ConfigError::TwoTenants { namespace: pair[0] }),
            None => Ok(()),
        }
    }
}

/// A registry that cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Too many slots.
    #[error("{tier} has {capacity} blocks, more than {}: use larger blocks", RegistryConfig::MAX_CAPACITY)]
    Capacity {
        /// Which tier.
        tier: Tier,
        /// Slots asked for.
        capacity: u32,
    },
    /// Nowhere to put a block.
    #[error("no tier has a block: give G1, G2 or G3 a capacity above 0")]
    NoTier,
    /// Too long an event ring.
    #[error(
        "event_capacity is {event_capacity}, more than {}: drain events more often instead",
        RegistryConfig::MAX_CAPACITY
    )]
    Events {
        /// Events asked for.
        event_capacity: u32,
    },
    /// No group or too many.
    #[error("{groups} cache groups: give 1 to {}", RegistryConfig::MAX_GROUPS)]
    Groups {
        /// Groups given.
        groups: usize,
    },
    /// A group with a zero in it.
    #[error("group {group} is {config:?}: tokens_per_block and the window must be at least 1")]
    Group {
        /// Index of the group.
        group: usize,
        /// As given.
        config: GroupConfig,
    },
    /// Too many tenants.
    #[error("{tenants} tenants: give at most {}", RegistryConfig::MAX_TENANTS)]
    Tenants {
        /// Tenants given.
        tenants: usize,
    },
    /// More was promised than there is.
    #[error("the tenants' shares are more than 1 together: lower some")]
    Shares,
    /// A namespace of two tenants.
    #[error("namespace {namespace:?} is named twice among the tenants: a namespace belongs to one")]
    TwoTenants {
        /// The namespace.
        namespace: NamespaceId,
    },
}
