//! G2 and G4: between host memory and volumes. Volumes block, so threads of the carrier's own wait for them.
//!
//! Objects hold blocks in universal order, a piece for each head, so that what a rank writes does not depend on how its memory is
//! laid out. The conversion is the only copy, into the buffer that the store needs anyway.

use super::{Carrier, Done, Site, Stage};
use crate::config::{PathConfig, VolumeTier, WorkerConfig};
use crate::error::StartError;
use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::schedule::Portion;
use crate::slots::{disk_layout, layouts};
use crate::start::spawn;
use crossbeam_channel::{Receiver, Sender, bounded};
use kvbm_layout::{AxisOrder, BlockLayout, FragmentList, FullyContiguous, Selection};
use kvbm_plan::{
    BlockIdentity, ChecksumMode, Endpoint, Failure, FailureKind, NamespaceTag, Tier, TransferPlan, VolumeId,
};
use kvbm_volume::{
    BlobKey, GetRequest, MAX_PIECES, PayloadForm, PutRequest, StoredOrder, Volume, VolumeError,
};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// What went wrong, in the words of reports.
pub(crate) fn failure_of(error: &VolumeError) -> FailureKind {
    match error {
        error if error.is_corrupt() => FailureKind::Corrupt,
        error if error.is_miss() => FailureKind::Missing,
        error if error.is_late() => FailureKind::Deadline,
        VolumeError::Full { .. } => FailureKind::Full,
        VolumeError::BadForm { .. } => FailureKind::Unsupported,
        _ => FailureKind::Io,
    }
}

/// How blocks of host memory lie in objects.
pub(crate) struct VolumeOrder {
    fragments: FragmentList,
    form: PayloadForm,
}

impl VolumeOrder {
    /// Universal order; where the layout has opaque planes or too many heads for it, the order of the disk.
    pub(crate) fn of(host: &dyn BlockLayout) -> Result<Self, StartError> {
        let differ = |error: &dyn std::fmt::Display| layouts(Tier::G2, Tier::G4, &error.to_string());
        let mut config = host.config().clone();
        (config.num_blocks, config.alignment) = (1, 1);
        let heads = config.num_heads;
        let universal = FullyContiguous::new(config, AxisOrder::Universal).ok();
        let fragments =
            universal.and_then(|stored| FragmentList::between(host, &stored, &Selection::all()).ok());
        let whole = |list: &FragmentList| {
            list.covers_slot()
                && heads <= MAX_PIECES
                && list.slot_bytes().is_multiple_of(u64::from(heads))
                && list.slot_bytes() == host.bytes_per_block()
        };
        if let Some(fragments) = fragments.filter(whole) {
            let form = PayloadForm { order: StoredOrder::Universal, pieces: heads };
            return Ok(Self { fragments, form });
        }
        let stored = disk_layout(host, 1).map_err(|error| differ(&error))?;
        let fragments =
            FragmentList::between(host, &stored, &Selection::all()).map_err(|error| differ(&error))?;
        Ok(Self { fragments, form: PayloadForm::default() })
    }
}

/// What keeps others off a host slot.
enum Claim {
    Read(ReadClaim),
    Write(WriteClaim),
}

/// Blocks of one plan on their way to or from a volume.
struct Task {
    ticket: u64,
    plan: Arc<TransferPlan>,
    volume: VolumeId,
    deadline: Option<Instant>,
    blocks: Vec<(u32, Claim)>,
}

/// Moves blocks between host memory and volumes, one way.
pub(crate) struct VolumeCarrier {
    site: Site,
    host: Arc<HostTier>,
    tasks: Sender<Task>,
    next_ticket: u64,
    /// Blocks in the threads' hands, by ticket.
    flying: HashMap<u64, (Arc<TransferPlan>, usize)>,
    in_flight: usize,
    depth: usize,
}

