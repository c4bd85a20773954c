//! A namespace becomes a tenant's, with the blocks that it has.

use super::state::Core;
use crate::entry::NONE;
use crate::share::{TenantError, TenantId};
use crate::slot::Usage;
use crate::tier::TIERS;
use kvbm_plan::NamespaceId;

/// Makes a namespace a tenant's, with the blocks that it has. Takes time in proportion to the
/// tiers, unless it is the tenant's already.
pub(crate) fn assign(core: &mut Core, namespace: NamespaceId, tenant: TenantId) -> Result<(), TenantError> {
    let number = core.tenants.number(tenant)?;
    if core.tenants.owns(number, namespace) {
        return Ok(());
    }
    let theirs = slots_of(core, namespace);
    for &(tier, slot) in &theirs {
        if core.slot(tier, slot).is_listed() {
            core.unlist(tier, slot);
        }
        count(core, tier, slot, namespace, false);
    }
    let pins = core.pins.of_namespace(&core.entries, namespace);
    core.tenants.count_pins(namespace, pins, false);
    core.tenants.set_owner(namespace, number);
    core.tenants.count_pins(namespace, pins, true);
    for &(tier, slot) in &theirs {
        count(core, tier, slot, namespace, true);
        core.update_evictable(core.entry_of(tier, slot), tier);
    }
    core.tiers.iter_mut().for_each(|tier| tier.order.look_again());
    Ok(())
}

/// Every slot with a block of a namespace, with its tier.
fn slots_of(core: &Core, namespace: NamespaceId) -> Vec<(usize, u32)> {
    let slots = |tier: usize| (0..core.tiers[tier].capacity()).map(move |slot| (tier, slot));
    let is_theirs = |&(tier, slot): &(usize, u32)| {
        let index = core.entry_of(tier, slot);
        index != NONE && core.entry(index).namespace() == namespace
    };
    (0..TIERS).flat_map(slots).filter(is_theirs).collect()
}

/// Counts a block for the tenant of its namespace, or no more.
fn count(core: &mut Core, tier: usize, slot: u32, namespace: NamespaceId, more: bool) {
    core.tenants.count(tier, namespace, more);
    let state = core.slot(tier, slot);
    if state.usage() == Usage::Registered && state.refs() == 0 {
        core.tenants.count_idle(tier, namespace, more);
    }
}
