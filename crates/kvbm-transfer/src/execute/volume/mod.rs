//! Between memory and volumes. Volumes block, so threads of the carriers' own wait for them.
//!
//! Objects hold blocks in universal order, a piece for each head, so that what a rank writes does
//! not depend on how its memory is laid out. The conversion is a copy into, or out of, the buffer
//! that a store needs anyway.

mod objects;
mod reader;
mod shares;
mod staged_writer;
mod writer;

#[cfg(any(test, kvbm_sim))]
pub(crate) use objects::{ObjectForm, ObjectReader, ObjectWriter, ReadGroup};
pub(crate) use reader::VolumeReader;
pub(crate) use staged_writer::StagedVolumeWriter;
pub(crate) use writer::VolumeWriter;

use super::Site;
use crate::completion_queue::{Done, Stage};
use crate::config::{VolumeGroup, VolumeTier, WorkerConfig};
use crate::cuts::{Cut, cuts, group_of};
use crate::error::StartError;
use crate::schedule;
use crate::slot_layout::{disk_layout, layouts};
use crate::volume_threads::{ThreadLimits, VolumeThreads};
use kvbm_layout::{AxisOrder, BlockLayout, FragmentList, FullyContiguous, Selection};
use kvbm_plan::{
    BlockIdentity, Failure, FailureKind, NamespaceTag, Tier, TransferPlan, VolumeId, deadline_after,
};
use kvbm_volume::{
    BlobKey, BlobSlice, MAX_PIECES, PayloadForm, StoredOrder, Volume, VolumeError, VolumeRegistry,
};
use shares::Shares;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// A failure as reports have them.
pub(crate) fn failure_of(error: &VolumeError) -> Failure {
    let kind = match error {
        error if error.is_corrupt() => FailureKind::Corrupt,
        error if error.is_miss() => FailureKind::Missing,
        error if error.is_late() => FailureKind::Deadline,
        error if error.is_full() => FailureKind::Full,
        error if error.is_forbidden() => FailureKind::Unsupported,
        VolumeError::BadForm { .. } => FailureKind::Unsupported,
        _ => FailureKind::Io,
    };
    Failure::new(kind, error.to_string())
}

/// How blocks of host memory lie in objects.
struct VolumeOrder {
    fragments: FragmentList,
    form: PayloadForm,
}

impl VolumeOrder {
    /// Universal order; where the layout has opaque planes or too many heads for it, the order of
    /// the disk.
    fn of(host: &dyn BlockLayout) -> Result<Self, StartError> {
        let differ = |error: &dyn std::fmt::Display| layouts(Tier::G2, Tier::G4, &error.to_string());
        let mut config = host.config().clone();
        (config.num_blocks, config.alignment) = (1, 1);
        let heads = config.num_heads;
        let universal = FullyContiguous::new(config, AxisOrder::Universal).ok();
        let fragments =
            universal.and_then(|stored| FragmentList::between(host, &stored, &Selection::all()).ok());
        let whole = |list: &FragmentList| {
            list.covers_slot()
                && host.config().planes.is_empty()
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

    fn bytes(&self) -> u64 {
        self.fragments.slot_bytes()
    }

    /// Whether only ranks of the same size understand it.
    fn is_alone(&self) -> bool {
        self.form.order != StoredOrder::Universal
    }
}

/// For each cache group all ways to cut blocks of host memory into objects that a worker can read,
/// its own first.
pub(crate) fn readable_cuts(config: &WorkerConfig, tier: &VolumeTier) -> Result<Vec<Vec<Cut>>, StartError> {
    let of =
        |(host, group): (&dyn BlockLayout, &VolumeGroup)| Ok(cuts(group, VolumeOrder::of(host)?.is_alone()));
    config.host_shapes().into_iter().zip(&tier.groups).map(of).collect()
}

/// Checksum of a block that arrived, or why it did not.
type Arrived = Result<u64, Failure>;

/// Moves the blocks of a task, all in one call of the volume. `T` is what keeps others off a
/// block's place in host memory.
trait Mover<T>: Send + Sync + 'static {
    fn transfer(
        &self,
        volume: &dyn Volume,
        blocks: Vec<(BlockIdentity, T)>,
        deadline: Instant,
    ) -> Vec<Arrived>;
}

/// Blocks of one plan on their way to or from a volume.
struct Task<T> {
    ticket: u64,
    deadline: Option<Instant>,
    blocks: Vec<(BlockIdentity, T)>,
}

/// Hands blocks of a path to the threads of their volumes, which end when it is dropped.
struct Hands<T> {
    site: Site,
    registry: Arc<VolumeRegistry>,
    volume_threads: VolumeThreads<Task<T>>,
    shares: Shares,
    next_ticket: u64,
}

impl<T: Send + 'static> Hands<T> {
    /// `depth`: blocks that are under way at most.
    fn new(
        site: &Site,
        tier: &VolumeTier,
        config: &WorkerConfig,
        depth: usize,
        mover: impl Mover<T>,
    ) -> Self {
        let terms = ThreadLimits {
            hub: Arc::clone(&site.hub),
            rank: config.rank,
            what: site.path.to_string(),
            threads: tier.threads,
            // Never full: a task has at least one block.
            pending: depth.max(1),
        };
        let (completions, registry) = (Arc::clone(&site.completions), Arc::clone(&tier.registry));
        let work = move |volume, Task { ticket, deadline, blocks }| {
            let results = transfer(&mover, &registry, volume, deadline, blocks);
            completions.put(Done { ticket, result: Stage::Volume(results) });
        };
        let refusing = site.clone();
        let refuse = move |_, task: Task<T>, reason: &str| refuse(&refusing, task, reason);
        let volume_threads = VolumeThreads::new(terms, work, refuse);
        let (site, registry, shares) = (site.clone(), Arc::clone(&tier.registry), Shares::new(depth));
        Self { site, registry, volume_threads, shares, next_ticket: 1 }
    }

