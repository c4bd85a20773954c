//! The default: what a copy saves against what it costs.

use super::{AdmissionPolicy, Costs, LoadOffer, Offer, Verdict};
use kvbm_plan::SequenceHash;
use std::collections::HashMap;

/// The default policy.
///
/// - Nothing goes to a tier from which a block comes back no faster than the engine computes it:
///   such a copy costs writes and saves nothing. Where either time is not known, it is not held
///   against the tier.
/// - Where a write budget allows only some of the blocks, those go that are expected to be used
///   most, each with the ancestors that it needs. For blocks of one size that also saves most for
///   each byte. Where nothing is expected, the order of the offer decides.
/// - All others are admitted, the first time they are seen.
/// - A request copies as much of its prefix up as makes it ready soonest, and computes the rest.
#[derive(Clone, Copy, Debug, Default)]
pub struct CostAdmission;

impl CostAdmission {
    /// Whether reading a block back takes at least as long as computing it.
    fn is_slower_than_computing(costs: &Costs) -> bool {
        matches!((costs.recompute, costs.read_back), (Some(compute), Some(read)) if read >= compute)
    }
}

impl AdmissionPolicy for CostAdmission {
    fn load(&self, offer: &LoadOffer<'_>) -> usize {
        offer.soonest()
    }

    fn judge(&self, offer: &Offer<'_>, verdicts: &mut [Verdict]) {
        if Self::is_slower_than_computing(&offer.costs) {
            verdicts.fill(Verdict::Refuse);
            return;
        }
        let Some(budget) = offer.costs.write_budget.filter(|budget| *budget < offer.blocks.len()) else {
            return;
        };
        verdicts.fill(Verdict::OverBudget);
        let worth = |index: usize| offer.blocks[index].expected_reuse.unwrap_or(0.0);
        let places: HashMap<SequenceHash, usize> =
            offer.blocks.iter().enumerate().map(|(index, block)| (block.identity.hash, index)).collect();
        let mut order: Vec<usize> = (0..offer.blocks.len()).collect();
        // Stable: of equal worth, the first of the offer.
        order.sort_by(|&a, &b| worth(b).total_cmp(&worth(a)));
        let mut left = budget;
        let mut line = Vec::new();
        for index in order {
            line.clear();
            let mut next = Some(index).filter(|&index| verdicts[index] != Verdict::Admit);
            while let Some(at) = next {
                line.push(at);
                let parent = offer.blocks[at].identity.parent.and_then(|parent| places.get(&parent).copied());
                // A line as long as the offer is none: hashes are not that of a chain.
                next = parent
                    .filter(|&parent| verdicts[parent] != Verdict::Admit && line.len() < offer.blocks.len());
            }
            // Without its ancestors a block cannot go; a line that is too long leaves room for a
            // shorter one.
            if line.len() <= left {
                left -= line.len();
                for &at in &line {
                    verdicts[at] = Verdict::Admit;
                }
            }
            if left == 0 {
                return;
            }
        }
    }
}
