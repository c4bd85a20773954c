//! What handles and registry share.

use crate::core::allocate::NoRoom;
use crate::core::shares::Claim;
use crate::core::store::Store;
use crate::error::AllocError;
use crate::status::TierStatus;
use crate::tier::TIERS;
use crate::vectors::VectorPool;
use kvbm_plan::{BlockId, Epoch, NamespaceId, Tier};

/// What handles and registry share.
pub(crate) struct RegistryState {
    pub store: Store,
    pub vectors: VectorPool,
    pub epoch: Epoch,
    pub event_capacity: usize,
    pub capacity: [u32; TIERS],
    pub has_tenants: bool,
}

impl RegistryState {
    /// The tenant for which slots are allocated that will hold blocks of a namespace.
    pub(crate) fn claim_of(&self, namespace: NamespaceId) -> Claim {
        if self.has_tenants { self.store.lock().tenants.claim_of(namespace) } else { None }
    }

    /// Puts `n` Held slots of `tier` behind the slots in `out`, or none.
    pub(crate) fn allocate_into(
        &self,
        tier: Tier,
        n: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> Result<(), AllocError> {
        let error = |NoRoom { status, over_share }: NoRoom| alloc_error(&status, n, over_share);
        self.store.allocate(tier, n, claim, out).map_err(error)
    }

    /// The error of a tier without slots.
    pub(crate) fn no_slots(tier: Tier, asked: usize) -> AllocError {
        alloc_error(&TierStatus::without_slots(tier), asked, false)
    }
}

fn alloc_error(status: &TierStatus, asked: usize, over_share: bool) -> AllocError {
    AllocError {
        tier: status.tier,
        asked,
        capacity: status.capacity,
        free: status.free,
        inactive: status.inactive,
        in_use: status.active + status.detached,
        held: status.held,
        arriving: status.arriving,
        transfer_pins: u32::try_from(status.transfer_pins).unwrap_or(u32::MAX),
        quarantined: status.quarantined,
        pinned: status.pinned,
        over_share,
    }
}
