//! What of a prefix a request has copied, and what it computes because that is sooner.

use super::Leader;
use crate::admission::{LoadOffer, LoadRun};
use crate::metrics::LoadReason;
use crate::transfers::Pace;
use kvbm_plan::{GroupId, NodeId, Path, Tier};
use kvbm_pool::Prefix;
use std::time::Duration;

/// Ends `prefix` where its blocks would come to `to` later than they are computed. The first
/// `first` listed blocks cost nothing: the engine has them. Of a window or a state all blocks stay,
/// or none.
pub(crate) fn leave_out_slow(leader: &Leader, prefix: &mut Prefix, first: usize, to: Tier) {
    let tiers: Vec<Tier> = prefix.blocks().iter().skip(first).map(|block| block.tier).collect();
    let Some(recompute) = leader.transfers.block_costs().recompute else {
        for tier in tiers.into_iter().filter(|tier| *tier > to) {
            leader.metrics.tier(tier).loads(LoadReason::Unknown).add(1);
        }
        return;
    };
    let (node, group) = (prefix.node(), prefix.group());
    let paces = Tier::ALL.map(|tier| {
        let blocks = tiers.iter().filter(|of| **of == tier).count();
        (tier > to && blocks > 0).then(|| match node.filter(|_| tier == Tier::G4) {
            Some(node) => pace_of_peer(leader, node, group),
            None => leader.transfers.pace(Path::new(tier, to), recompute, blocks),
        })
    });
    let mut runs: Vec<LoadRun> = Vec::new();
    for &tier in &tiers {
        match runs.last_mut().filter(|run| run.tier == tier) {
            Some(run) => run.blocks += 1,
            None => runs.push(run_of(tier, paces[tier.index()])),
        }
    }
    let offer = LoadOffer { runs: &runs, recompute: Some(recompute) };
    let wanted = tiers.len();
    let kept = leader.offload.admission().load(&offer).min(wanted);
    for (at, tier) in tiers.into_iter().enumerate() {
        if let Some((pace, _)) = paces[tier.index()] {
            leader.metrics.tier(tier).loads(reason(pace, recompute, at < kept)).add(1);
        }
    }
    if kept < wanted && !leader.needs_all(prefix.group()) {
        prefix.clear();
    } else {
        prefix.truncate(prefix.start() + first + kept);
    }
}

/// What is known of reads from a peer. No other request's blocks are counted: each peer has
/// reads of its own.
fn pace_of_peer(leader: &Leader, node: NodeId, group: GroupId) -> (Pace, usize) {
    let measured = leader.peers.get().and_then(|peers| peers.time_per_block(node, group));
    (measured.map_or(Pace::Unknown, Pace::Each), 0)
}

/// A run of one block.
fn run_of(tier: Tier, pace: Option<(Pace, usize)>) -> LoadRun {
    let (each, before) = match pace {
        Some((Pace::Each(each), before)) => (Some(each), before),
        Some((Pace::Unknown | Pace::Retried, before)) => (None, before),
        None => (Some(Duration::ZERO), 0),
    };
    LoadRun { tier, blocks: 1, before, each }
}

fn reason(pace: Pace, recompute: Duration, is_kept: bool) -> LoadReason {
    match pace {
        Pace::Unknown => LoadReason::Unknown,
        Pace::Retried => LoadReason::Retried,
        Pace::Each(_) if is_kept => LoadReason::Sooner,
        Pace::Each(each) if each >= recompute => LoadReason::Slower,
        Pace::Each(_) => LoadReason::Queue,
    }
}
