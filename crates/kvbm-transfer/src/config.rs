//! What a worker is started with.

use crate::error::StartError;
use crate::movers::MoverTier;
use kvbm_device::Device;
use kvbm_disk::{DiskEngine, Recovered};
use kvbm_kernels::Backend;
use kvbm_layout::BlockLayout;
use kvbm_plan::{BlockId, BlockIdentity, Epoch, Path, Rank, TransferPlan};
use kvbm_storage::BoundLayout;
use kvbm_volume::{BlobSlice, ObjectSeal, VolumeRegistry};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// When the bytes of a host block are compared with their checksum before they go to the device.
/// The identity of the slot is compared every time: it costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyHost {
    /// Never: memory is trusted.
    Never,
    /// One block of this many (at least 1).
    Sampled(u32),
    /// Every block.
    Always,
}

impl Default for VerifyHost {
    fn default() -> Self {
        Self::Sampled(16)
    }
}

/// Bounds of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathConfig {
    /// Plans that may be queued; more are reported as
    /// [`QueueFull`](kvbm_plan::FailureKind::QueueFull).
    pub queue_plans: usize,
    /// Blocks that may be queued, at least [`TransferPlan::MAX_BLOCKS`].
    pub queue_blocks: usize,
    /// Executor threads.
    pub threads: usize,
    /// Blocks in flight per executor thread.
    pub depth_blocks: usize,
    /// Blocks handed to the hardware in one piece of work, at most `depth_blocks`.
    pub batch_blocks: usize,
    /// Bytes of such a piece of work, where blocks are large; one block always goes.
    pub batch_bytes: u64,
}

/// On their way between one executor and a disk, where blocks are small: sixteen times what a fast
/// disk needs to be busy.
const DISK_BYTES_IN_FLIGHT: u64 = 64 << 20;
/// And where they are large: twice the operations that a disk has at a time.
const DISK_BLOCKS_IN_FLIGHT: usize = 64;

/// Of a staging ring: as much as a path from the disk has on its way.
const STAGING_BYTES: u64 = DISK_BYTES_IN_FLIGHT;

/// Batches of one executor: one is copied, one is ready, others are being reported.
const BATCHES_IN_FLIGHT: usize = 4;

impl PathConfig {
    /// For copies between memories: two threads, because one neither fills the memory's bandwidth
    /// nor computes checksums while it copies. Larger batches and more threads were not faster.
    pub const MEMORY: Self =
        Self { threads: 2, depth_blocks: 64, batch_blocks: 16, batch_bytes: 4 << 20, ..Self::DISK };
    /// For paths to and from the disk, whose engine keeps many blocks under way for one thread.
    /// Each piece of work wakes two threads, which small pieces make felt.
    pub const DISK: Self = Self {
        queue_plans: 1024,
        queue_blocks: 65_536,
        threads: 1,
        depth_blocks: 1024,
        batch_blocks: 128,
        batch_bytes: 8 << 20,
    };

    /// With the bounds that blocks of `block_bytes` bytes have between memories. Large ones go in
    /// small batches, so that what was copied is in the cache when it is looked at, and reports
    /// come early.
    pub(crate) fn for_memory(self, block_bytes: u64) -> Self {
        let fit = usize::try_from(self.batch_bytes / block_bytes.max(1)).unwrap_or(usize::MAX);
        let batch_blocks = fit.clamp(1, self.batch_blocks.max(1));
        Self { batch_blocks, depth_blocks: self.depth_blocks.min(BATCHES_IN_FLIGHT * batch_blocks), ..self }
    }

    /// With the bounds that copies by other processes have: what waits for one that is slow, or
    /// stopped, keeps no block of another from going. Each has a bounded queue of its own. A piece
    /// of work wakes six threads of two processes, so it is larger; the other process divides it.
    pub(crate) fn for_movers(self) -> Self {
        let depth_blocks = self.depth_blocks.max(self.queue_blocks);
        Self { depth_blocks, batch_blocks: (4 * self.batch_blocks).min(depth_blocks), ..self }
    }

    /// With the bounds that blocks of `block_bytes` bytes have on their way from or to a disk. They
    /// are enough for its queue, and not so much that what comes later, and is more urgent, waits
    /// long.
    pub(crate) fn for_disk(self, block_bytes: u64) -> Self {
        let fit = |bytes: u64| usize::try_from(bytes / block_bytes.max(1)).unwrap_or(usize::MAX);
        let depth_blocks = fit(DISK_BYTES_IN_FLIGHT).max(DISK_BLOCKS_IN_FLIGHT).min(self.depth_blocks);
        let most = self.batch_blocks.min(depth_blocks / BATCHES_IN_FLIGHT).max(1);
        Self { batch_blocks: fit(self.batch_bytes).clamp(1, most), depth_blocks, ..self }
    }
}

