//! Bringing a prefix from G3 to G2: before it is promised, or before a request asks for it.

use crate::config::FIRST_GROUP;
use crate::leader::Leader;
use crate::metrics::PrefetchOutcome;
use crate::onboard::PrefixTransfer;
use crate::transfers::{Destination, Handle, Purpose, Request};
use kvbm_plan::Tier;
use kvbm_pool::{Arrival, Prefix, TierMask};
use kvbm_tokens::BlockChain;
use std::any::Any;
use std::sync::Arc;

/// What a prefetch began with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefetched {
    /// Blocks that are on their way to G2.
    pub started: usize,
    /// Blocks that stay on G3, since earlier prefetches have the budget (`policy.prefetch_share`).
    pub over_budget: usize,
    /// Blocks that stay on G3, since G2 has no room for them: its blocks are in use.
    pub no_room: usize,
}

/// Starts the copies of those blocks of `chain` that only G3 has, as far as the budget goes. Nobody
/// waits for them.
pub(crate) fn ahead(leader: &Arc<Leader>, chain: BlockChain<'_>) -> Prefetched {
    let parts = if leader.has_groups() {
        leader.registry.match_groups(chain, TierMask::ALL, &[])
    } else {
        vec![leader.registry.match_chain(FIRST_GROUP, chain).0]
    };
    let mut all = Prefetched::default();
    for part in parts {
        let Prefetched { started, over_budget, no_room } = ahead_of(leader, part);
        all.started += started;
        all.over_budget += over_budget;
        all.no_room += no_room;
    }
    all
}

/// The same of the blocks of a cache group.
fn ahead_of(leader: &Arc<Leader>, mut prefix: Prefix) -> Prefetched {
    leader.transfers.leave_out_disk(&mut prefix);
    let wanted = on_disk(&prefix).count();
    let Some(share) = leader.prefetch_budget.take(wanted).filter(|_| wanted > 0) else {
        return count(leader, Prefetched { over_budget: wanted, ..Prefetched::default() });
    };
    let allowed = share.blocks();
    let started = start(leader, prefix, allowed, Purpose::Prefetch, Some(Box::new(share)));
    let blocks = started.as_ref().map_or(0, Handle::num_blocks);
    if let Some(handle) = started {
        handle.detach();
    }
    count(leader, Prefetched { started: blocks, over_budget: wanted - allowed, no_room: allowed - blocks })
}

fn count(leader: &Leader, prefetched: Prefetched) -> Prefetched {
    let Prefetched { started, over_budget, no_room } = prefetched;
    for (outcome, blocks) in [
        (PrefetchOutcome::Started, started),
        (PrefetchOutcome::OverBudget, over_budget),
        (PrefetchOutcome::NoRoom, no_room),
    ] {
        leader.metrics.prefetches(outcome).add(blocks as u64);
    }
    prefetched
}

/// Indices of the blocks that only G3 has, up to the first that no tier has.
fn on_disk(prefix: &Prefix) -> impl Iterator<Item = usize> + '_ {
    let blocks = prefix.blocks().iter().enumerate().take_while(|(_, block)| block.tier != Tier::G4);
    blocks.filter(|(_, block)| block.tier == Tier::G3).map(|(at, _)| at)
}

/// Starts the copies of at most `most` blocks of `prefix` that only G3 has, up to the first that no
/// tier has. `None` where there is nothing to copy, or no room. `hold` is dropped when the copies
/// are over.
///
/// From the first block on, also where the engine has it: a tier holds no block without its parent.
pub(crate) fn start(
    leader: &Arc<Leader>,
    prefix: Prefix,
    most: usize,
    purpose: Purpose,
    hold: Option<Box<dyn Any + Send>>,
) -> Option<Handle> {
    if leader.transfers.refuses_callers() {
        return None;
    }
    let losses = leader.registry.losses();
    if prefix.lost().is_some() {
        return None;
    }
    let transfer = PrefixTransfer::new(leader, prefix);
    let below: Vec<usize> = on_disk(&transfer.prefix).take(most).collect();
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
    let request = Request::new(purpose, Tier::G2, moves, destination, losses);
    Some(leader.transfers.start(request.hold(Arc::clone(&transfer.prefix)).hold(hold)))
}
