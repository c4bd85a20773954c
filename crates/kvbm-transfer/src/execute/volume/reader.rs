//! G4 to G1: an object is read and verified, lands in a slot of a staging ring outside G2, and goes
//! to the device from there.

use super::objects::{ObjectForm, ObjectReader, ReadGroup};
use super::{Arrived, Hands, Mover, Names, VolumeOrder, no_result, readable_cuts};
use crate::completion_queue::{Done, Stage};
use crate::config::{VolumeGroup, VolumeTier, WorkerConfig};
use crate::cuts::Cut;
use crate::damaged_objects::DamagedObjects;
use crate::error::StartError;
use crate::execute::copy::{Copier, Item};
use crate::execute::staged::{Staged, settle_copies, start_copies};
use crate::execute::{Carrier, Lane, Route, Site};
use crate::host::{each_fragment, host_regions};
use crate::schedule::Portion;
use kvbm_device::HostRegion;
use kvbm_disk::{BlockChecksum, ContentCrc};
use kvbm_layout::{FragmentList, Selection};
use kvbm_plan::{BlockIdentity, Failure, FailureKind, TransferPlan};
use kvbm_storage::BoundLayout;
use kvbm_volume::Volume;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Blocks that the threads read, by ticket: index and slot of each.
type Reading = HashMap<u64, (Arc<TransferPlan>, Vec<(u32, u32)>)>;

/// Moves blocks from volumes to G1. Each slot of its ring belongs to one block from the read until
/// the copy is over.
pub(crate) struct VolumeReader {
    site: Site,
    free: Vec<u32>,
    hands: Hands<u32>,
    reading: Reading,
    in_flight: usize,
    copier: Copier<Staged>,
    /// By cache group.
    block_bytes: Vec<u64>,
}

impl VolumeReader {
    /// `rings` is host memory whose blocks, of each cache group, are laid out like slots of the
    /// disk; all its slots are this carrier's. With it come the ways to G1.
    pub(crate) fn start(
        site: Site,
        (rings, routes, lane): (&[BoundLayout], Vec<Route>, Lane),
        tier: &VolumeTier,
        damaged: &Arc<DamagedObjects>,
        config: &WorkerConfig,
    ) -> Result<Self, StartError> {
        let ring = &rings[0];
        let failed = |reason: String| StartError::Staging { blocks: ring.num_blocks(), reason };
        let group = |((ring, cuts), group): ((&BoundLayout, Vec<Cut>), &VolumeGroup)| {
            let layout = ring.layout().as_ref();
            let order = VolumeOrder::of(layout)?;
            let bytes = order.bytes() as usize;
            let read = ReadGroup::new(ObjectForm { slice: group.slice, form: order.form, bytes }, cuts);
            let on_disk = FragmentList::between(layout, layout, &Selection::all())
                .map_err(|error| failed(error.to_string()))?;
            Ok((GroupGets { order, on_disk }, read))
        };
        let groups = rings.iter().zip(readable_cuts(config, tier)?).zip(&tier.groups).map(group);
        let groups = groups.collect::<Result<Vec<_>, StartError>>()?;
        let (groups, read): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        let gets = Gets {
            groups,
            objects: ObjectReader::new(read, Names::new(config, tier.clone()), Arc::clone(damaged)),
            regions: host_regions(ring).ok_or_else(|| failed("the ring is not host memory".into()))?,
            sums: BlockChecksum::new(config.namespace),
        };
        let block_bytes = gets.groups.iter().map(|group| group.order.bytes()).collect();
        let hands = Hands::new(&site, tier, config, ring.num_blocks() as usize, gets);
        let copier = Copier::new(routes, lane, Arc::clone(&site.completions));
        let free = (0..ring.num_blocks()).rev().collect();
        Ok(Self { site, free, hands, reading: HashMap::new(), in_flight: 0, copier, block_bytes })
    }

    fn read_over(&mut self, ticket: u64, results: Vec<Arrived>) {
        let Some((plan, places)) = self.reading.remove(&ticket) else { return };
        self.in_flight -= places.len();
        self.hands.returned(&plan, places.len());
        let (mut items, mut failed) = (Vec::new(), Vec::new());
        for ((index, slot), result) in places.into_iter().zip(results) {
            let block = plan.blocks[index as usize];
            match result {
                Ok(checksum) => {
                    let bytes = self.block_bytes[usize::from(block.identity.group.0)];
                    let hold = Staged { slot, checksum, bytes };
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
        start_copies(&self.site, &mut self.copier, &mut self.free, items);
    }
}

impl Carrier for VolumeReader {
    fn room(&self) -> usize {
        self.free.len()
    }

    fn room_for(&self, plan: &TransferPlan) -> usize {
        self.hands.room_for(plan, self.free.len())
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
            self.hands.reserve(&plan, blocks.len());
            for (ticket, count) in self.hands.send(&plan, deadline, blocks) {
                let rest = places.split_off(count);
                self.reading.insert(ticket, (Arc::clone(&plan), std::mem::replace(&mut places, rest)));
            }
        }
    }

    fn complete(&mut self, message: Done) {
        match message.result {
            Stage::Volume(results) => self.read_over(message.ticket, results),
            Stage::Copy(result) => self.copier.complete(message.ticket, result),
            Stage::Moved(outcomes) => self.copier.moved(message.ticket, outcomes),
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

/// How blocks of a cache group lie in objects and in the ring.
struct GroupGets {
    order: VolumeOrder,
    /// Slots of the ring, in the byte order that checksums are computed in.
    on_disk: FragmentList,
}

struct Gets {
    /// By id.
    groups: Vec<GroupGets>,
    objects: ObjectReader,
    /// The ring.
    regions: Vec<HostRegion>,
    sums: BlockChecksum,
}

impl Gets {
    /// Puts a verified payload into its slot. The block's checksum.
    fn land(&self, identity: &BlockIdentity, slot: u32, payload: &[u8]) -> Arrived {
        let failed = |why: String| {
            Failure::new(FailureKind::Unsupported, format!("slot {slot} of the staging ring: {why}"))
        };
        // Plans of groups that there are not are not admitted.
        let group = &self.groups[usize::from(identity.group.0)];
        each_fragment(&self.regions, &group.order.fragments, slot, |region, offset, place| {
            // SAFETY: the lease of the slot keeps everybody else away from it.
            unsafe { region.write_at(offset, &payload[place]) }
        })
        .map_err(failed)?;
        let mut content = ContentCrc::new();
        let mut bytes = Vec::new();
        each_fragment(&self.regions, &group.on_disk, slot, |region, offset, place| {
            bytes.resize(place.len(), 0);
            // SAFETY: as above.
            unsafe { region.read_at(offset, &mut bytes) }?;
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
        let mut results: Vec<Option<Arrived>> = vec![None; blocks.len()];
        for at in 0..self.groups.len() {
            let of_group = |place: &usize| usize::from(blocks[*place].0.group.0) == at;
            let places: Vec<usize> = (0..blocks.len()).filter(of_group).collect();
            if places.is_empty() {
                continue;
            }
            let wanted: Vec<_> = places.iter().map(|&place| blocks[place].0).collect();
            let payloads = self.objects.read(volume, at, &wanted, deadline);
            for (place, payload) in places.into_iter().zip(payloads) {
                let (identity, slot) = &blocks[place];
                results[place] = Some(payload.and_then(|payload| self.land(identity, *slot, &payload)));
            }
        }
        results.into_iter().map(|result| result.unwrap_or_else(|| Err(no_result(volume)))).collect()
    }
}
