//! Tenants of a manager.

use super::{KvBlockManager, Owned};
use crate::tenants::TenantError;
use kvbm_plan::NamespaceId;
use kvbm_pool::{AllocError, BlockBatch, G1, Reset};
use kvbm_tokens::Namespace;

impl<G> KvBlockManager<G> {
    /// The namespace of a tenant's sequences, for [`sequence_in`](Self::sequence_in): that of the
    /// manager, with the name as part of its tenant salt ([`Namespace::tenant`]). Its blocks are
    /// the tenant's on every tier, and shared with nobody else's.
    ///
    /// ```
    /// # use kvbm::config::{Blocks, ModelConfig};
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

    /// Changes a tenant's share of every tier, from now on: what it has beyond goes when others
    /// need room.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant, not from 0 to 1, or all shares would be more than 1.
    /// Nothing changed.
    pub fn set_share(&self, name: &str, share: f64) -> Result<(), TenantError> {
        self.leader.tenants.set_share(name, share)
    }

    /// Gives a tenant another namespace beside its own (an adapter, say): blocks of both count for
    /// one share, also those that are known already, after a restart for one. Assignments are not
    /// kept beyond the process: say them again at its start.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant. Nothing changed.
    pub fn assign(&self, namespace: &Namespace, name: &str) -> Result<(), TenantError> {
        self.leader.tenants.assign(namespace, name)
    }
}

impl KvBlockManager<Owned> {
    /// Like [`allocate`](Self::allocate), for blocks of another namespace. They count for its
    /// tenant from now on: where it is over its share with them it gets what is free and what
    /// tenants have beyond their shares, itself above all, but nothing of a tenant that is within.
    ///
    /// # Errors
    /// [`AllocError`] says what holds the blocks, and whether it is for the share.
    pub fn allocate_in(&self, namespace: &Namespace, n: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        self.allocate_for(NamespaceId::from(namespace.tag()), n)
    }

    pub(crate) fn allocate_for(
        &self,
        namespace: NamespaceId,
        n: usize,
    ) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let allocated = self.leader.registry.pool::<G1>().get_mutable_blocks_for(namespace, n);
        allocated.inspect_err(|refusal| self.leader.tenants.count_refusal(namespace, refusal))
    }
}
