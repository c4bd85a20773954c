//! G1 and G2: memory to memory.

use super::copy::{Copied, Copier, Item, Lane, Route, Sum};
use super::{Carrier, Settled, Site};
use crate::completion_queue::{Done, Stage};
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use kvbm_plan::{BlockOutcome, BlockTransfer, ChecksumMode, Failure, FailureKind, Tier, TransferPlan};
use std::sync::Arc;

/// The claim on the G2 end of a copy.
enum Claim {
    Read(ReadClaim),
    Write(WriteClaim),
}

/// Moves blocks between G1 and G2, in either direction.
pub(crate) struct MemoryCarrier {
    site: Site,
    host: Arc<HostTier>,
    copier: Copier<Claim>,
    depth: usize,
}

impl MemoryCarrier {
    pub(crate) fn new(site: Site, host: Arc<HostTier>, routes: Vec<Route>, lane: Lane, depth: usize) -> Self {
        let copier = Copier::new(routes, lane, Arc::clone(&site.completions));
        Self { site, host, copier, depth }
    }

    fn claim(&self, plan: &TransferPlan, block: &BlockTransfer) -> Result<Claim, Failure> {
        if self.site.path.dst == Tier::G2 {
            return self.host.write(block.dst.0, &block.identity, plan.layers).map(Claim::Write);
        }
        let mut claim = self.host.read(block.src.0, &block.identity, plan.layers)?;
        let required = plan.checksums == ChecksumMode::Required;
        if plan.compare.is_some() {
            // Damaged bytes are no wrong bytes.
            claim.verify_always()?;
        } else if claim.is_elsewhere() {
            if required && plan.layers.is_none() {
                claim.sum()?;
            }
        } else if required && !self.copier.is_summed_elsewhere(plan) && claim.verify()? {
            self.site.hub.count_verified();
        }
        Ok(Claim::Read(claim))
    }

    /// Settles what the copier finished, plan by plan.
    fn settle(&mut self) {
        let mut groups: Vec<Settled> = Vec::new();
        for (item, result) in self.copier.finished() {
            let bytes = self.copier.bytes(&item.plan);
            let (plan_id, index) = (item.plan.plan_id, item.index);
            let outcome = self.outcome(item, result);
            let bytes = if outcome.is_done() { bytes } else { 0 };
            match groups.last_mut().filter(|group| group.plan_id == plan_id) {
                Some(group) => {
                    group.outcomes.push((index, outcome));
                    group.bytes += bytes;
                }
                None => groups.push(Settled { plan_id, outcomes: vec![(index, outcome)], bytes }),
            }
        }
        for Settled { plan_id, outcomes, bytes } in groups {
            self.site.hub.settle(plan_id, outcomes, bytes);
        }
    }

    fn outcome(&self, item: Item<Claim>, result: Copied) -> BlockOutcome {
        let block = item.plan.blocks[item.index as usize];
        let content = match result {
            Ok(content) => content,
            Err(error) => {
                if let (FailureKind::Differs, Claim::Read(claim)) = (error.kind(), &item.hold) {
                    claim.condemn();
                }
                return self.site.failure(&block, error.kind(), &error.to_string());
            }
        };
        let required = item.plan.checksums == ChecksumMode::Required;
        let checksum = match item.hold {
            Claim::Read(claim) => match content {
                // Of the bytes that a mover has read.
                Some(Sum::Block(found)) if required => claim.check(found).map(|is_verified| {
                    if is_verified {
                        self.site.hub.count_verified();
                    }
                    claim.checksum()
                }),
                _ => Ok(claim.checksum()),
            },
            Claim::Write(claim) => match content {
                Some(Sum::Block(checksum)) if required => {
                    claim.finish_verified(checksum);
                    Ok(Some(checksum))
                }
                Some(Sum::Content(content)) => claim.finish(required, Some(content)),
                _ => claim.finish(required, None),
            },
        };
        match checksum {
            Ok(checksum) => BlockOutcome::Done { checksum: checksum.filter(|_| required).unwrap_or(0) },
            Err(failure) => self.site.failure(&block, failure.kind, &failure.detail),
        }
    }
}

impl Carrier for MemoryCarrier {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.copier.in_flight())
    }

    fn in_flight(&self) -> usize {
        self.copier.in_flight()
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, .. } = portion;
        let mut items = Vec::with_capacity(indices.len());
        let mut failed = Vec::new();
        for index in indices {
            let block = plan.blocks[index as usize];
            match self.claim(&plan, &block) {
                Ok(hold) => items.push(Item {
                    plan: Arc::clone(&plan),
                    index,
                    from: block.src.0,
                    to: block.dst.0,
                    hold,
                }),
                Err(failure) => {
                    failed.push((index, self.site.failure(&block, failure.kind, &failure.detail)));
                }
            }
        }
        self.copier.start(items);
        if !failed.is_empty() {
            self.site.hub.settle(plan.plan_id, failed, 0);
        }
        self.settle();
    }

    fn complete(&mut self, done: Done) {
        match done.result {
            Stage::Copy(result) => self.copier.complete(done.ticket, result),
            Stage::Moved(outcomes) => self.copier.moved(done.ticket, outcomes),
            Stage::Disk(_) | Stage::Volume(_) => {}
        }
        self.settle();
    }

    fn is_parked(&self) -> bool {
        self.copier.is_parked()
    }

    fn retry(&mut self) {
        self.copier.retry();
        self.settle();
    }
}
