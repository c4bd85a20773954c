//! Which blocks go down: the triggers offer them, the admission policy decides. Runs on the thread
//! of the offloads.

use super::edge::{Batch, Edge};
use super::{Interval, Offload};
use crate::admission::{self, Candidate, Costs, Offer, Trigger, Verdict};
use crate::metrics::DropReason;
use crate::transfers::BlockCosts;
use kvbm_plan::{Path, Tier};
use kvbm_pool::Pinned;
use std::sync::Arc;

/// A share in the accounts. It ends also where a policy panics.
struct Open<'a> {
    offload: &'a Offload,
    interval: Interval,
    blocks: usize,
    /// The edge whose blocks are being decided about, if they are.
    deciding: Option<&'a Edge>,
}

impl Open<'_> {
    fn decided(&mut self) {
        if let Some(edge) = self.deciding.take() {
            edge.decided(self.blocks);
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.decided();
        self.offload.accounts.remove(self.interval, self.blocks);
    }
}

impl Offload {
    /// Decides about what is marked, then starts what may start.
    pub(super) fn run(self: &Arc<Self>) {
        let marks = std::mem::take(&mut *self.marks.lock());
        let open = |interval: Option<Interval>| {
            interval.map(|interval| Open { offload: self, interval, blocks: 1, deciding: None })
        };
        let tiers = marks.tiers.map(open);
        let iteration = open(marks.iteration);
        // Taken before anything is decided: should a policy panic, the accounts of all of them end.
        let undecided: Vec<_> = self.edges.iter().flat_map(|edge| self.take_undecided(edge)).collect();
        for (edge, mut open, blocks) in undecided {
            let blocks = self.without_copied(edge, blocks);
            let admitted = self.admitted(edge, Trigger::WriteThrough, blocks);
            open.decided();
            self.enqueue(edge, open.interval, admitted);
        }
        for edge in &self.edges {
            self.requeue_waiting(edge);
        }
        for (tier, open) in Tier::ALL.into_iter().zip(&tiers) {
            let Some(open) = open else { continue };
            for edge in self.edges_from(tier) {
                self.check_watermark(edge, open.interval);
                self.check_victims(edge, open.interval);
            }
        }
        if let Some(open) = &iteration {
            for edge in self.open_edges() {
                self.check_watermark(edge, open.interval);
                self.check_idle(edge, open.interval);
            }
        }
        self.start_queued();
    }

