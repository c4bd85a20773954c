//! Tenants of a manager by their names: each has a share of every tier, and a namespace of its own.

use crate::metrics::{Metrics, NO_TENANT};
use kvbm_plan::{NamespaceId, Tier};
use kvbm_pool::{AllocError, Registry, Share, TenantConfig, TenantId};
use kvbm_tokens::Namespace;

/// A tenant, or a share, that cannot be. Nothing changed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TenantError {
    /// Nobody configured it.
    #[error("there is no tenant '{name}': {known}; add it to tenants.shares and start again")]
    Unknown {
        /// Asked for.
        name: String,
        /// Who there is, in words.
        known: String,
    },
    /// Not a part of a tier.
    #[error("a share of {share} for tenant '{name}': give a number from 0 to 1")]
    Share {
        /// Whose share.
        name: String,
        /// The share.
        share: f64,
    },
    /// More was promised than there is.
    #[error("with a share of {share} for tenant '{name}' all shares are more than 1: lower others first")]
    Shares {
        /// Whose share.
        name: String,
        /// The share.
        share: f64,
    },
}

/// What a tenant has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantStatus {
    /// Its name; none for the blocks of all others, which have what the tenants' shares leave.
    pub name: Option<String>,
    /// Its share of every tier.
    pub share: Share,
    /// On G1 (where it is ours), G2 and G3.
    pub tiers: [TenantOnTier; 3],
}

/// What a tenant has on a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantOnTier {
    /// The share in blocks.
    pub limit: u32,
    /// Its blocks that are there, and on their way.
    pub blocks: u32,
    /// Slots that are held for blocks of its that are not registered yet.
    pub held: u32,
    /// Its blocks that left because their slot was needed.
    pub evicted: u64,
    /// Blocks that its requests asked for and were refused, because it was over its share with
    /// them.
    pub refused: u64,
}

/// The tenants of a leader.
pub(crate) struct Tenants {
    registry: Registry,
    metrics: Metrics,
    /// By [`TenantId`].
    names: Vec<String>,
}

/// The tenants of a configuration that was checked, whose namespaces are parts of `namespace`: for
/// the registry, and their names.
pub(crate) fn of_shares(shares: &[(String, f64)], namespace: &Namespace) -> (Vec<TenantConfig>, Vec<String>) {
    let tenant = |(name, share): &(String, f64)| TenantConfig {
        share: Share::new(*share).unwrap_or_default(),
        namespaces: vec![NamespaceId::from(namespace.clone().tenant(name).tag())],
    };
    (shares.iter().map(tenant).collect(), shares.iter().map(|(name, _)| name.clone()).collect())
}

impl Tenants {
    pub(crate) fn new(registry: Registry, metrics: Metrics, names: Vec<String>) -> Self {
        if !names.is_empty() {
            let others = std::iter::once(String::from(NO_TENANT));
            metrics.set_tenants(others.chain(names.iter().cloned()));
        }
        Self { registry, metrics, names }
    }

    /// Whether there is a tenant of that name.
    pub(crate) fn id(&self, name: &str) -> Result<TenantId, TenantError> {
        let at = self.names.iter().position(|known| known == name).and_then(|at| u8::try_from(at).ok());
        at.map(TenantId).ok_or_else(|| {
            let known = if self.names.is_empty() {
                "none are configured".to_owned()
            } else {
                format!("there are {}", self.names.join(", "))
            };
            TenantError::Unknown { name: name.to_owned(), known }
        })
    }

    pub(crate) fn set_share(&self, name: &str, share: f64) -> Result<(), TenantError> {
        let id = self.id(name)?;
        let name = name.to_owned();
        let Some(part) = Share::new(share) else { return Err(TenantError::Share { name, share }) };
        self.registry.set_share(id, part).map_err(|_| TenantError::Shares { name, share })
    }

    pub(crate) fn assign(&self, namespace: &Namespace, name: &str) -> Result<(), TenantError> {
        let id = self.id(name)?;
        // The registry has every tenant that has a name.
        let unknown = |error: kvbm_pool::TenantError| TenantError::Unknown {
            name: name.to_owned(),
            known: error.to_string(),
        };
        self.registry.assign(NamespaceId::from(namespace.tag()), id).map_err(unknown)
    }

    /// Counts what a request was refused for its tenant's share.
    pub(crate) fn count_refusal(&self, namespace: NamespaceId, refusal: &AllocError) {
        if !refusal.over_share {
            return;
        }
        let number = self.registry.tenant_of(namespace).map_or(0, |tenant| usize::from(tenant.0) + 1);
        if let Some(tenant) = self.metrics.tenants().get(number) {
            tenant.tier(refusal.tier).refused.add(refusal.asked as u64);
        }
    }

    /// Every tenant, first the blocks of all others; nothing where none are configured.
    pub(crate) fn status(&self) -> Vec<TenantStatus> {
        let mut all: Vec<TenantStatus> = Vec::new();
        for tier in Tier::SLOTTED {
            for (at, on) in self.registry.tenants(tier).into_iter().enumerate() {
                if all.len() == at {
                    let name = on.tenant.and_then(|tenant| self.names.get(usize::from(tenant.0)).cloned());
                    all.push(TenantStatus { name, share: on.share, tiers: Default::default() });
                }
                let kvbm_pool::TenantUsage { limit, blocks, held, evicted, .. } = on;
                let refused =
                    self.metrics.tenants().get(at).map_or(0, |tenant| tenant.tier(tier).refused.get());
                all[at].tiers[tier.index()] = TenantOnTier { limit, blocks, held, evicted, refused };
            }
        }
        all
    }

    /// Copies what the registry counts of tenants to the metrics.
    pub(crate) fn refresh_metrics(&self) {
        for (tenant, counters) in self.status().into_iter().zip(self.metrics.tenants()) {
            counters.share_millionths.set((tenant.share.get() * 1e6).round() as u64);
            for (tier, on) in Tier::SLOTTED.into_iter().zip(tenant.tiers) {
                let counters = counters.tier(tier);
                counters.limit.set(u64::from(on.limit));
                counters.blocks.set(u64::from(on.blocks));
                counters.held.set(u64::from(on.held));
                counters.evicted.raise_to(on.evicted);
            }
        }
    }
}
