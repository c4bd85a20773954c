//! What a ticket holds: blocks of each cache group that are pinned, then their loads.
//!
//! A model whose layers are alike has one part. With several groups a promise is kept in all of
//! them or in none: a prefix whose window or state is missing is of no use.

use super::{Engine, EngineError, EngineOnboarding, LoadOptions};
use crate::error::BlockFailure;
use crate::leader::{Leader, leave_out_slow};
use crate::volume::Probe;
use kvbm_plan::{BlockId, Comparison, Failure, FailureKind, Path, Tier};
use kvbm_pool::{Prefix, PrefixBlock};
use kvbm_tokens::BlockChain;
use std::ops::Range;
use std::sync::Arc;
use std::task::Context;
use std::time::Instant;

/// Pinned blocks of a request, by cache group.
pub(super) struct PinnedParts {
    parts: Vec<Prefix>,
    /// The first block of the sequence that the engine lacks.
    first: usize,
    /// Whether a part of the blocks is of no use: there are several groups, or a window or state.
    is_whole: bool,
}

impl PinnedParts {
    /// What `prefix` has from block `first` on, without what would arrive later than it is
    /// computed.
    pub(super) fn of(leader: &Leader, mut prefix: Prefix, first: usize) -> Self {
        let mut prefix = prefix.split_off(first);
        leave_out_slow(leader, &mut prefix, 0, Tier::G1);
        let is_whole = !leader.needs_all(prefix.group());
        Self { parts: vec![prefix], first, is_whole }
    }

    /// The same of the longest prefix of `chain` that every cache group can serve. The group that
    /// needs each block says how far loading is the faster way. Also whether peers or volumes were
    /// asked for more of it, or would be.
    pub(super) fn of_groups(
        leader: &Leader,
        chain: BlockChain<'_>,
        first: usize,
        probe: Probe,
    ) -> (Self, bool) {
        let lacking = |parts: Vec<Prefix>| -> Vec<Prefix> {
            parts.into_iter().map(|mut part| part.split_off(first)).collect()
        };
        let (parts, asks, known) = leader.find_groups(chain, probe);
        let mut parts = lacking(parts);
        if let Some(full) = parts.get_mut(usize::from(leader.full_group().0)) {
            let whole = full.len();
            leave_out_slow(leader, full, 0, Tier::G1);
            let kept = full.len();
            if kept < whole {
                // Pins of the longer one end first.
                drop(parts);
                parts = lacking(leader.match_known(chain.slice(0..kept), &known));
            }
        }
        (Self { parts, first, is_whole: true }, asks)
    }

    /// Blocks of the sequence, from the first that the engine lacks on.
    pub(super) fn len(&self) -> usize {
        let ends = self.parts.iter().filter(|part| !part.is_empty()).map(Prefix::len);
        ends.max().unwrap_or(self.first) - self.first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.iter().all(Prefix::is_empty)
    }

    /// Whether a tier that it pins has lost what it held.
    pub(super) fn is_lost(&self) -> bool {
        self.parts.iter().any(|part| part.lost().is_some())
    }

    /// Pinned blocks of all groups on `tier`.
    pub(super) fn count(&self, tier: Tier) -> usize {
        self.parts.iter().map(|part| part.count(tier)).sum()
    }

    /// Blocks of the sequence by tier: each counts on the farthest tier that a group has it on. One
    /// that no group needs counts where the next one does.
    pub(super) fn by_tier(&self) -> [usize; 4] {
        let mut tiers = vec![None; self.len()];
        for part in &self.parts {
            let places = tiers.iter_mut().skip(part.start().saturating_sub(self.first));
            for (place, block) in places.zip(part.blocks()) {
                *place = (*place).max(Some(block.tier));
            }
        }
        let (mut counts, mut tier) = ([0; 4], Tier::G2);
        for found in tiers.into_iter().rev() {
            tier = found.unwrap_or(tier);
            counts[tier.index()] += 1;
        }
        counts
    }

