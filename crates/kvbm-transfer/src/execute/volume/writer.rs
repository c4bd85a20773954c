//! Host memory to G4.

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

/// Moves blocks from G2 to volumes.
pub(crate) struct VolumeWriter {
    site: Site,
    host: Arc<HostTier>,
    puts: VolumePuts<ReadClaim>,
    depth: usize,
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
        let puts = VolumePuts::new(site.clone(), &host, tier, damaged, config, depth)?;
        Ok(Self { site, host, puts, depth })
    }
}

impl Carrier for VolumeWriter {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.in_flight())
    }

    fn room_for(&self, plan: &TransferPlan) -> usize {
        self.puts.room_for(plan, self.room())
    }

    fn in_flight(&self) -> usize {
        self.puts.in_flight()
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, deadline } = portion;
        let (mut claimed, mut failed) = (Vec::new(), Vec::new());
        for index in indices {
            let block = plan.blocks[index as usize];
            match self.host.read(block.src.0, &block.identity, None) {
                Ok(claim) => claimed.push((index, claim)),
                Err(Failure { kind, detail }) => {
                    failed.push((index, self.site.failure(&block, kind, &detail)));
                }
            }
        }
        self.site.settle(&plan, failed, 0);
        self.puts.reserve(&plan, claimed.len());
        self.puts.submit(&plan, claimed, deadline);
    }

    fn complete(&mut self, message: Done) {
        if let Stage::Volume(results) = message.result {
            self.puts.over(message.ticket, results);
        }
    }

    fn is_parked(&self) -> bool {
        false
    }

    fn retry(&mut self) {}
}

/// Blocks of host memory, claimed as `C`, in the hands of the threads of their volumes.
pub(super) struct VolumePuts<C> {
    site: Site,
    hands: Hands<C>,
    /// Indices of the blocks, by ticket.
    flying: HashMap<u64, (Arc<TransferPlan>, Vec<u32>)>,
    in_flight: usize,
    /// By cache group.
    block_bytes: Vec<u64>,
}

impl<C: AsRef<ReadClaim> + Send + 'static> VolumePuts<C> {
    /// `depth`: blocks that are under way at most.
    pub(super) fn new(
        site: Site,
        host: &HostTier,
        tier: &VolumeTier,
        damaged: &Arc<DamagedObjects>,
        config: &WorkerConfig,
        depth: usize,
    ) -> Result<Self, StartError> {
        let orders = host.layouts().map(|bound| VolumeOrder::of(bound.layout().as_ref()));
        let orders: Vec<_> = orders.collect::<Result<_, _>>()?;
        // A rank that does not write moves no bytes.
        let block_bytes = orders.iter().map(|order| if tier.writes { order.bytes() } else { 0 }).collect();
        let objects = ObjectWriter::new(Names::new(config, tier.clone()), Arc::clone(damaged));
        let hands = Hands::new(&site, tier, config, depth, Puts { orders, objects });
        Ok(Self { site, hands, flying: HashMap::new(), in_flight: 0, block_bytes })
    }

    /// Blocks of `plan` that may be reserved while there is room for `free`.
    pub(super) fn room_for(&self, plan: &TransferPlan, free: usize) -> usize {
        self.hands.room_for(plan, free)
    }

    /// Blocks handed over and not settled.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// So many blocks of `plan` will be handed over, or given back.
    pub(super) fn reserve(&mut self, plan: &TransferPlan, blocks: usize) {
        self.hands.reserve(plan, blocks);
    }

    /// So many reserved blocks of `plan` are not handed over.
    pub(super) fn give_back(&mut self, plan: &TransferPlan, blocks: usize) {
        self.hands.returned(plan, blocks);
    }

    /// Hands over reserved blocks of `plan`: index and claim of each.
    pub(super) fn submit(
        &mut self,
        plan: &Arc<TransferPlan>,
        claimed: Vec<(u32, C)>,
        deadline: Option<Instant>,
    ) {
        if claimed.is_empty() {
            return;
        }
        self.in_flight += claimed.len();
        let with_identity = |(index, claim): (u32, C)| {
            let identity = plan.blocks[index as usize].identity;
            (index, (identity, claim))
        };
        let (mut indices, blocks): (Vec<_>, Vec<_>) = claimed.into_iter().map(with_identity).unzip();
        for (ticket, count) in self.hands.send(plan, deadline, blocks) {
            let rest = indices.split_off(count);
            self.flying.insert(ticket, (Arc::clone(plan), std::mem::replace(&mut indices, rest)));
        }
    }

    /// A task of the threads is over: settles its blocks.
    pub(super) fn over(&mut self, ticket: u64, results: Vec<Arrived>) {
        let Some((plan, indices)) = self.flying.remove(&ticket) else { return };
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
        self.site.settle(&plan, outcomes, bytes);
    }
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

impl<C: AsRef<ReadClaim> + Send + 'static> Mover<C> for Puts {
    fn transfer(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, C)>,
        deadline: Instant,
    ) -> Vec<Arrived> {
        if !self.objects.writes() {
            // Another rank does, with the same bytes: the leader compares the checksums.
            return blocks.iter().map(|(_, claim)| Ok(claim.as_ref().checksum().unwrap_or(0))).collect();
        }
        let gather = |(identity, claim): &(BlockIdentity, C)| {
            let claim = claim.as_ref();
            // Memory that changed since it was filled never leaves this machine.
            claim.verify_always()?;
            claim.gather(&self.order(identity).fragments)
        };
        let payloads: Vec<Result<Vec<u8>, Failure>> = blocks.iter().map(gather).collect();
        let sound = blocks.iter().zip(&payloads).filter_map(|((identity, _), payload)| {
            Some((*identity, self.order(identity).form, &**payload.as_ref().ok()?))
        });
        let mut stored = self.objects.write(volume, &sound.collect::<Vec<_>>(), deadline).into_iter();
        let settle = |((_, claim), payload): ((BlockIdentity, C), &Result<Vec<u8>, Failure>)| {
            payload.as_ref().map_err(Clone::clone)?;
            stored.next().unwrap_or_else(|| Err(no_result(volume)))?;
            Ok(claim.as_ref().checksum().unwrap_or(0))
        };
        blocks.into_iter().zip(&payloads).map(settle).collect()
    }
}