impl Default for PathConfig {
    fn default() -> Self {
        Self::DISK
    }
}

/// One [`PathConfig`] per path of [`Path::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathConfigs {
    /// Device to host.
    pub g1_g2: PathConfig,
    /// Host to device.
    pub g2_g1: PathConfig,
    /// Host to disk.
    pub g2_g3: PathConfig,
    /// Disk to host.
    pub g3_g2: PathConfig,
    /// Disk to device, through the staging ring; its blocks in flight are bounded by the ring too.
    pub g3_g1: PathConfig,
    /// Device to disk, through a staging ring of its own.
    pub g1_g3: PathConfig,
    /// Host to volumes.
    pub g2_g4: PathConfig,
    /// Volumes to the device, through a staging ring like that of disks.
    pub g4_g1: PathConfig,
    /// Device to volumes, through a staging ring of its own.
    pub g1_g4: PathConfig,
}

impl Default for PathConfigs {
    fn default() -> Self {
        Self { g1_g2: PathConfig::MEMORY, g2_g1: PathConfig::MEMORY, ..Self::all(PathConfig::DISK) }
    }
}

impl PathConfigs {
    /// The same for every path.
    pub const fn all(config: PathConfig) -> Self {
        Self {
            g1_g2: config,
            g2_g1: config,
            g2_g3: config,
            g3_g2: config,
            g3_g1: config,
            g1_g3: config,
            g2_g4: config,
            g4_g1: config,
            g1_g4: config,
        }
    }

    pub(crate) fn in_order(&self) -> [(Path, PathConfig); Path::ALL.len()] {
        [
            (Path::G1_G2, self.g1_g2),
            (Path::G2_G1, self.g2_g1),
            (Path::G2_G3, self.g2_g3),
            (Path::G3_G2, self.g3_g2),
            (Path::G3_G1, self.g3_g1),
            (Path::G1_G3, self.g1_g3),
            (Path::G2_G4, self.g2_g4),
            (Path::G4_G1, self.g4_g1),
            (Path::G1_G4, self.g1_g4),
        ]
    }
}

/// G3 of a worker: an open engine, and what it found.
#[derive(Debug)]
pub struct DiskTier {
    /// The engine. Its blocks must have the bytes of [`disk_layout`](crate::disk_layout).
    pub engine: Arc<DiskEngine>,
    /// What opening it found; told to the leader at start.
    pub recovered: Recovered,
}

/// What a rank holds of blocks of a cache group, as objects are named by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeGroup {
    /// Layers and heads of the group.
    pub slice: BlobSlice,
    /// KV heads of the group over all ranks: how deployments with another number of ranks may have
    /// cut blocks. A slice that begins behind them is named by its rank, and only a rank that holds
    /// the same part can read it.
    pub heads: u32,
}

impl VolumeGroup {
    /// A part of blocks that is not cut along heads: `rank` of `ranks` holds it alone.
    pub const fn of_rank(layers: u32, heads: u32, rank: u32, ranks: u32) -> Self {
        let slice = BlobSlice {
            first_layer: 0,
            num_layers: layers,
            first_head: heads.saturating_add(rank),
            num_heads: ranks,
        };
        Self { slice, heads }
    }
}

/// G4 of a worker: the volumes it may reach, and which part of each block is its own.
#[derive(Clone)]
pub struct VolumeTier {
    /// The volumes. They may be registered and unregistered while the worker runs.
    pub registry: Arc<VolumeRegistry>,
    /// What this rank holds of blocks of each cache group, by group.
    pub groups: Vec<VolumeGroup>,
    /// Whether this rank writes: of ranks with the same bytes, one does.
    pub writes: bool,
    /// Of the ranks that write, how many come before this one, and how many there are: which rank
    /// removes objects that no rank of this deployment wrote.
    pub share: (u32, u32),
    /// How objects are summed: with the deployment's key, if it has one.
    pub seal: ObjectSeal,
    /// Threads of each path that wait for a volume, for each volume; they run while there is
    /// something to wait for.
    pub threads: usize,
}

impl fmt::Debug for VolumeTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { registry, groups, writes, share, seal, threads } = self;
        let volumes = registry.descriptors();
        f.debug_struct("VolumeTier")
            .field("volumes", &volumes)
            .field("groups", groups)
            .field("writes", writes)
            .field("share", share)
            .field("seal", seal)
            .field("threads", threads)
            .finish()
    }
}

