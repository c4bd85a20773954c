//! G2 to G4.

use super::objects::ObjectWriter;
use super::{Arrived, Hands, Mover, Names, VolumeOrder, no_result};
use crate::completion_queue::{Done, Stage};
use crate::config::{PathConfig, VolumeTier, WorkerConfig};
use crate::damaged_objects::DamagedObjects;
use crate::error::StartError;
use crate::execute::{Carrier, Site, disk::done};
use crate::host::{HostTier, ReadClaim};
use crate::schedule::Portion;
use kvbm_plan::{BlockIdentity, Failure, TransferPlan};
use kvbm_volume::Volume;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Moves blocks from host memory to volumes.
pub(crate) struct VolumeWriter {
    site: Site,
    host: Arc<HostTier>,
    hands: Hands<ReadClaim>,
    /// Indices of the blocks in the threads' hands, by ticket.
    flying: HashMap<u64, (Arc<TransferPlan>, Vec<u32>)>,
    in_flight: usize,
    depth: usize,
    /// By cache group.
    block_bytes: Vec<u64>,
}

impl VolumeWriter {
    pub(crate) fn start(
        site: Site,
        host: Arc<HostTier>,
        tier: &VolumeTier,
        damaged: &Arc<DamagedObjects>,
        config: &WorkerConfig,
        limits: PathConfig,
    ) -> Result<Self, StartError> {
        let depth = limits.depth_blocks;
        let orders = host.layouts().map(|bound| VolumeOrder::of(bound.layout().as_ref()));
        let orders: Vec<_> = orders.collect::<Result<_, _>>()?;
        let block_bytes = orders.iter().map(VolumeOrder::bytes).collect();
        let objects = ObjectWriter::new(Names::new(config, tier.clone()), Arc::clone(damaged));
        let puts = Puts { orders, objects };
        let hands = Hands::new(&site, tier, config, depth, puts);
        Ok(Self { site, host, hands, flying: HashMap::new(), in_flight: 0, depth, block_bytes })
    }
}

impl Carrier for VolumeWriter {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.in_flight)
    }

    fn room_for(&self, plan: &TransferPlan) -> usize {
        self.hands.room_for(plan, self.room())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, deadline } = portion;
        let (mut taken, mut blocks, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for index in indices {
            let block = plan.blocks[index as usize];
            match self.host.read(block.src.0, &block.identity, None) {
                Ok(claim) => {
                    taken.push(index);
                    blocks.push((block.identity, claim));
                }
                Err(Failure { kind, detail }) => {
                    failed.push((index, self.site.failure(&block, kind, &detail)));
                }
            }
        }
        if !failed.is_empty() {
            self.site.hub.settle(plan.plan_id, failed, 0);
        }
        if !blocks.is_empty() {
            self.in_flight += blocks.len();
            for (ticket, count) in self.hands.send(&plan, deadline, blocks) {
                let rest = taken.split_off(count);
                self.flying.insert(ticket, (Arc::clone(&plan), std::mem::replace(&mut taken, rest)));
            }
        }
    }

    fn complete(&mut self, message: Done) {
        let Stage::Volume(results) = message.result else { return };
        let Some((plan, indices)) = self.flying.remove(&message.ticket) else { return };
        self.in_flight -= indices.len();
        self.hands.returned(&plan, indices.len());
        let stored = indices.iter().zip(&results).filter(|(_, result)| result.is_ok());
        let group = |index: u32| usize::from(plan.blocks[index as usize].identity.group.0);
        let bytes = stored.map(|(&index, _)| self.block_bytes[group(index)]).sum();
        let outcome = |(index, result): (u32, Arrived)| match result {
            Ok(checksum) => (index, done(&plan, checksum)),
            Err(Failure { kind, detail }) => {
                (index, self.site.failure(&plan.blocks[index as usize], kind, &detail))
            }
        };
        let outcomes = indices.into_iter().zip(results).map(outcome).collect();
        self.site.hub.settle(plan.plan_id, outcomes, bytes);
    }

    fn is_parked(&self) -> bool {
        false
    }

    fn retry(&mut self) {}
}

struct Puts {
    /// By cache group.
    orders: Vec<VolumeOrder>,
    objects: ObjectWriter,
}

impl Puts {
    /// How a block lies in its object: plans of groups that there are not are not admitted.
    fn order(&self, identity: &BlockIdentity) -> &VolumeOrder {
        &self.orders[usize::from(identity.group.0)]
    }
}

impl Mover<ReadClaim> for Puts {
    fn transfer(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, ReadClaim)>,
        deadline: Instant,
    ) -> Vec<Arrived> {
        let gather = |(identity, claim): &(BlockIdentity, ReadClaim)| {
            // Memory that changed since it was filled never leaves this machine.
            claim.verify_always()?;
            claim.gather(&self.order(identity).fragments)
        };
        let payloads: Vec<Result<Vec<u8>, Failure>> = blocks.iter().map(gather).collect();
        let sound = blocks.iter().zip(&payloads).filter_map(|((identity, _), payload)| {
            Some((*identity, self.order(identity).form, &**payload.as_ref().ok()?))
        });
        let mut stored = self.objects.write(volume, &sound.collect::<Vec<_>>(), deadline).into_iter();
        let settle = |((_, claim), payload): ((BlockIdentity, ReadClaim), &Result<Vec<u8>, Failure>)| {
            payload.as_ref().map_err(Clone::clone)?;
            stored.next().unwrap_or_else(|| Err(no_result(volume)))?;
            Ok(claim.checksum().unwrap_or(0))
        };
        blocks.into_iter().zip(&payloads).map(settle).collect()
    }
}
