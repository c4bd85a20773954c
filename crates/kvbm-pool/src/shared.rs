//! What handles and registry share, and how slots are had from it.

use crate::arrivals::{AnyArrivals, Arrival, Refusal};
use crate::blocks::{Blocks, HeldSlots};
use crate::core::evict::NoRoom;
use crate::core::tenants::Claim;
use crate::core::{Pin, Store};
use crate::error::AllocError;
use crate::metadata::BlockMetadata;
use crate::spares::Spares;
use crate::state::Reset;
use crate::status::TierStatus;
use crate::sync::Arc;
use crate::tier::TierTag;
use kvbm_plan::{BlockId, BlockIdentity, Epoch, NamespaceId, Tier};

/// What handles and registry share.
pub(crate) struct Shared {
    pub store: Store,
    pub spares: Spares,
    pub epoch: Epoch,
    pub event_capacity: usize,
    pub capacity: [u32; crate::tier::TIERS],
    pub has_tenants: bool,
}

impl Shared {
    /// `n` blocks of `T`, for a namespace where one is said.
    pub(crate) fn allocate<T: TierTag>(
        self: &Arc<Self>,
        tier: Tier,
        n: usize,
        namespace: Option<NamespaceId>,
    ) -> Result<Blocks<T, Reset>, AllocError> {
        let most = self.capacity.get(tier.index()).map_or(0, |&blocks| blocks as usize);
        let ids = self.spares.take_ids(n.min(most));
        let claim = namespace.and_then(|namespace| self.store.claim_of(namespace));
        let losses = self.store.losses();
        let mut slots = HeldSlots { shared: Arc::clone(self), tier: tier.index(), ids, claim, losses };
        self.allocate_into(tier, n, claim, &mut slots.ids)?;
        Ok(Blocks::new(slots, ()))
    }

    /// Puts `n` Held slots of `tier` behind what is in `out`, or nothing.
    fn allocate_into(
        &self,
        tier: Tier,
        n: usize,
        claim: Claim,
        out: &mut Vec<BlockId>,
    ) -> Result<(), AllocError> {
        if tier.index() >= crate::tier::TIERS {
            return Err(Self::alloc_error(&TierStatus::without_slots(tier), n, false));
        }
        let error = |NoRoom { status, over_share }: NoRoom| Self::alloc_error(&status, n, over_share);
        self.store.allocate(tier, n, claim, out).map_err(error)
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

    pub(crate) fn begin_arrivals(
        self: &Arc<Self>,
        tier: Tier,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<AnyArrivals, AllocError> {
        let index = tier.index();
        if index >= crate::tier::TIERS {
            return Err(Self::alloc_error(&TierStatus::without_slots(tier), identities.len(), false));
        }
        let losses = self.store.losses();
        let mut pins = Vec::with_capacity(identities.len() + 1);
        let mut arrivals = Vec::with_capacity(identities.len());
        let mut rooms = Vec::new();
        let (mut core, mut ground) = self.store.lock_for_arrivals(index, identities);
        for (claim, part) in core.by_tenant(identities) {
            let needed;
            (core, needed) = core.prepare_arrivals(index, &part, &ground, &mut pins);
            let ids = Vec::with_capacity(needed);
            rooms.push((HeldSlots { shared: Arc::clone(self), tier: index, ids, claim, losses }, needed));
        }
        drop(core);
        let mut refused = Ok(());
        let mut is_any = identities.is_empty();
        for (room, needed) in &mut rooms {
            match self.allocate_into(tier, *needed, room.claim, &mut room.ids) {
                Ok(()) => is_any = true,
                Err(error) => (*needed, refused) = (0, Err(error)),
            }
            room.ids.reverse();
        }
        let (mut core, entered) = self.store.enter_arrivals(index, identities, &mut ground);
        let mut no_room = Vec::new();
        if is_any {
            for (at, identity) in identities.iter().enumerate() {
                let claim = core.first().tenants.claim_of(identity.namespace);
                // The namespace may have been made another tenant's meanwhile, for whom no room was made.
                let room = rooms.iter_mut().find(|(room, _)| room.claim == claim);
                let room = room.map_or(&mut no_room, |(room, _)| &mut room.ids);
                let entry = entered.as_ref().and_then(|entered| entered.get(at).copied());
                arrivals.push(match self.store.check_identity(at, identity) {
                    Ok(()) => core.begin_arrival(index, identity, entry, metadata, room),
                    Err(_) => Arrival::Refused(Refusal::BadIdentity),
                });
            }
        }
        core.leave_ground(index, &mut ground, entered, arrivals.first());
        let tenants = &mut core.first_mut().tenants;
        for (room, needed) in &rooms {
            tenants.let_go(index, room.claim, needed - room.ids.len());
        }
        core.unpin_from(index, &mut pins);
        drop(core);
        // Those in shards that were held only while room was made.
        self.store.unpin_all(index, &pins, Pin::Transfer);
        if !is_any {
            refused?;
        }
        Ok(AnyArrivals::new(Arc::clone(self), tier, identities.to_vec(), arrivals, losses))
    }
}