/// A whole block in a slot of G2, with its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostContent {
    /// The slot.
    pub block: BlockId,
    /// What it holds.
    pub identity: BlockIdentity,
    /// Checksum of its bytes, bound to the identity.
    pub checksum: u64,
}

/// Memory of a cache group.
#[derive(Clone, Debug, Default)]
pub struct GroupMemory {
    /// G1 as the group's blocks lie there.
    pub g1: Option<BoundLayout>,
    /// G2 likewise: slots of the same number, in the same memory, for all groups.
    pub g2: Option<BoundLayout>,
}

/// Configuration of a [`TransferManager`](crate::TransferManager): one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// Who reports.
    pub rank: Rank,
    /// Life of the leader that is served; plans of another one are refused.
    pub epoch: Epoch,
    /// Namespace tag that checksums are bound to: the one that the disk engine was opened with.
    pub namespace: [u8; 16],
    /// The device that G1 lies on. Not needed where all tiers lie in host memory.
    pub device: Option<Arc<dyn Device>>,
    /// G1: device memory, or host memory where the engine computes there.
    pub g1: Option<BoundLayout>,
    /// G1 where it belongs to other processes, in place of `g1`. Needs `g2`, which they map.
    pub movers: Option<MoverTier>,
    /// Whether another process keeps identities, checksums and claims of `g2`: what its plans read
    /// there is there, and nobody else writes what they write.
    pub claimed_elsewhere: bool,
    /// G2: host memory.
    pub g2: Option<BoundLayout>,
    /// What is in `g2` at the start: another worker has put it there.
    pub kept: Vec<HostContent>,
    /// Cache groups 1, 2 and so on, where there are several: `g1` and `g2` are those of group 0. A
    /// slot holds a block of any group.
    pub other_groups: Vec<GroupMemory>,
    /// G3. Needs `g2`, whose shape its blocks have, or `disk_shapes`.
    pub g3: Option<DiskTier>,
    /// How blocks of each cache group lie on G3, and in staging rings, where there is no `g2` to
    /// say so: as they would lie there. Only the shapes count, not the numbers of blocks.
    pub disk_shapes: Vec<Arc<dyn BlockLayout>>,
    /// Whether blocks go from G1 to G3, and to volumes, without a stay in G2, through staging rings
    /// of their own.
    pub direct_offload: bool,
    /// G4. Needs `g2`, through which its blocks come and go, or `disk_shapes`.
    pub volumes: Option<VolumeTier>,
    /// Bytes of each of the staging rings between G3 and G1, G4 and G1, and (with `direct_offload`)
    /// G1 and G3, G1 and G4, outside G2. They are no more than the path can have in flight, and at
    /// least a block for each of its threads. 0 leaves these paths out.
    pub staging_bytes: u64,
    /// Bounds of the paths.
    pub paths: PathConfigs,
    /// Verification of host memory.
    pub verify_host: VerifyHost,
    /// How fragments of blocks get between a CUDA device and host memory. [`Backend::Auto`] follows
    /// what is measured on the device; anything else is an error for other devices.
    pub copies: Backend,
    /// Reports and messages that may wait for the sink; more submissions are refused until it took
    /// some.
    pub outgoing: usize,
    /// How long a flush may take.
    pub flush_deadline: Duration,
    /// Bytes of G3 that are read and verified in the background, a second; 0 for none. Bad blocks
    /// are told to the leader ([`Message::Damaged`](kvbm_plan::Message::Damaged)).
    pub scrub_bytes_per_s: u64,
    /// How long dropping the manager waits for started transfers. What runs longer is detached.
    pub drop_deadline: Duration,
}

impl WorkerConfig {
    /// Defaults: one cache group, staging rings of 64 MiB, [`PathConfig::default`], no tiers.
    /// `namespace` is the tag that checksums are bound to.
    pub fn new(rank: Rank, epoch: Epoch, namespace: [u8; 16]) -> Self {
        Self {
            rank,
            epoch,
            namespace,
            device: None,
            g1: None,
            movers: None,
            claimed_elsewhere: false,
            g2: None,
            kept: Vec::new(),
            other_groups: Vec::new(),
            g3: None,
            disk_shapes: Vec::new(),
            direct_offload: false,
            volumes: None,
            staging_bytes: STAGING_BYTES,
            paths: PathConfigs::default(),
            verify_host: VerifyHost::default(),
            copies: Backend::Auto,
            outgoing: 4096,
            flush_deadline: Duration::from_secs(60),
            scrub_bytes_per_s: 0,
            drop_deadline: Duration::from_secs(5),
        }
    }

