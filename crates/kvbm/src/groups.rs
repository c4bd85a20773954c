//! Models with several cache groups: prefixes and onboards over all of them.
//!
//! Each group has blocks of its own under the hashes of the same chain. A prefix counts as far as
//! every group can serve it, so a request sees all groups or none.

use crate::config::Config;
use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::onboard::{OnboardError, Onboarding};
use kvbm_plan::clock::now;
use kvbm_plan::{GroupId, SequenceHash, Tier, deadline_after};
use kvbm_pool::{AllocError, Cached, G1, Prefix, TierMask};
use kvbm_tokens::{BlockChain, ChainOrigin, NamespaceTag};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// The longest prefix that every cache group can serve, with the blocks that each of them needs
/// pinned on their nearest tiers.
#[derive(Debug)]
#[must_use = "dropping a prefix makes its blocks evictable"]
pub struct GroupPrefix {
    /// By group.
    parts: Vec<Prefix>,
    chain: OwnedChain,
}

/// A chain of blocks that outlives its sequence.
#[derive(Clone, Debug)]
struct OwnedChain {
    namespace: NamespaceTag,
    origin: ChainOrigin,
    hashes: Vec<SequenceHash>,
}

impl OwnedChain {
    fn as_chain(&self) -> BlockChain<'_> {
        BlockChain::of_run(self.namespace, self.origin, &self.hashes)
    }
}

impl GroupPrefix {
    pub(crate) fn new(parts: Vec<Prefix>, chain: BlockChain<'_>) -> Self {
        let len = common_len(&parts);
        let chain = OwnedChain {
            namespace: chain.namespace(),
            origin: chain.origin(),
            hashes: chain.hashes()[..len].to_vec(),
        };
        Self { parts, chain }
    }

    /// Blocks of the sequence that the prefix covers, from the first on.
    pub fn len(&self) -> usize {
        self.chain.hashes.len()
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.chain.hashes.is_empty()
    }

    /// What each group has of it, by [`GroupId`]: all of it for full attention, the last blocks for
    /// a sliding window, the last one for state.
    pub fn parts(&self) -> &[Prefix] {
        &self.parts
    }

    /// The parts alone.
    pub fn into_parts(self) -> Vec<Prefix> {
        self.parts
    }
}

/// All parts that are not empty end at the same block.
fn common_len(parts: &[Prefix]) -> usize {
    parts.iter().map(Prefix::len).max().unwrap_or(0)
}

/// What one cache group has of a prefix in G1.
#[derive(Clone, Debug)]
pub struct GroupPart {
    /// Index of the first block in the sequence.
    pub start: usize,
    /// The blocks, from `start` to the end of the prefix.
    pub blocks: Cached<G1>,
}

/// A prefix in G1, verified and pinned, in every cache group.
#[derive(Clone, Debug)]
pub struct GroupBlocks {
    /// Blocks of the sequence that it covers, from the first on.
    pub len: usize,
    /// By [`GroupId`].
    pub parts: Vec<GroupPart>,
}

impl GroupBlocks {
    /// The longest prefix of `chain` that every group has in G1.
    fn of(leader: &Leader, chain: BlockChain<'_>) -> Self {
        let parts = leader.registry.match_groups(chain, TierMask::only(Tier::G1), &[]);
        let len = common_len(&parts);
        let part = |part: Prefix| GroupPart { start: part.start(), blocks: part.into_parts().g1 };
        Self { len, parts: parts.into_iter().map(part).collect() }
    }
}

/// A prefix that did not arrive whole: compute what is missing.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} of {wanted} blocks are in G1 in every cache group: {}",
    arrived.len,
    refused.as_ref().map_or_else(|| FirstOf(failures).to_string(), ToString::to_string)
)]
pub struct GroupOnboardError {
    /// What every group has in G1 now, possibly nothing.
    pub arrived: GroupBlocks,
    /// Blocks of the sequence that were asked for.
    pub wanted: usize,
    /// Blocks that failed, of any group.
    pub failures: Vec<BlockFailure>,
    /// Set when G1 had no room.
    pub refused: Option<AllocError>,
}

/// What is known of the onboard of a group's part.
enum Part {
    Pending(Box<Onboarding>),
    Over(Result<Cached<G1>, OnboardError>),
}