    fn take_undecided<'a>(&'a self, edge: &'a Edge) -> impl Iterator<Item = (&'a Edge, Open<'a>, Pinned)> {
        edge.take_undecided().into_iter().map(move |Batch { blocks, interval }| {
            let open = Open { offload: self, interval, blocks: blocks.len(), deciding: Some(edge) };
            (edge, open, blocks)
        })
    }

    /// `blocks` less the first ones that have a copy below: the next tier holds the beginnings of
    /// chains.
    pub(super) fn without_copied(&self, edge: &Edge, mut blocks: Pinned) -> Pinned {
        let copied = if edge.path.dst == Tier::G4 {
            self.volumes.awaited_prefix(&blocks.identities())
        } else {
            blocks.prefix_on(edge.path.dst)
        };
        if copied == 0 {
            return blocks;
        }
        let rest = blocks.split_off(copied);
        drop(blocks.into_transfer());
        rest
    }

    fn check_watermark(&self, edge: &Edge, interval: Interval) {
        if edge.triggers.watermark >= 1.0 {
            return;
        }
        let src = edge.path.src;
        let occupied = self.registry.not_copied_lower(src) as usize;
        let excess = edge.excess(occupied, self.registry.capacity(src) as usize);
        if excess == 0 {
            return;
        }
        let backlog = edge.backlog();
        let wanted = excess.saturating_sub(backlog.queued_blocks + backlog.running_blocks);
        self.offload_coldest(edge, interval, wanted, 0, Trigger::Watermark);
    }

    /// Copies what eviction will take next. The watermark alone does not ensure that: blocks that
    /// came up from the lower tier count as copied, wherever they are in the order.
    fn check_victims(&self, edge: &Edge, interval: Interval) {
        let share = edge.triggers.ahead_share;
        let wanted = edge.choice(edge.room());
        if share > 0.0 && wanted > 0 {
            let Path { src, dst } = edge.path;
            // The registry does not know what is on volumes: where that is the only edge, nothing
            // counts as copied.
            let not_on = if dst == Tier::G4 { Tier::G3 } else { dst };
            let victims = self.registry.uncopied_victims(src, share, wanted, not_on);
            if dst == Tier::G3 {
                self.keep_on_volumes(interval, &victims);
            }
            self.enqueue(edge, interval, self.admitted(edge, Trigger::Eviction, victims));
        }
    }

    /// What is about to leave memory also goes to a volume, where the configuration says so.
    fn keep_on_volumes(&self, interval: Interval, victims: &Pinned) {
        let keeps = self.volumes.policy.keeps_victims && !victims.is_empty();
        if let Some(edge) = self.open_edges().find(|edge| keeps && edge.path.dst == Tier::G4) {
            let blocks = self.without_copied(edge, victims.clone());
            self.enqueue(edge, interval, self.admitted(edge, Trigger::Eviction, blocks));
        }
    }

    fn check_idle(&self, edge: &Edge, interval: Interval) {
        if edge.triggers.idle_iterations > 0 {
            // A part at a time, so that an idle hour does not fill the queue for a busy minute.
            let wanted = (edge.limit / 4).max(1);
            self.offload_coldest(edge, interval, wanted, edge.triggers.idle_iterations, Trigger::Idle);
        }
    }

    fn offload_coldest(
        &self,
        edge: &Edge,
        interval: Interval,
        wanted: usize,
        min_idle: u64,
        trigger: Trigger,
    ) {
        let wanted = edge.choice(wanted.min(edge.room()));
        if wanted > 0 {
            let Path { src, dst } = edge.path;
            let coldest = self.registry.coldest(src, wanted, dst, min_idle);
            self.enqueue(edge, interval, self.admitted(edge, trigger, coldest));
        }
    }

    /// What the policy admits of `blocks`, which are in the order of an offer. The others are
    /// counted and let go.
    fn admitted(&self, edge: &Edge, trigger: Trigger, blocks: Pinned) -> Pinned {
        if blocks.is_empty() {
            return blocks;
        }
        let costs = self.costs(edge, blocks.len());
        let candidates: Vec<Candidate> = blocks
            .identities()
            .into_iter()
            .zip(blocks.expected_reuse())
            .map(|(identity, expected_reuse)| Candidate { identity, expected_reuse })
            .collect();
        let offer = Offer { path: edge.path, trigger, blocks: &candidates, costs };
        let verdicts = admission::judge(&*self.admission, &offer);
        self.count_refusals(edge, trigger, &verdicts);
        keep_admitted(blocks, &verdicts)
    }

    fn costs(&self, edge: &Edge, wanted: usize) -> Costs {
        let BlockCosts { bytes, tokens, recompute } = self.transfers.block_costs();
        let back = Path::new(edge.path.dst, Tier::G1);
        Costs {
            block_bytes: bytes,
            block_tokens: tokens,
            recompute,
            read_back: self.transfers.time_per_block(back),
            write_budget: edge.wear.as_ref().map(|_| edge.affordable(wanted)),
        }
    }

    /// What a background trigger has passed over for the budget's sake, it will offer again: that
    /// is not given up.
    fn count_refusals(&self, edge: &Edge, trigger: Trigger, verdicts: &[Verdict]) {
        let count = |wanted| verdicts.iter().filter(|verdict| **verdict == wanted).count() as u64;
        let path = self.metrics.path(edge.path);
        path.dropped(DropReason::NotWorthIt).add(count(Verdict::Refuse));
        if matches!(trigger, Trigger::WriteThrough | Trigger::Eviction) {
            path.dropped(DropReason::WearBudget).add(count(Verdict::OverBudget));
        }
    }
}

/// The admitted ones of `blocks`; the others are let go.
fn keep_admitted(mut blocks: Pinned, verdicts: &[Verdict]) -> Pinned {
    if verdicts.iter().all(|verdict| *verdict == Verdict::Admit) {
        return blocks;
    }
    let mut kept = blocks.split_off(blocks.len());
    let mut runs: Vec<Pinned> = Vec::new();
    let mut end = verdicts.len();
    while end > 0 {
        let admit = verdicts[end - 1] == Verdict::Admit;
        let start = verdicts[..end].iter().rposition(|verdict| (*verdict == Verdict::Admit) != admit);
        let start = start.map_or(0, |at| at + 1);
        let run = blocks.split_off(start);
        if admit {
            runs.push(run);
        } else {
            drop(run.into_transfer());
        }
        end = start;
    }
    for run in runs.into_iter().rev() {
        // Of the same registry, tier and kind of pin, so it is never refused.
        let _refused = kept.append(run);
    }
    kept
}