    /// Memory of each cache group, by its id.
    pub(crate) fn groups(&self) -> impl Iterator<Item = [Option<&BoundLayout>; 2]> {
        let first = [self.g1.as_ref(), self.g2.as_ref()];
        std::iter::once(first)
            .chain(self.other_groups.iter().map(|group| [group.g1.as_ref(), group.g2.as_ref()]))
    }

    /// How blocks of each cache group lie in host memory, or would.
    pub(crate) fn host_shapes(&self) -> Vec<&dyn BlockLayout> {
        if self.g2.is_none() {
            return self.disk_shapes.iter().map(|layout| &**layout).collect();
        }
        self.groups().filter_map(|[_, g2]| g2.map(|bound| &**bound.layout())).collect()
    }

    fn validate_groups(&self) -> Result<(), StartError> {
        let bad = |value: String, rule: &str| Err(bad("other_groups", value, rule));
        let slots = self.g2.as_ref().map(BoundLayout::num_blocks);
        for (group, [g1, g2]) in self.groups().enumerate().skip(1) {
            if (g1.is_some(), g2.is_some()) != (self.g1.is_some(), self.g2.is_some()) {
                return bad(format!("group {group}"), "must have memory on the tiers that group 0 has");
            }
            let found = g2.map(BoundLayout::num_blocks);
            if found != slots {
                let rule = format!("must have as many slots of G2 as group 0 ({slots:?})");
                return bad(format!("group {group}: {found:?}"), &rule);
            }
        }
        let groups = self.other_groups.len() + 1;
        if let Some(found) =
            self.volumes.as_ref().map(|tier| tier.groups.len()).filter(|found| *found != groups)
        {
            let rule = format!("of volumes must be {groups}, one for each group");
            return bad(format!("{found} slices"), &rule);
        }
        Ok(())
    }

    pub(crate) fn validate(&self) -> Result<(), StartError> {
        self.validate_groups()?;
        for (path, config) in self.paths.in_order() {
            let PathConfig { queue_plans, queue_blocks, threads, depth_blocks, batch_blocks, .. } = config;
            at_least("queue_plans", path, queue_plans, 1)?;
            at_least("queue_blocks", path, queue_blocks, TransferPlan::MAX_BLOCKS)?;
            at_least("threads", path, threads, 1)?;
            at_least("batch_blocks", path, batch_blocks, 1)?;
            at_least("depth_blocks", path, depth_blocks, batch_blocks)?;
        }
        if self.verify_host == VerifyHost::Sampled(0) {
            return Err(bad("verify_host", "Sampled(0)", "must be Sampled(1) or more, or Never"));
        }
        if self.outgoing == 0 {
            return Err(bad("outgoing", "0", "must be at least 1"));
        }
        if self.movers.is_some() && (self.g1.is_some() || self.g2.is_none()) {
            return Err(bad("movers", "set", "needs g2, and no g1: G1 belongs to other processes"));
        }
        let groups = self.other_groups.len() + 1;
        let rings = self.movers.iter().flat_map(|tier| &tier.rings);
        if let Some(ring) = rings.map(|ring| ring.slots.len()).find(|found| *found != groups) {
            let rule = format!("must have slots for {groups} cache groups, as g2");
            return Err(bad("movers.rings", format!("{ring} layouts"), rule));
        }
        if self.claimed_elsewhere && (self.g3.is_some() || self.volumes.is_some()) {
            return Err(bad(
                "claimed_elsewhere",
                "true",
                "leaves g1 and g2 alone: claims guard the other tiers",
            ));
        }
        let shapes = self.disk_shapes.len();
        if self.g2.is_some() && shapes > 0 {
            return Err(bad("disk_shapes", format!("{shapes} layouts"), "must be empty: g2 has the shapes"));
        }
        let below = [("g3", self.g3.is_some()), ("volumes", self.volumes.is_some())];
        if let Some((field, _)) =
            below.into_iter().find(|(_, is_set)| *is_set && self.g2.is_none() && shapes != groups)
        {
            let rule = format!("needs g2, whose shape its blocks have, or {groups} disk_shapes");
            return Err(bad(field, format!("{shapes} disk_shapes"), rule));
        }
        if self.volumes.as_ref().is_some_and(|tier| tier.threads == 0) {
            return Err(bad("volumes.threads", "0", "must be at least 1"));
        }
        Ok(())
    }
}

pub(crate) fn bad(field: &'static str, value: impl Into<String>, rule: impl Into<String>) -> StartError {
    StartError::Config { field, value: value.into(), rule: rule.into() }
}

fn at_least(field: &'static str, path: Path, value: usize, least: usize) -> Result<(), StartError> {
    if value >= least {
        Ok(())
    } else {
        Err(bad(field, value.to_string(), format!("must be at least {least} (path {path})")))
    }
}
