//! G4 to G1: an object is read and verified, lands in a slot of a staging ring outside G2, and goes to the device from there.

use super::{Arrived, Crew, Mover, Names, VolumeOrder, no_result, told};
use crate::config::{VolumeTier, WorkerConfig};
use crate::error::StartError;
use crate::execute::copy::{Copier, Item};
use crate::execute::staged::{Staged, settle_copies};
use crate::execute::{Carrier, Done, Lane, Route, Site, Stage};
use crate::host::{each_fragment, host_regions};
use crate::schedule::Portion;
use kvbm_device::HostRegion;
use kvbm_disk::{BlockChecksum, ContentCrc};
use kvbm_layout::{FragmentList, Selection};
use kvbm_plan::{BlockIdentity, Failure, FailureKind, TransferPlan};
use kvbm_storage::BoundLayout;
use kvbm_volume::{GetRequest, Volume};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Blocks that the threads read, by ticket: index and slot of each.
type Reading = HashMap<u64, (Arc<TransferPlan>, Vec<(u32, u32)>)>;

/// Moves blocks from volumes to G1. Each slot of its ring belongs to one block from the read until the copy is over.
pub(crate) struct VolumeReader {
    site: Site,
    free: Vec<u32>,
    crew: Crew<u32>,
    reading: Reading,
    in_flight: usize,
    copier: Copier<Staged>,
    block_bytes: u64,
}

impl VolumeReader {
    /// `ring` is host memory whose blocks are laid out like slots of the disk; all its slots are this carrier's.
    pub(crate) fn start(
        site: Site,
        ring: &BoundLayout,
        tier: &VolumeTier,
        route: Route,
        lane: Lane,
        config: &WorkerConfig,
    ) -> Result<Self, StartError> {
        let failed = |reason: String| StartError::Staging { blocks: ring.num_blocks(), reason };
        let layout = ring.layout().as_ref();
        let gets = Gets {
            order: VolumeOrder::of(layout)?,
            names: Names::new(config, tier.clone()),
            regions: host_regions(ring).ok_or_else(|| failed("the ring is not host memory".into()))?,
            on_disk: FragmentList::between(layout, layout, &Selection::all())
                .map_err(|error| failed(error.to_string()))?,
            sums: BlockChecksum::new(config.namespace),
        };
        let block_bytes = gets.order.bytes();
        let crew = Crew::start(&site, tier, config, ring.num_blocks() as usize, gets)?;
        let copier = Copier::new(route, lane, site.done.clone());
        let free = (0..ring.num_blocks()).rev().collect();
        Ok(Self { site, free, crew, reading: HashMap::new(), in_flight: 0, copier, block_bytes })
    }

    fn read_over(&mut self, ticket: u64, results: Vec<Arrived>) {
        let Some((plan, places)) = self.reading.remove(&ticket) else { return };
        self.in_flight -= places.len();
        let (mut items, mut failed) = (Vec::new(), Vec::new());
        for ((index, slot), result) in places.into_iter().zip(results) {
            let block = plan.blocks[index as usize];
            match result {
                Ok(checksum) => {
                    let hold = Staged { slot, checksum, bytes: self.block_bytes };
                    items.push(Item { plan: Arc::clone(&plan), index, from: slot, to: block.dst.0, hold });
                }
                Err(Failure { kind, detail }) => {
                    self.free.push(slot);
                    failed.push((index, self.site.failure(&block, kind, &detail)));
                }
            }
        }
        if !failed.is_empty() {
            self.site.hub.settle(plan.plan_id, failed, 0);
        }
        if !items.is_empty() {
            self.copier.start(items);
        }
    }
}

impl Carrier for VolumeReader {
    fn room(&self) -> usize {
        self.free.len()
    }

    fn in_flight(&self) -> usize {
        self.in_flight + self.copier.in_flight()
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, deadline } = portion;
        let (mut places, mut blocks) = (Vec::new(), Vec::new());
        for index in indices {
            let block = plan.blocks[index as usize];
            let Some(slot) = self.free.pop() else {
                let outcome = self.site.failure(&block, FailureKind::QueueFull, "the staging ring is full");
                self.site.settle_one(&plan, index, outcome, 0);
                continue;
            };
            places.push((index, slot));
            blocks.push((block.identity, slot));
        }
        if !blocks.is_empty() {
            self.in_flight += blocks.len();
            let ticket = self.crew.send(&plan, deadline, blocks);
            self.reading.insert(ticket, (plan, places));
        }
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Volume(results) => self.read_over(message.ticket, results),
            Stage::Copy(result) => self.copier.complete(message.ticket, result),
            Stage::Disk(_) => {}
        }
        settle_copies(&self.site, &mut self.copier, &mut self.free);
    }

    fn is_parked(&self) -> bool {
        self.copier.is_parked()
    }

    fn retry(&mut self) {
        self.copier.retry();
        settle_copies(&self.site, &mut self.copier, &mut self.free);
    }
}

struct Gets {
    order: VolumeOrder,
    names: Names,
    /// The ring.
    regions: Vec<HostRegion>,
    /// Its slots, in the byte order that checksums are computed in.
    on_disk: FragmentList,
    sums: BlockChecksum,
}

impl Gets {
    /// Puts a verified payload into its slot. The block's checksum.
    fn land(&self, identity: &BlockIdentity, slot: u32, payload: &[u8]) -> Arrived {
        let failed = |why: String| {
            Failure::new(FailureKind::Unsupported, format!("slot {slot} of the staging ring: {why}"))
        };
        each_fragment(&self.regions, &self.order.fragments, slot, |region, offset, place| {
            region.write_at(offset, &payload[place])
        })
        .map_err(failed)?;
        let mut content = ContentCrc::new();
        let mut bytes = Vec::new();
        each_fragment(&self.regions, &self.on_disk, slot, |region, offset, place| {
            bytes.resize(place.len(), 0);
            region.read_at(offset, &mut bytes)?;
            content.update(&bytes);
            Ok(())
        })
        .map_err(failed)?;
        Ok(self.sums.bind(identity, content.finish()))
    }
}

impl Mover<u32> for Gets {
    fn transfer(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, u32)>,
        deadline: Instant,
    ) -> Vec<Arrived> {
        let mut payloads = vec![vec![0; self.order.bytes() as usize]; blocks.len()];
        let fetched = {
            let request = |((identity, _), payload)| GetRequest {
                key: self.names.key(identity),
                form: self.order.form,
                pieces: vec![payload],
            };
            let identities = blocks.iter().map(|(identity, slot)| (identity, slot));
            let payloads = payloads.iter_mut().map(Vec::as_mut_slice);
            let mut requests: Vec<GetRequest<'_>> = identities.zip(payloads).map(request).collect();
            volume.get(&mut requests, deadline)
        };
        let mut fetched = fetched.into_iter();
        let settle = |((identity, slot), payload): ((BlockIdentity, u32), Vec<u8>)| {
            let result = fetched.next().ok_or_else(|| no_result(volume))?;
            result.map_err(|error| told(&error))?;
            self.land(&identity, slot, &payload)
        };
        blocks.into_iter().zip(payloads).map(settle).collect()
    }
}