impl VolumeCarrier {
    /// Starts the threads of one path.
    pub(crate) fn start(
        site: Site,
        host: Arc<HostTier>,
        tier: VolumeTier,
        order: VolumeOrder,
        config: &WorkerConfig,
        limits: PathConfig,
    ) -> Result<Self, StartError> {
        // Never full: a task has at least one block, and so many blocks are in flight.
        let (tasks, queue) = bounded(limits.depth_blocks);
        let threads = tier.threads;
        let namespace = NamespaceTag::from_bytes(config.namespace);
        let mover = Arc::new(Mover { site: site.clone(), tier, order, namespace });
        for number in 0..threads {
            let (mover, queue) = (Arc::clone(&mover), queue.clone());
            let alive = site.hub.producer();
            let body = move || {
                mover.run(&queue);
                drop(alive);
            };
            // Ends with the carrier, whose last act is to drop the queue; the hub waits for it.
            drop(spawn(config.rank, &format!("{}-{number}", site.path), body)?);
        }
        Ok(Self {
            site,
            host,
            tasks,
            next_ticket: 0,
            flying: HashMap::new(),
            in_flight: 0,
            depth: limits.depth_blocks,
        })
    }

    fn claim(&self, plan: &TransferPlan, index: u32) -> Result<Claim, Failure> {
        let block = plan.blocks[index as usize];
        match self.site.path.dst {
            Tier::G4 => self.host.read(block.src.0, &block.identity, None).map(Claim::Read),
            _ => self.host.write(block.dst.0, &block.identity, None).map(Claim::Write),
        }
    }
}

impl Carrier for VolumeCarrier {
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.in_flight)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn issue(&mut self, portion: Portion) {
        let Portion { plan, indices, deadline } = portion;
        let volume = match (plan.src, plan.dst) {
            (Endpoint::Volume(volume), _) | (_, Endpoint::Volume(volume)) => volume,
            // Plans of this path have a volume at one end; no volume has this id.
            _ => VolumeId(u32::MAX),
        };
        let mut blocks = Vec::with_capacity(indices.len());
        let mut failed = Vec::new();
        for index in indices {
            match self.claim(&plan, index) {
                Ok(claim) => blocks.push((index, claim)),
                Err(Failure { kind, detail }) => {
                    failed.push((index, self.site.failure(&plan.blocks[index as usize], kind, &detail)));
                }
            }
        }
        if !failed.is_empty() {
            self.site.hub.settle(plan.plan_id, failed, 0);
        }
        if blocks.is_empty() {
            return;
        }
        let (ticket, count) = (self.next_ticket, blocks.len());
        self.next_ticket += 1;
        self.flying.insert(ticket, (Arc::clone(&plan), count));
        self.in_flight += count;
        // The threads live as long as the queue, and the queue has room for each block in flight.
        drop(self.tasks.try_send(Task { ticket, plan, volume, deadline, blocks }));
    }

    fn complete(&mut self, done: Done) {
        let Stage::Volume(outcomes, bytes) = done.result else { return };
        let Some((plan, count)) = self.flying.remove(&done.ticket) else { return };
        self.in_flight -= count;
        self.site.hub.settle(plan.plan_id, outcomes, bytes);
    }

    fn is_parked(&self) -> bool {
        false
    }

    fn retry(&mut self) {}
}

/// What the threads of a path share.
struct Mover {
    site: Site,
    tier: VolumeTier,
    order: VolumeOrder,
    namespace: NamespaceTag,
}

/// Checksum of a block that arrived, or why it did not.
type Arrived = Result<u64, Failure>;

impl Mover {
    fn run(&self, queue: &Receiver<Task>) {
        for task in queue {
            let Task { ticket, plan, volume, deadline, blocks } = task;
            let indices: Vec<u32> = blocks.iter().map(|(index, _)| *index).collect();
            // A volume is foreign code. Claims that it leaves behind are let go as they are: nothing became readable.
            let moved = catch_unwind(AssertUnwindSafe(|| self.transfer(volume, &plan, deadline, blocks)));
            let results = moved.unwrap_or_else(|_| {
                let detail = format!("volume {volume} panicked; report it to its vendor");
                vec![Err(Failure::new(FailureKind::Io, detail)); indices.len()]
            });
            let arrived = results.iter().filter(|result| result.is_ok()).count() as u64;
            let outcomes = indices.into_iter().zip(results).map(|(index, result)| match result {
                Ok(checksum) => (index, super::disk::done(&plan, checksum)),
                Err(Failure { kind, detail }) => {
                    (index, self.site.failure(&plan.blocks[index as usize], kind, &detail))
                }
            });
            let result = Stage::Volume(outcomes.collect(), arrived * self.order.fragments.slot_bytes());
            // The executor is gone only after all its tickets came back, and the channel has room for each.
            drop(self.site.done.try_send(Done { ticket, result }));
        }
    }

