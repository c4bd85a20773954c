//! Allocation of slots, with eviction where too few are free.

use super::evict::MAX_LOOKED_AT;
use super::room::might_give;
use super::shares::Claim;
use super::state::Core;
use super::store::{Hold, Store};
use crate::status::TierStatus;
use kvbm_plan::{BlockId, Tier};

/// Why there are no slots.
pub(crate) struct NoRoom {
    /// The slots of the tier by usage.
    pub status: TierStatus,
    /// Whether the tenant that claimed them would be over its share.
    pub over_share: bool,
}

impl NoRoom {
    #[cold]
    fn new(core: &mut Core, tier: Tier, n: usize, claim: Claim) -> Self {
        let on = tier.index();
        core.tiers[on].counters.allocations_failed += 1;
        let over_share = core.tenants.is_over_share(on, core.tiers[on].usable(), claim, n);
        Self { over_share, status: core.status(tier) }
    }
}

impl Store {
    /// Puts `n` Held slots of `tier` into `out`, or none.
    pub(crate) fn allocate(
        &self,
        tier: Tier,
        n: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> Result<(), NoRoom> {
        self.lock().allocate(tier, n, claim, out)
    }
}

impl Hold<'_> {
    /// See [`Store::allocate`]. Releases the lock after every
    /// [`MAX_VICTIMS`](super::store::MAX_VICTIMS) victims.
    fn allocate(&mut self, tier: Tier, n: usize, claim: Claim, out: &mut Vec<BlockId>) -> Result<(), NoRoom> {
        let (index, start) = (tier.index(), out.len());
        let capacity = self.tiers[index].slots.len();
        if n > capacity {
            return Err(NoRoom::new(self, tier, n, claim));
        }
        self.tenants.hold(index, claim, n);
        let (mut hopeful, mut in_vain) = (false, 0);
        loop {
            self.tiers[index].take_free(n - (out.len() - start), out);
            let missing = n - (out.len() - start);
            if missing == 0 {
                return Ok(());
            }
            // A request that cannot succeed evicts nothing. Other threads ran between the holds of
            // the lock, so this may change.
            hopeful = if hopeful {
                might_give(self, index, claim, missing)
            } else {
                self.will_give(index, claim, missing)
            };
            let (before, looks) = (out.len(), positions_per_part(capacity, in_vain));
            let more = hopeful && self.evict(index, missing, looks, claim, out);
            in_vain = if out.len() > before { 0 } else { in_vain + MAX_LOOKED_AT };
            // Other threads held the lock meanwhile, and may have given slots back.
            if out.len() - start < n && !more && self.tiers[index].free.free == 0 {
                self.tiers[index].give_back(&out[start..]);
                out.truncate(start);
                self.tenants.let_go(index, claim, n);
                return Err(NoRoom::new(self, tier, n, claim));
            }
            if out.len() - start == n {
                return Ok(());
            }
            self.let_others_in();
        }
    }
}

/// How many positions of the order of a tier with `capacity` slots one part of the search looks at,
/// after `in_vain` positions without a victim. Between the parts other threads use blocks, so the
/// next victim may stay as far away as it was. Once a search has looked at more positions than
/// there are, the next part looks at all.
fn positions_per_part(capacity: usize, in_vain: usize) -> usize {
    if in_vain > 2 * capacity { usize::MAX } else { MAX_LOOKED_AT }
}