/// A prefix of all cache groups on its way to G1. Resolves by [`wait`](Self::wait) or as a
/// [`Future`]; dropping it cancels as with [`Onboarding`].
#[must_use = "dropping it cancels the onboard"]
pub struct GroupOnboarding {
    leader: Arc<Leader>,
    chain: OwnedChain,
    parts: Vec<Part>,
    deadline: Instant,
}

impl GroupOnboarding {
    pub(crate) fn start(leader: &Arc<Leader>, prefix: GroupPrefix) -> Self {
        let deadline = deadline_after(now(), leader.transfers.settings.transfer_deadline);
        let start = |part| Part::Pending(Box::new(Onboarding::start(leader, part, None)));
        let parts = prefix.parts.into_iter().map(start).collect();
        Self { leader: Arc::clone(leader), chain: prefix.chain, parts, deadline }
    }

    /// Blocks of the sequence that were asked for.
    pub fn len(&self) -> usize {
        self.chain.hashes.len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.chain.hashes.is_empty()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.parts.iter().all(|part| match part {
            Part::Pending(onboarding) => onboarding.is_done(),
            Part::Over(_) => true,
        })
    }

    /// Waits at most the configured transfer deadline. The prefix in G1, verified and pinned, in
    /// every group.
    ///
    /// # Errors
    /// [`GroupOnboardError`] with what every group has of it.
    pub fn wait(self) -> Result<GroupBlocks, GroupOnboardError> {
        let deadline = self.deadline;
        self.wait_until(deadline)
    }

    /// Like [`wait`](Self::wait), until `deadline`.
    ///
    /// # Errors
    /// [`GroupOnboardError`] with what every group has of it.
    pub fn wait_until(mut self, deadline: Instant) -> Result<GroupBlocks, GroupOnboardError> {
        let end = |part| match part {
            Part::Pending(onboarding) => Part::Over(onboarding.wait_until(deadline)),
            over @ Part::Over(_) => over,
        };
        self.parts = std::mem::take(&mut self.parts).into_iter().map(end).collect();
        self.resolve()
    }

    /// All parts are over: what arrived in one group counts as far as the others have it too.
    fn resolve(&mut self) -> Result<GroupBlocks, GroupOnboardError> {
        // Pinned until the common prefix is.
        let parts = std::mem::take(&mut self.parts);
        let arrived = GroupBlocks::of(&self.leader, self.chain.as_chain());
        let wanted = self.len();
        if arrived.len == wanted {
            return Ok(arrived);
        }
        let (mut failures, mut refused) = (Vec::new(), None);
        for part in parts {
            if let Part::Over(Err(error)) = part {
                failures.extend(error.failures);
                refused = refused.or(error.refused);
            }
        }
        Err(GroupOnboardError { arrived, wanted, failures, refused })
    }
}

impl Future for GroupOnboarding {
    type Output = Result<GroupBlocks, GroupOnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut pending = false;
        for part in &mut self.parts {
            if let Part::Pending(onboarding) = part {
                match Pin::new(&mut **onboarding).poll(context) {
                    Poll::Ready(result) => *part = Part::Over(result),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(self.resolve()) }
    }
}

/// Which blocks of a request of `blocks` blocks a group keeps for later requests, as ranges of
/// indices. Empty for a group that there is not.
pub(crate) fn kept_blocks(config: &Config, group: GroupId, blocks: usize) -> Vec<Range<usize>> {
    let model = &config.model;
    let groups = model.cache_groups();
    let Some(group) = groups.get(usize::from(group.0)).filter(|_| blocks > 0) else { return Vec::new() };
    let Some(needed) = group.blocks_needed(model.page_size) else {
        return std::iter::once(0..blocks).collect();
    };
    let every = config.policy.checkpoint_every as usize;
    let ends = (1..).map_while(|at| Some(every * at).filter(|end| every > 0 && *end < blocks));
    let mut kept: Vec<Range<usize>> = Vec::new();
    for end in ends.chain([blocks]) {
        let start = end.saturating_sub(needed);
        match kept.last_mut().filter(|last| last.end >= start) {
            Some(last) => last.end = end,
            None => kept.push(start..end),
        }
    }
    kept
}