    /// For each group the blocks of the sequence that are pinned.
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        self.parts.iter().map(|part| part.start()..part.len()).collect()
    }

    /// Pinned blocks of each group.
    pub(super) fn blocks(&self) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(|part| part.blocks().len())
    }

    /// Cache groups.
    pub(super) fn groups(&self) -> usize {
        self.parts.len()
    }

    /// Keeps the first `blocks` blocks, where a part of them is of use.
    pub(super) fn truncate(&mut self, blocks: usize) {
        if let ([part], false) = (&mut self.parts[..], self.is_whole) {
            part.truncate(part.start() + blocks);
        }
    }

    /// Keeps the first blocks, no more on each tier with slots than there is room for, and gives
    /// the rest back. All or none where a part of them is of no use.
    pub(super) fn fit(&mut self, room: [u32; 3]) -> Self {
        let mut left = room;
        let mut fits = |block: &&PrefixBlock| match left.get_mut(block.tier.index()) {
            Some(left) => left.checked_sub(1).map(|less| *left = less).is_some(),
            None => true,
        };
        let Self { parts, first, is_whole } = self;
        let (first, is_whole) = (*first, *is_whole);
        if let ([part], false) = (&mut parts[..], is_whole) {
            let kept = part.blocks().iter().take_while(&mut fits).count();
            let rest = part.split_off(part.start() + kept);
            return Self { parts: vec![rest], first: first + kept, is_whole };
        }
        let fit = parts.iter().all(|part| part.blocks().iter().all(|block| fits(&block)));
        Self { parts: if fit { Vec::new() } else { std::mem::take(parts) }, first, is_whole }
    }

    /// Leaves out what is not on G2 or G3, and what follows it.
    pub(super) fn keep_near(&mut self) {
        let is_near = |block: &&PrefixBlock| matches!(block.tier, Tier::G2 | Tier::G3);
        let near = self.parts.iter().map(|part| part.blocks().iter().take_while(is_near).count());
        let near = near.min().unwrap_or(0);
        self.truncate(near);
    }

    /// Starts the loads into `ids`, those of each group, all or none.
    pub(super) fn load(
        self,
        engine: &Engine,
        leader: &Arc<Leader>,
        ids: &[&[BlockId]],
        options: LoadOptions,
        compare: Option<Comparison>,
    ) -> Result<Load, EngineError> {
        let (wanted, has_groups, is_whole) = (self.len(), self.groups() > 1, self.is_whole);
        if has_groups {
            // Before one of them starts.
            let all = ids.concat();
            engine.check(&all)?;
            let busy = engine.blocks.busy(&all);
            if !busy.is_empty() {
                return Err(EngineError::Busy(busy));
            }
        }
        let mut load = Load { parts: Vec::new(), wanted, is_whole, refused: Vec::new() };
        for (part, ids) in self.parts.into_iter().zip(ids) {
            if part.is_empty() {
                continue;
            }
            let sources = if has_groups { failed_sources(&part) } else { Vec::new() };
            match engine.start_onboard(leader, part, ids, options, compare) {
                Ok(onboarding) => load.parts.push(onboarding),
                Err(error) if load.parts.is_empty() => return Err(error),
                Err(error) => load.refuse(&sources, &error),
            }
        }
        Ok(load)
    }
}

/// What says which blocks a group's load did not bring, should it not start.
fn failed_sources(part: &Prefix) -> Vec<BlockFailure> {
    let failure = Failure::new(FailureKind::Cancelled, "");
    let of = |(identity, block): (_, &PrefixBlock)| BlockFailure {
        identity,
        path: Path::new(block.tier, Tier::G1),
        failure: failure.clone(),
    };
    part.identities().into_iter().zip(part.blocks()).map(of).collect()
}

/// Blocks of a request on their way.
pub(super) struct Load {
    /// By group.
    parts: Vec<EngineOnboarding>,
    /// Blocks of the sequence.
    wanted: usize,
    /// Whether a part of them is of no use.
    is_whole: bool,
    /// Blocks of groups whose load did not start.
    refused: Vec<BlockFailure>,
}

impl Load {
    /// The load of a group does not start, so those of the others are of no use.
    fn refuse(&mut self, sources: &[BlockFailure], error: &EngineError) {
        self.cancel();
        let failure = Failure::new(FailureKind::Cancelled, format!("the load did not start: {error}"));
        let of = |source: &BlockFailure| BlockFailure { failure: failure.clone(), ..source.clone() };
        self.refused.extend(sources.iter().map(of));
    }

    /// Whether the outcome is known, and no copy writes to the blocks any more.
    pub(super) fn is_done(&self) -> bool {
        self.parts.iter().all(EngineOnboarding::is_done)
    }

    pub(super) fn layer_ready(&self, layer: u32) -> bool {
        self.refused.is_empty() && self.parts.iter().all(|part| part.layer_ready(layer))
    }

    /// What waits until it is known whether a layer of all parts arrives.
    pub(super) fn layer_wait(&self) -> impl Fn(u32, Instant) + use<> {
        let parts: Vec<_> = self.parts.iter().map(EngineOnboarding::layer_wait).collect();
        move |layer, deadline| {
            for wait in &parts {
                wait(layer, deadline);
            }
        }
    }

    /// Of each part that has plans.
    pub(super) fn tags(&self) -> Vec<u64> {
        self.parts.iter().filter_map(EngineOnboarding::tag).collect()
    }

    pub(super) fn cancel(&mut self) {
        self.parts.iter_mut().for_each(EngineOnboarding::cancel);
    }

    /// Wakes the waker of `context` when [`is_done`](Self::is_done) may have become true.
    pub(super) fn notify(&self, context: &Context<'_>) {
        self.parts.iter().for_each(|part| part.notify(context));
    }

    /// How many blocks arrived of how many, and what failed. All blocks or none, where a part of
    /// them is of no use. Waits where it is not [done](Self::is_done).
    pub(super) fn wait(self) -> (usize, usize, Vec<BlockFailure>) {
        let (mut arrived, mut failures) = (self.wanted, self.refused);
        if !failures.is_empty() {
            arrived = 0;
        }
        for part in self.parts {
            if let Err(error) = part.wait() {
                arrived = if self.is_whole { 0 } else { error.arrived };
                failures.extend(error.failures);
            }
        }
        (arrived, self.wanted, failures)
    }
}
