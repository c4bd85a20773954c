//! Which blocks are worth a copy, down to a lower tier or up to G1: the seam, and the policies that
//! ship.
//!
//! The triggers (write-through, watermark, idleness, approaching eviction) say which blocks *could*
//! go down now; an [`AdmissionPolicy`] says which of them *do*. It is asked on every edge of the
//! tiers, and what it may weigh is in the [`Offer`]. The offer says where from and where to, and
//! how much may still be written. Of each block it says how deep it lies in its prefix and how
//! likely it is to be used again. It also has what computing it again costs the engine, and what
//! reading it back has cost lately.
//!
//! What no policy can change: only whole registered blocks are offered, never a part of one. A
//! block whose parent was refused is refused with it (a lower tier holds beginnings of chains).
//! What goes beyond the write budget is refused. What a caller asks for by name (`offload`) is not
//! offered: it goes.
//!
//! A request that finds its prefix on lower tiers asks the policy too: what of it is copied up
//! ([`LoadOffer`]), and what is computed because that is sooner.
//!
//! There is no filter by frequency here, and none is missing. On the public traces a disk that
//! takes only blocks seen twice loses more than half of its hits. The first copy of a
//! conversation's turn is the one that its next turn reads.

mod cost;
mod load;
#[cfg(test)]
mod tests;

pub use cost::CostAdmission;
pub use load::{LoadOffer, LoadRun};

use kvbm_plan::{BlockIdentity, Path};
use std::fmt;
use std::time::Duration;

/// Why blocks are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Trigger {
    /// They have just been registered on the upper tier.
    WriteThrough,
    /// The upper tier is full beyond its watermark; these are its coldest.
    Watermark,
    /// They are among the next to be evicted.
    Eviction,
    /// Nobody used them for long.
    Idle,
}

/// A block that could be copied down: a whole, registered one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Which block. Its `position` is the number of blocks of the prefix before it.
    pub identity: BlockIdentity,
    /// Uses of the block expected while as many blocks are used as the largest tier holds, if the
    /// eviction policy estimates that.
    pub expected_reuse: Option<f32>,
}

/// What the copies of an offer cost and save. All blocks of an offer are of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// Bytes of a block, on all ranks together.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Time in which the engine computes a block again, where the configuration says how fast it
    /// computes (`policy.prefill_tokens_per_s`), or the engine's own steps do
    /// ([`KvBlockManager::prefilled`](crate::KvBlockManager::prefilled)). Deep blocks cost more
    /// than that: their attention reaches over the whole prefix.
    pub recompute: Option<Duration>,
    /// Time in which a block came back from the lower tier to G1 lately, waiting included; `None`
    /// while too little was read.
    pub read_back: Option<Duration>,
    /// Blocks that may be written now; `None` for any number.
    pub write_budget: Option<usize>,
}

/// Blocks that could be copied down one edge, parents before their children.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// From which tier to which.
    pub path: Path,
    /// Why now.
    pub trigger: Trigger,
    /// The blocks.
    pub blocks: &'a [Candidate],
    /// The same for all of them.
    pub costs: Costs,
}

/// What becomes of one block of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is copied.
    Admit,
    /// Its copy would not be worth it.
    Refuse,
    /// Others are worth more of the write budget, or nothing is left of it.
    OverBudget,
}

/// Decides which blocks get a copy on a lower tier.
///
/// The thread `kvbm-offload` calls it, or a caller that waits for offloads. Others may wait for
/// that thread. So it must be quick, must not call the manager, and must not wait for anybody who
/// does.
pub trait AdmissionPolicy: Send + Sync {
    /// Sets `verdicts[i]` for `offer.blocks[i]`. All are [`Verdict::Admit`] before; there are as
    /// many as blocks.
    fn judge(&self, offer: &Offer<'_>, verdicts: &mut [Verdict]);

    /// How many blocks of a prefix, from the first on, a request has copied to G1; it computes the
    /// others. All of them, unless a policy says otherwise. The caller is the engine's thread.
    fn load(&self, offer: &LoadOffer<'_>) -> usize {
        offer.blocks()
    }
}

/// Admits whatever the triggers offer, as far as the write budget goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct AdmitAll;

impl AdmissionPolicy for AdmitAll {
    fn judge(&self, _offer: &Offer<'_>, _verdicts: &mut [Verdict]) {}
}

impl fmt::Debug for dyn AdmissionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdmissionPolicy")
    }
}

/// Holds a policy to the rules that no policy can change.
pub(crate) fn judge(policy: &dyn AdmissionPolicy, offer: &Offer<'_>) -> Vec<Verdict> {
    let mut verdicts = vec![Verdict::Admit; offer.blocks.len()];
    policy.judge(offer, &mut verdicts);
    let mut left = offer.costs.write_budget.unwrap_or(usize::MAX);
    let mut refused = std::collections::HashMap::new();
    for (candidate, verdict) in offer.blocks.iter().zip(&mut verdicts) {
        let parent = candidate.identity.parent.and_then(|parent| refused.get(&parent).copied());
        if *verdict == Verdict::Admit {
            *verdict = match parent {
                Some(refusal) => refusal,
                None if left == 0 => Verdict::OverBudget,
                None => Verdict::Admit,
            };
        }
        if *verdict == Verdict::Admit {
            left -= 1;
        } else {
            refused.insert(candidate.identity.hash, *verdict);
        }
    }
    verdicts
}