    /// Blocks of `plan` that may be handed over while there is room for `free`.
    fn room_for(&self, plan: &TransferPlan, free: usize) -> usize {
        self.shares.room(volume_of(plan), free, self.registry.len() <= 1)
    }

    /// So many blocks of `plan` count as its volume's from now on, until they are
    /// [`returned`](Self::returned).
    fn reserve(&mut self, plan: &TransferPlan, blocks: usize) {
        self.shares.took(volume_of(plan), blocks);
    }

    /// Hands blocks of `plan` over that are reserved, divided among the threads that have nothing
    /// to do. The tickets, which are odd, and how many of the blocks each is for, in order.
    fn send(
        &mut self,
        plan: &TransferPlan,
        deadline: Option<Instant>,
        mut blocks: Vec<(BlockIdentity, T)>,
    ) -> Vec<(u64, usize)> {
        let volume = volume_of(plan);
        let each = blocks.len().div_ceil(self.volume_threads.ready(volume).max(1)).max(1);
        let mut tickets = Vec::new();
        while !blocks.is_empty() {
            let rest = blocks.split_off(each.min(blocks.len()));
            let (ticket, count) = (self.next_ticket, blocks.len());
            self.next_ticket += 2;
            if let Err(task) = self.volume_threads.send(volume, Task { ticket, deadline, blocks }) {
                refuse(&self.site, task, &format!("too many calls of volume {volume} wait"));
            }
            tickets.push((ticket, count));
            blocks = rest;
        }
        tickets
    }

    /// So many blocks of `plan` have come back.
    fn returned(&mut self, plan: &TransferPlan, blocks: usize) {
        self.shares.returned(volume_of(plan), blocks);
    }
}

/// Says of all blocks of a task that it is not done.
fn refuse<T>(site: &Site, Task { ticket, blocks, .. }: Task<T>, reason: &str) {
    let results = vec![Err(Failure::new(FailureKind::Io, reason)); blocks.len()];
    site.completions.put(Done { ticket, result: Stage::Volume(results) });
}

/// The volume of `plan`.
fn volume_of(plan: &TransferPlan) -> VolumeId {
    // Plans of these paths have a volume at one end; no volume has this id.
    schedule::volume_of(plan).unwrap_or(VolumeId(u32::MAX))
}

fn transfer<T: 'static>(
    mover: &dyn Mover<T>,
    registry: &VolumeRegistry,
    volume: VolumeId,
    deadline: Option<Instant>,
    blocks: Vec<(BlockIdentity, T)>,
) -> Vec<Arrived> {
    let count = blocks.len();
    let failed = |kind, detail: String| vec![Err(Failure::new(kind, detail)); count];
    let now = Instant::now();
    if deadline.is_some_and(|deadline| deadline <= now) {
        // What a volume is asked too late it can only be late with, and would be blamed for.
        let why = format!("the deadline passed before a thread was free to ask volume {volume}");
        return failed(FailureKind::PathBusy, why);
    }
    let results = match registry.get(volume) {
        Ok(volume) => {
            let ours = deadline_after(now, volume.descriptor().deadline);
            let deadline = deadline.map_or(ours, |deadline| deadline.min(ours));
            // A volume is foreign code. What its panic leaves behind never became readable.
            catch_unwind(AssertUnwindSafe(|| mover.transfer(&*volume, blocks, deadline)))
        }
        Err(error) => Ok(failed(FailureKind::Unsupported, error.to_string())),
    };
    results.unwrap_or_else(|_| {
        failed(FailureKind::Io, format!("volume {volume} panicked; report it to its vendor"))
    })
}

/// No object has it.
const NO_SLICE: BlobSlice = BlobSlice { first_layer: 0, num_layers: 0, first_head: 0, num_heads: 0 };

/// The names of a rank's objects.
#[derive(Clone)]
pub(crate) struct Names {
    pub(crate) namespace: NamespaceTag,
    pub(crate) tier: VolumeTier,
}

impl Names {
    fn new(config: &WorkerConfig, tier: VolumeTier) -> Self {
        Self { namespace: NamespaceTag::from_bytes(config.namespace), tier }
    }

    /// The name of our object. Plans of groups that there are not are not admitted.
    fn key(&self, identity: &BlockIdentity) -> BlobKey {
        let slice = group_of(&self.tier, identity.group).map_or(NO_SLICE, |group| group.slice);
        self.key_of(identity, slice)
    }

    fn key_of(&self, identity: &BlockIdentity, slice: BlobSlice) -> BlobKey {
        BlobKey::of(self.namespace, identity, slice)
    }
}

/// An implementation that gives fewer results than it was asked for has broken its contract.
fn no_result(volume: &dyn Volume) -> Failure {
    let id = volume.descriptor().id;
    Failure::new(
        FailureKind::Io,
        format!("volume {id} gave no result for the block; report it to its vendor"),
    )
}
