//! Tenants: their shares, and what they have.

use super::handle::Registry;
use crate::core::assign::assign;
use crate::share::{Share, TenantError, TenantId, TenantUsage};
use kvbm_plan::{NamespaceId, Tier};

impl Registry {
    /// Changes the share of a tenant, from now on: what is more than that goes when others need
    /// room.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant, or all shares would be more than 1. Nothing changed.
    pub fn set_share(&self, tenant: TenantId, share: Share) -> Result<(), TenantError> {
        self.shared.store.lock().tenants.set_share(tenant, share)
    }

    /// Makes a namespace a tenant's, with the blocks that it has on any tier. Where it is not the
    /// tenant's already, this takes time in proportion to the tiers, and others wait.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant. Nothing changed.
    pub fn assign(&self, namespace: NamespaceId, tenant: TenantId) -> Result<(), TenantError> {
        assign(&mut self.shared.store.lock(), namespace, tenant)
    }

    /// Whose the blocks of a namespace are.
    pub fn tenant_of(&self, namespace: NamespaceId) -> Option<TenantId> {
        self.shared.store.lock().tenants.tenant_of(namespace)
    }

    /// What every tenant has on `tier`; first the blocks without a tenant. Empty where no tenants
    /// are configured.
    pub fn tenants(&self, tier: Tier) -> Vec<TenantUsage> {
        if tier.index() >= crate::tier::TIERS {
            return Vec::new();
        }
        let hold = self.shared.store.lock();
        hold.tenants.status(tier.index(), hold.tiers[tier.index()].usable())
    }
}
