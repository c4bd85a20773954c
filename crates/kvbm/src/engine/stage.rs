//! Bringing a prefix from G3 to G2 before it is promised.

use crate::leader::Leader;
use crate::onboard::PrefixTransfer;
use crate::transfers::{Destination, Handle, Purpose, Request};
use kvbm_plan::Tier;
use kvbm_pool::{Arrival, Prefix};
use std::sync::Arc;

/// Starts the copies of at most `most` blocks of `prefix` that G3 has and G2 has not, up to the
/// first that neither has. `None` where there is nothing to copy, or no room.
///
/// From the first block on, also where the engine has it: a tier holds no block without its parent.
pub(super) fn start(leader: &Arc<Leader>, prefix: Prefix, most: usize) -> Option<Handle> {
    if leader.transfers.refuses_callers() {
        return None;
    }
    let losses = leader.registry.losses();
    if prefix.lost().is_some() {
        return None;
    }
    let transfer = PrefixTransfer::new(leader, prefix);
    let blocks = transfer.prefix.blocks().iter().enumerate();
    let below: Vec<usize> = blocks
        .take_while(|(_, block)| matches!(block.tier, Tier::G2 | Tier::G3))
        .filter(|(_, block)| block.tier == Tier::G3)
        .map(|(at, _)| at)
        .take(most)
        .collect();
    if below.is_empty() {
        return None;
    }
    let identities: Vec<_> = below.iter().map(|&at| transfer.identities[at]).collect();
    let arrivals = leader.registry.begin_arrivals(Tier::G2, &identities).ok()?;
    let (mut moves, mut places) = (Vec::new(), Vec::new());
    for (place, (arrival, &at)) in arrivals.arrivals().iter().zip(&below).enumerate() {
        if let Arrival::Reserved { block: dst, .. } = *arrival {
            moves.push(transfer.to(at, dst));
            places.push(place);
        }
    }
    if moves.is_empty() {
        return None;
    }
    let destination = Destination::Reserved { arrivals, places };
    let request = Request::new(Purpose::Prefetch, Tier::G2, moves, destination, losses);
    Some(leader.transfers.start(request.hold(Arc::clone(&transfer.prefix))))
}
