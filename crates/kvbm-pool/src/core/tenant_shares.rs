//! The blocks that each tenant has on every tier, where tenants have shares, and which tenant gives
//! a block when another needs room.
//!
//! Every tenant has the slots on a tier that its share says. A tenant that wants more gets free
//! slots, and blocks of others beyond their shares. So a victim comes from the tenant that is
//! furthest over its share and has one, and no tenant over its share takes from one that is not.
//! Blocks of namespaces without a tenant have what the shares leave.
//!
//! A block costs no memory for it: its namespace tells its tenant.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `victims` | which block of the tenant that gives one is evicted | |
//! | `room` | whether a request can be met, known before any block is evicted for it | |

mod room;
mod victims;

use super::shares::Claim;
use super::state::Core;
use crate::entry::NONE;
use crate::share::{TenantError, TenantId};
use crate::slot::Usage;
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, NamespaceId};
use std::borrow::Cow;
use std::collections::BTreeSet;

impl Core {
    /// Whether `n` blocks more would be over the share of the tenant that claims them.
    pub(crate) fn is_over_share(&self, tier: usize, claim: Claim, n: usize) -> bool {
        let excess = |number: u8| self.tenants.excess(usize::from(number), tier, self.usable(tier));
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        claim.is_some_and(|number| excess(number).saturating_add(n) > 0)
    }

    /// The blocks of each tenant, in their order, with the claim of slots for them.
    pub(crate) fn by_tenant<'a>(
        &self,
        blocks: &'a [BlockIdentity],
    ) -> Vec<(Claim, Cow<'a, [BlockIdentity]>)> {
        let tenants = &self.tenants;
        let claim_of = |identity: &BlockIdentity| tenants.claim_of(identity.namespace);
        let Some(first) = blocks.first().map(claim_of) else { return Vec::new() };
        if blocks.iter().all(|identity| claim_of(identity) == first) {
            return vec![(first, Cow::Borrowed(blocks))];
        }
        let claims: BTreeSet<Claim> = blocks.iter().map(claim_of).collect();
        let part = |claim| blocks.iter().filter(|&identity| claim_of(identity) == claim).copied().collect();
        claims.into_iter().map(|claim| (claim, Cow::Owned(part(claim)))).collect()
    }

    /// Slots that were allocated without a claim, or for another tenant, are for blocks of a
    /// namespace.
    pub(crate) fn claim_for(&mut self, tier: usize, claim: &mut Claim, namespace: NamespaceId, n: usize) {
        let tenants = &mut self.tenants;
        tenants.let_go(tier, *claim, n);
        *claim = tenants.claim_of(namespace);
        tenants.hold(tier, *claim, n);
    }

    /// Makes a namespace a tenant's, with the blocks that it has. Takes time in proportion to the
    /// tiers, unless it is the tenant's already.
    pub(crate) fn assign(&mut self, namespace: NamespaceId, tenant: TenantId) -> Result<(), TenantError> {
        let number = self.tenants.number(tenant)? as u8;
        let of = &self.tenants.of;
        let at = of.binary_search_by_key(&namespace, |&(known, _)| known);
        if at.is_ok_and(|at| of[at].1 == number) {
            return Ok(());
        }
        let slots = |tier: usize| (0..self.slots[tier].len() as u32).map(move |slot| (tier, slot));
        let theirs: Vec<(usize, u32)> = (0..TIERS)
            .flat_map(slots)
            .filter(|&(tier, slot)| {
                let index = self.entry_of(tier, slot);
                index != NONE && self.entry(index).namespace() == namespace
            })
            .collect();
        for &(tier, slot) in &theirs {
            if self.slot(tier, slot).is_listed() {
                self.unlist(tier, slot);
            }
            self.tenants.count(tier, namespace, false);
            if self.is_idle(tier, slot) {
                self.tenants.count_idle(tier, namespace, false);
            }
        }
        let pins = self.pins.of(|index| self.entry(index).namespace() == namespace);
        let tenants = &mut self.tenants;
        tenants.count_pins(namespace, pins, false);
        match at {
            Ok(at) => tenants.of[at].1 = number,
            Err(at) => tenants.of.insert(at, (namespace, number)),
        }
        tenants.count_pins(namespace, pins, true);
        for &(tier, slot) in &theirs {
            self.tenants.count(tier, namespace, true);
            if self.is_idle(tier, slot) {
                self.tenants.count_idle(tier, namespace, true);
            }
            self.update_evictable(self.entry_of(tier, slot), tier);
        }
        self.tiers.iter_mut().for_each(|tier| tier.order.look_again());
        Ok(())
    }

    fn is_idle(&self, tier: usize, slot: u32) -> bool {
        let state = self.slot(tier, slot);
        state.usage() == Usage::Registered && state.refs() == 0
    }
}