    fn transfer(
        &self,
        volume: VolumeId,
        plan: &TransferPlan,
        deadline: Option<Instant>,
        blocks: Vec<(u32, Claim)>,
    ) -> Vec<Arrived> {
        let volume = match self.tier.registry.get(volume) {
            Ok(volume) => volume,
            Err(error) => {
                let failure = Failure::new(FailureKind::Unsupported, error.to_string());
                return vec![Err(failure); blocks.len()];
            }
        };
        let ours = Instant::now() + volume.descriptor().deadline;
        let deadline = deadline.map_or(ours, |deadline| deadline.min(ours));
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (index, claim) in blocks {
            let identity = plan.blocks[index as usize].identity;
            match claim {
                Claim::Read(claim) => reads.push((identity, claim)),
                Claim::Write(claim) => writes.push((identity, claim)),
            }
        }
        let compute = plan.checksums == ChecksumMode::Required;
        if writes.is_empty() {
            self.put(&*volume, reads, deadline)
        } else {
            self.get(&*volume, writes, deadline, compute)
        }
    }

    fn key(&self, identity: &BlockIdentity) -> BlobKey {
        BlobKey::of(self.namespace, identity, self.tier.slice)
    }

    fn put(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, ReadClaim)>,
        deadline: Instant,
    ) -> Vec<Arrived> {
        let gather = |(_, claim): &(BlockIdentity, ReadClaim)| {
            // Memory that changed since it was filled never leaves this machine.
            claim.verify_always()?;
            claim.gather(&self.order.fragments)
        };
        let payloads: Vec<Result<Vec<u8>, Failure>> = blocks.iter().map(gather).collect();
        let sound = blocks.iter().zip(&payloads).filter_map(|((identity, _), payload)| {
            let pieces = vec![&**payload.as_ref().ok()?];
            Some(PutRequest { key: self.key(identity), form: self.order.form, pieces })
        });
        let requests: Vec<_> = if self.tier.writes { sound.collect() } else { Vec::new() };
        let mut stored = volume.put(&requests, deadline).into_iter();
        let settle = |((_, claim), payload): ((BlockIdentity, ReadClaim), Result<Vec<u8>, Failure>)| {
            payload?;
            if self.tier.writes {
                let result = stored.next().ok_or_else(|| no_result(volume))?;
                result.map_err(|error| told(&error))?;
            }
            Ok(claim.checksum().unwrap_or(0))
        };
        blocks.into_iter().zip(payloads).map(settle).collect()
    }

    fn get(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, WriteClaim)>,
        deadline: Instant,
        compute: bool,
    ) -> Vec<Arrived> {
        let bytes = self.order.fragments.slot_bytes() as usize;
        let mut payloads = vec![vec![0; bytes]; blocks.len()];
        let request = |((identity, _), payload): (&(BlockIdentity, WriteClaim), _)| GetRequest {
            key: self.key(identity),
            form: self.order.form,
            pieces: vec![payload],
        };
        let fetched = {
            let payloads = payloads.iter_mut().map(Vec::as_mut_slice);
            let mut requests: Vec<GetRequest<'_>> = blocks.iter().zip(payloads).map(request).collect();
            volume.get(&mut requests, deadline)
        };
        let mut fetched = fetched.into_iter();
        let settle = |((_, claim), payload): ((BlockIdentity, WriteClaim), Vec<u8>)| {
            let result = fetched.next().ok_or_else(|| no_result(volume))?;
            result.map_err(|error| told(&error))?;
            claim.scatter(&self.order.fragments, &payload)?;
            Ok(claim.finish(compute)?.unwrap_or(0))
        };
        blocks.into_iter().zip(payloads).map(settle).collect()
    }
}

fn told(error: &VolumeError) -> Failure {
    Failure::new(failure_of(error), error.to_string())
}

/// An implementation that gives fewer results than it was asked for has broken its contract.
fn no_result(volume: &dyn Volume) -> Failure {
    let id = volume.descriptor().id;
    Failure::new(
        FailureKind::Io,
        format!("volume {id} gave no result for the block; report it to its vendor"),
    )
}
