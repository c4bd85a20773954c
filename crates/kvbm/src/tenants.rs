//! Tenants of a manager by their names: each has a share of every tier, and a namespace of its own.

use crate::leader::Leader;
use crate::manager::{KvBlockManager, Owned};
use kvbm_plan::{NamespaceId, Tier};
use kvbm_pool::{AllocError, BlockBatch, G1, Reset, Share, TenantConfig, TenantId};
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
    /// Blocks that its requests asked for and were refused, because it was over its share with them.
    pub refused: u64,
}

/// The names of tenants, by [`TenantId`].
#[derive(Debug)]
pub(crate) struct Names(Vec<String>);

impl Names {
    /// The tenants of a configuration that was checked, whose namespaces are parts of `namespace`: for the registry, and their names.
    pub(crate) fn of(shares: &[(String, f64)], namespace: &Namespace) -> (Vec<TenantConfig>, Self) {
        let tenant = |(name, share): &(String, f64)| TenantConfig {
            share: Share::new(*share).unwrap_or_default(),
            namespaces: vec![NamespaceId::from(namespace.clone().tenant(name).tag())],
        };
        let names = shares.iter().map(|(name, _)| name.clone());
        (shares.iter().map(tenant).collect(), Self(names.collect()))
    }

    fn id(&self, name: &str) -> Result<TenantId, TenantError> {
        let at = self.0.iter().position(|known| known == name).and_then(|at| u8::try_from(at).ok());
        at.map(TenantId).ok_or_else(|| {
            let known = if self.0.is_empty() {
                "none are configured".to_owned()
            } else {
                format!("there are {}", self.0.join(", "))
            };
            TenantError::Unknown { name: name.to_owned(), known }
        })
    }
}

impl<G> KvBlockManager<G> {
    /// The namespace of a tenant's sequences, for [`sequence_in`](Self::sequence_in): that of the manager, with the name as part of its tenant
    /// salt ([`Namespace::tenant`]). Its blocks are the tenant's on every tier, and shared with nobody else's.
    ///
    /// ```
    /// # use kvbm::config::{BlockBatch, ModelConfig};
    /// # use kvbm::{KvBlockManager, Namespace, Owned};
    /// # let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
    /// let manager = KvBlockManager::<Owned>::builder()
    ///     .model(model)
    ///     .namespace(Namespace::new("llama-3-8b"))
    ///     .device(Blocks(64))
    ///     .configure(|config| config.tenants.shares = [("acme", 0.5), ("beta", 0.25)].into_iter().collect())
    ///     .build()?;
    /// let acme = manager.tenant("acme")?; // an error names who is known
    /// let prompt: Vec<u32> = (0..40).collect();
    /// let tokens = manager.sequence_in(&acme, &prompt, b"")?;
    /// let fresh = manager.allocate_in(&acme, tokens.num_blocks())?;
    /// let (done, _tail) = manager.commit(fresh, &tokens, 0)?;
    /// drop(manager.register(done)?);
    /// assert_eq!(manager.status().tenants[1].tiers[0].blocks, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TenantError::Unknown`]: nobody configured it in `tenants.shares`.
    pub fn tenant(&self, name: &str) -> Result<Namespace, TenantError> {
        self.leader.tenants.id(name)?;
        Ok(self.namespace.clone().tenant(name))
    }

    /// Changes a tenant's share of every tier, from now on: what it has beyond goes when others need room.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant, not from 0 to 1, or all shares would be more than 1. Nothing changed.
    pub fn set_share(&self, name: &str, share: f64) -> Result<(), TenantError> {
        let id = self.leader.tenants.id(name)?;
        let name = name.to_owned();
        let Some(part) = Share::new(share) else { return Err(TenantError::Share { name, share }) };
        self.leader.registry.set_share(id, part).map_err(|_| TenantError::Shares { name, share })
    }

    /// Gives a tenant another namespace beside its own (an adapter, say): blocks of both count for one share, also those that are
    /// known already, after a restart for one. Assignments are not kept beyond the process: say them again at its start.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant. Nothing changed.
    pub fn assign(&self, namespace: &Namespace, name: &str) -> Result<(), TenantError> {
        let id = self.leader.tenants.id(name)?;
        // The registry has every tenant that has a name.
        let unknown = |error: kvbm_pool::TenantError| TenantError::Unknown {
            name: name.to_owned(),
            known: error.to_string(),
        };
        self.leader.registry.assign(NamespaceId::from(namespace.tag()), id).map_err(unknown)
    }
}

impl KvBlockManager<Owned> {
    /// Like [`allocate`](Self::allocate), for blocks of another namespace. They count for its tenant from now on: where it is over its share
    /// with them it gets what is free and what tenants have beyond their shares, itself above all, but nothing of a tenant that is
    /// within.
    ///
    /// # Errors
    /// [`AllocError`] says what holds the blocks, and whether it is for the share.
    pub fn allocate_in(&self, namespace: &Namespace, n: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        self.allocate_for(NamespaceId::from(namespace.tag()), n)
    }
}

impl KvBlockManager<Owned> {
    pub(crate) fn allocate_for(
        &self,
        namespace: NamespaceId,
        n: usize,
    ) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let allocated = self.leader.registry.pool::<G1>().get_mutable_blocks_for(namespace, n);
        allocated.inspect_err(|refusal| self.leader.count_refusal(namespace, refusal))
    }
}

impl Leader {
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
    pub(crate) fn tenant_status(&self) -> Vec<TenantStatus> {
        let mut all: Vec<TenantStatus> = Vec::new();
        for tier in Tier::SLOTTED {
            for (at, on) in self.registry.tenants(tier).into_iter().enumerate() {
                if all.len() == at {
                    let name =
                        on.tenant.and_then(|tenant| self.tenants.0.get(usize::from(tenant.0)).cloned());
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
    pub(crate) fn refresh_tenant_metrics(&self) {
        for (tenant, counters) in self.tenant_status().into_iter().zip(self.metrics.tenants()) {
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

    /// The labels of tenants in metrics.
    pub(crate) fn name_tenant_metrics(&self) {
        if !self.tenants.0.is_empty() {
            let others = std::iter::once(String::from(crate::metrics::NO_TENANT));
            self.metrics.set_tenants(others.chain(self.tenants.0.iter().cloned()));
        }
    }
}
