//! Builds a worker: routes between its tiers, executors, threads.

use crate::completion_queue::CompletionQueue;
use crate::config::{DiskTier, PathConfig, WorkerConfig, bad};
use crate::damaged_objects::DamagedObjects;
use crate::error::StartError;
use crate::execute::{
    Carrier, DiskCarrier, Executor, Kernels, Lane, MemoryCarrier, MoverLane, Reads, RingCopies, Route, Site,
    StagedCarrier, StagedVolumeWriter, StagedWriter, VolumeReader, VolumeWriter, Way, Writes,
    WrittenElsewhere,
};
use crate::flush::Flusher;
use crate::host::{HostTier, host_regions};
use crate::hub::{Hub, Sink};
use crate::manager::TransferManager;
use crate::movers::{MoverRing, MoverTier};
use crate::schedule::{GroupLimits, Limits, PathLimits, State};
use crate::scrub::Scrub;
use crate::slot_layout::{layouts, ring_layout};
use crate::threads::spawn;
use crate::volume_requests;
use kvbm_device::{CopyEngine, Direction};
use kvbm_disk::{BlockChecksum, DiskEngine, Dropped, EngineKind, IoMemory, Recovered};
use kvbm_kernels::Backend;
use kvbm_layout::{BlockLayout, CopyPlan};
use kvbm_plan::{Failure, FailureKind, Message, Path, Rank, RecoveredBlock, Tier};
use kvbm_storage::{
    BoundLayout, HugePages, PinFallback, PinnedAllocator, StorageAllocator, StorageKind, SystemAllocator,
    ThreadPlacement, node_of, run_near,
};
use parking_lot::Mutex;
use std::num::NonZeroU64;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

impl TransferManager {
    /// Starts the threads of a worker. Its encoded messages go to `sink`; with a G3, what that held
    /// comes first.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: WorkerConfig, sink: Sink) -> Result<Self, StartError> {
        start(config, None, sink)
    }

    /// Starts the worker of a rank that holds the same bytes as the rank of `writer`, which writes
    /// G2 for both. `config.g2` is the memory of `writer`. Plans into G2, and from there to volumes
    /// that `writer` writes, are done at once here, with no checksum. A leader that sends both
    /// ranks its plans registers a block when both have reported it. Nothing compares the bytes of
    /// the two ranks.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_beside(writer: &Self, config: WorkerConfig, sink: Sink) -> Result<Self, StartError> {
        let host = writer.host.clone();
        let host = host.ok_or_else(|| bad("g2", "none at the writer", "must be memory of the writer"))?;
        start(config, Some(host), sink)
    }
}

/// Starts the worker's threads, and those of its streams, near host memory: they copy from and to
/// it, and sum it up.
fn start(
    config: WorkerConfig,
    writer: Option<Arc<HostTier>>,
    sink: Sink,
) -> Result<TransferManager, StartError> {
    config.validate()?;
    let rank = config.rank;
    run_near(memory_node(&config), |placement| {
        match placement {
            ThreadPlacement::Anywhere => {}
            ThreadPlacement::Near { node, processors } => {
                tracing::info!(%rank, node, processors, "threads run on the NUMA node of host memory");
            }
            ThreadPlacement::Refused { node, reason } => {
                tracing::warn!(%rank, node, reason, "threads cannot be kept on the NUMA node of host memory");
            }
        }
        assemble(config, writer, sink)
    })
}

/// The NUMA node that host memory was asked to lie on, the device's, or where it turns out to lie.
fn memory_node(config: &WorkerConfig) -> Option<u32> {
    let of_device = config.device.as_ref().and_then(|device| device.numa_node());
    of_device.or_else(|| node_of(host_regions(config.g2.as_ref()?)?.first()?))
}

fn assemble(
    config: WorkerConfig,
    writer: Option<Arc<HostTier>>,
    sink: Sink,
) -> Result<TransferManager, StartError> {
    let parts = Parts::new(config, writer)?;
    let config = &parts.config;
    let mut completion_queues: [Vec<_>; Path::ALL.len()] = Default::default();
    let mut executors = Vec::new();
    for (index, (path, limits)) in config.paths.in_order().into_iter().enumerate() {
        if parts.support_of(path).is_ok() {
            for _ in 0..limits.threads {
                let completions: Arc<CompletionQueue> = Arc::default();
                completion_queues[index].push(Arc::clone(&completions));
                executors.push((path, limits, completions));
            }
        }
    }
    let hub = Arc::new(Hub::new(State::new(parts.limits()), completion_queues, sink));
    let mut manager = TransferManager {
        hub: Arc::clone(&hub),
        disk: config.g3.as_ref().map(|tier| Arc::clone(&tier.engine)),
        host: parts.host.clone(),
        flusher: None,
        scrub: None,
        volumes: Mutex::default(),
        threads: Mutex::default(),
        drop_deadline: config.drop_deadline,
        staging_bytes: 0,
    };
    if let Some(DiskTier { recovered, .. }) = &config.g3 {
        report_recovered(&hub, config.rank, recovered);
    }
    let reporter = hub.reporter();
    manager.threads.get_mut().push(spawn(config.rank, "reports", move || reporter.run())?);
    let block_bytes = parts.block_bytes();
    for (path, mut limits, completions) in executors {
        if [path.src, path.dst].iter().all(|tier| matches!(tier, Tier::G1 | Tier::G2)) {
            limits = limits.for_memory(block_bytes);
            if config.movers.is_some() {
                limits = limits.for_movers();
            }
        } else if path.src == Tier::G3 || path.dst == Tier::G3 {
            limits = limits.for_disk(block_bytes);
        }
        let site = Site { hub: Arc::clone(&hub), path, completions };
        let carrier = parts.carrier(site.clone(), limits, &mut manager.staging_bytes)?;
        let executor = Executor { site, carrier, batch_blocks: limits.batch_blocks };
        let alive = hub.producer();
        manager.threads.get_mut().push(spawn(config.rank, &path.to_string(), move || executor.run(&alive))?);
    }
    if let Some(disk) = &manager.disk {
        report_given_up(disk, &hub, config);
        let flusher =
            Arc::new(Flusher::new(Arc::clone(disk), config.rank, config.epoch, config.flush_deadline));
        manager.flusher = Some(Arc::clone(&flusher));
        let (alive, hub) = (hub.producer(), Arc::clone(&hub));
        manager.threads.get_mut().push(spawn(config.rank, "flush", move || flusher.run(&hub, &alive))?);
    }
    if let (Some(disk), Some(rate)) = (&manager.disk, NonZeroU64::new(config.scrub_bytes_per_s)) {
        let scrub = Arc::new(Scrub::new(Arc::clone(disk), config.rank, config.epoch, rate));
        manager.scrub = Some(Arc::clone(&scrub));
        let (alive, hub) = (hub.producer(), Arc::clone(&hub));
        manager.threads.get_mut().push(spawn(config.rank, "scrub", move || scrub.run(&hub, &alive))?);
    }
    if let Some(tier) = &config.volumes {
        manager.volumes = Mutex::new(Some(volume_requests::start(&hub, tier, &parts.damaged, config)?));
    }
    let volumes = config.volumes.is_some();
    hub.send(Message::Ready { rank: config.rank, epoch: config.epoch, volumes });
    Ok(manager)
}

/// Sends the leader each block that the disk gave up because it could not be made durable.
fn report_given_up(disk: &DiskEngine, hub: &Arc<Hub>, config: &WorkerConfig) {
    let (hub, rank, epoch) = (Arc::downgrade(hub), config.rank, config.epoch);
    disk.on_given_up(move |block, identity| {
        if let Some(hub) = hub.upgrade() {
            let detail = format!("slot {block} of G3: it could not be made durable, and is given up");
            let (tier, failure) = (Tier::G3, Failure::new(FailureKind::Missing, detail));
            hub.send(Message::Damaged { rank, epoch, tier, block, identity, failure });
        }
    });
}

/// Sends the recovered blocks in parts. The last part is marked, even if there are none.
fn report_recovered(hub: &Hub, rank: Rank, recovered: &Recovered) {
    if recovered.dropped != Dropped::default() {
        tracing::warn!(%rank, dropped = ?recovered.dropped, "the disk's journal held what cannot be used");
    }
    let blocks: Vec<RecoveredBlock> = recovered
        .blocks
        .iter()
        .map(|found| RecoveredBlock { block: found.slot, identity: found.identity })
        .collect();
    let mut blocks = blocks.chunks(Message::MAX_RECOVERED);
    let mut unusable = recovered.quarantined.chunks(Message::MAX_RECOVERED);
    loop {
        let (part, bad) = (blocks.next().unwrap_or_default(), unusable.next().unwrap_or_default());
        let last = blocks.len() == 0 && unusable.len() == 0;
        let (blocks, unusable) = (part.to_vec(), bad.to_vec());
        hub.send(Message::Recovered { rank, tier: Tier::G3, blocks, unusable, last });
        if last {
            return;
        }
    }
}

/// Tiers of the worker, checked against each other.
struct Parts {
    config: WorkerConfig,
    host: Option<Arc<HostTier>>,
    /// Whether another rank, whose bytes are the same, writes `host`.
    is_written_elsewhere: bool,
    damaged: Arc<DamagedObjects>,
    /// Of a CUDA device that G1 lies on.
    kernels: Option<Kernels>,
    paths: [Result<(), String>; Path::ALL.len()],
    /// Of the next copy by a mover.
    next_move: Arc<AtomicU64>,
}

impl Parts {
    fn new(config: WorkerConfig, writer: Option<Arc<HostTier>>) -> Result<Self, StartError> {
        let sums = BlockChecksum::new(config.namespace);
        if config.g3.as_ref().is_some_and(|tier| tier.engine.checksums() != sums) {
            return Err(bad(
                "namespace",
                "another than the disk engine's",
                "must be the tag that g3 was opened with",
            ));
        }
        let is_written_elsewhere = writer.is_some();
        let host = match (writer, &config.g2) {
            (Some(writer), _) => Some(checked_writer(writer, &config, sums)?),
            (None, Some(_)) => {
                let groups = config.groups().filter_map(|[_, g2]| g2.cloned());
                let host = HostTier::new(groups, sums, config.verify_host, config.claimed_elsewhere)?;
                host.adopt(&config.kept);
                Some(Arc::new(host))
            }
            (None, None) => None,
        };
        for g1 in config.groups().filter_map(|[g1, _]| g1) {
            check_g1(&config, g1)?;
        }
        if let Some(tier) = &config.g3 {
            let bytes = config.host_shapes().into_iter().map(|shape| shape.config().bytes_per_block());
            let (found, needed) = (tier.engine.info().block_bytes, bytes.max().unwrap_or(0));
            if found != needed {
                let rule = format!("its blocks must have {needed} bytes, as in g2 or disk_shapes");
                return Err(bad("g3", found.to_string(), rule));
            }
        }
        if let (Some(g2), Some(tier)) = (&config.g2, &config.g3) {
            register(&tier.engine, g2);
        }
        let paths = std::array::from_fn(|index| available(&config, Path::ALL[index]));
        let kernels = match &config.device {
            Some(device) if on_device(&config) => Kernels::of(&**device, config.copies)?,
            _ if config.copies == Backend::Auto => None,
            _ => return Err(bad("copies", config.copies.to_string(), "is for CUDA devices; use auto")),
        };
        let next_move = Arc::new(AtomicU64::new(1));
        let damaged = Arc::default();
        Ok(Self { config, host, is_written_elsewhere, damaged, kernels, paths, next_move })
    }

    /// Bytes of the longest block of this rank.
    fn block_bytes(&self) -> u64 {
        let layouts = self.config.groups().filter_map(|[g1, g2]| g1.or(g2));
        layouts.map(BoundLayout::bytes_per_block).max().unwrap_or(1)
    }

    fn support_of(&self, path: Path) -> &Result<(), String> {
        let index = Path::ALL.iter().position(|known| *known == path).unwrap_or(0);
        &self.paths[index]
    }

    fn limits(&self) -> Limits {
        let config = &self.config;
        let blocks = |bound: Option<&BoundLayout>| bound.map_or(0, BoundLayout::num_blocks);
        let g3 = config.g3.as_ref().map_or(0, |tier| tier.engine.info().num_slots);
        let movers = config.movers.as_ref().map(|tier| tier.blocks);
        let group = |[g1, g2]: [Option<&BoundLayout>; 2]| GroupLimits {
            slots: [movers.unwrap_or_else(|| blocks(g1)), blocks(g2), g3, 0],
            layers: g1.or(g2).map_or(0, |bound| bound.layout().config().separable_layers()),
        };
        let bounds = config.paths.in_order();
        let limits = |index: usize| {
            let (_, PathConfig { queue_plans: plans, queue_blocks: blocks, .. }) = bounds[index];
            self.paths[index].clone().map(|()| PathLimits { plans, blocks })
        };
        Limits {
            rank: config.rank,
            epoch: config.epoch,
            groups: config.groups().map(group).collect(),
            paths: std::array::from_fn(limits),
            outgoing: config.outgoing,
        }
    }

    fn carrier(
        &self,
        site: Site,
        limits: PathConfig,
        staging_bytes: &mut u64,
    ) -> Result<Box<dyn Carrier>, StartError> {
        let config = &self.config;
        let depth = limits.depth_blocks;
        let missing = || bad("paths", site.path.to_string(), "its tiers are not configured");
        if is_staged(site.path) {
            return self.staged_carrier(site, limits, staging_bytes);
        }
        let writes_volumes = config.volumes.as_ref().is_some_and(|tier| tier.writes);
        let is_of_writer = site.path.dst == Tier::G2 || site.path == Path::G2_G4 && !writes_volumes;
        if self.is_written_elsewhere && is_of_writer {
            return Ok(Box::new(WrittenElsewhere::new(site)));
        }
        let host = Arc::clone(self.host.as_ref().ok_or_else(missing)?);
        if site.path == Path::G2_G4 {
            let tier = config.volumes.as_ref().ok_or_else(missing)?;
            return Ok(Box::new(VolumeWriter::start(site, host, tier, &self.damaged, config, limits)?));
        }
        if site.path.src != Tier::G3 && site.path.dst != Tier::G3 {
            if let Some(tier) = &config.movers {
                // What a mover copies has as many bytes on both sides.
                let routes = host.layouts().map(|slots| route(site.path, slots.clone(), slots.clone()));
                let routes = routes.collect::<Result<_, _>>()?;
                let lane = self.mover_lane(tier, site.path, 0);
                return Ok(Box::new(MemoryCarrier::new(site, host, routes, lane, depth)));
            }
            let mut routes = Vec::new();
            for (group, memory) in config.groups().enumerate() {
                let [Some(g1), Some(g2)] = memory else { return Err(missing()) };
                let (src, dst) = if site.path.src == Tier::G1 { (g1, g2) } else { (g2, g1) };
                let route = route(site.path, src.clone(), dst.clone())?;
                let in_order =
                    |plan: &CopyPlan| site.path.dst == Tier::G2 && host.sums_in_order_of(group, plan);
                routes.push(route.summed_if(in_order));
            }
            let lane = self.lane(site.path, &routes, limits)?;
            return Ok(Box::new(MemoryCarrier::new(site, host, routes, lane, depth)));
        }
        let engine = Arc::clone(&config.g3.as_ref().ok_or_else(missing)?.engine);
        Ok(match site.path.dst {
            Tier::G3 => Box::new(DiskCarrier::<Writes>::new(site, host, engine, depth)),
            _ => Box::new(DiskCarrier::<Reads>::new(site, host, engine, depth)),
        })
    }

    /// Of a path between G1 and a disk or volumes.
    fn staged_carrier(
        &self,
        site: Site,
        limits: PathConfig,
        staging_bytes: &mut u64,
    ) -> Result<Box<dyn Carrier>, StartError> {
        let config = &self.config;
        let path = site.path;
        let missing = || bad("paths", path.to_string(), "its tiers are not configured");
        let (rings, routes, lane) = self.staging_ring(path, limits)?;
        *staging_bytes += rings[0].layout().total_bytes();
        let volumes = || config.volumes.as_ref().ok_or_else(missing);
        let disk = || {
            let engine = Arc::clone(&config.g3.as_ref().ok_or_else(missing)?.engine);
            register(&engine, &rings[0]);
            Ok::<_, StartError>(engine)
        };
        let sums = BlockChecksum::new(config.namespace);
        if path.src == Tier::G1 {
            let engine = (path.dst == Tier::G3).then(disk).transpose()?;
            let copies = RingCopies::new(site.clone(), rings, sums, (routes, lane))?;
            return Ok(match engine {
                Some(engine) => Box::new(StagedWriter::new(site, copies, engine)),
                None => Box::new(StagedVolumeWriter::start(site, copies, volumes()?, &self.damaged, config)?),
            });
        }
        if path == Path::G4_G1 {
            let ring = (&rings[..], routes, lane);
            return Ok(Box::new(VolumeReader::start(site, ring, volumes()?, &self.damaged, config)?));
        }
        Ok(Box::new(StagedCarrier::new(site, &rings, disk()?, routes, lane)?))
    }
}

/// Whether blocks go along `path` through a staging ring.
fn is_staged(path: Path) -> bool {
    matches!(path, Path::G3_G1 | Path::G4_G1 | Path::G1_G3 | Path::G1_G4)
}

/// G2 of the rank that writes it for this one, too, if `config` is of the same memory.
fn checked_writer(
    writer: Arc<HostTier>,
    config: &WorkerConfig,
    sums: BlockChecksum,
) -> Result<Arc<HostTier>, StartError> {
    let layouts = config.groups().map(|[_, g2]| g2);
    if !writer.is_memory_of(layouts) {
        let rule = "must be the memory of the rank that writes it, with the same layouts";
        return Err(bad("g2", format!("of rank {}", config.rank), rule));
    }
    if writer.checksums() != sums {
        return Err(bad("namespace", "another than the writer's", "must be that of the rank that writes g2"));
    }
    if !config.kept.is_empty() || config.claimed_elsewhere {
        let rule = "is for the rank that writes g2: the others have its identities and checksums";
        return Err(bad("kept, claimed_elsewhere", "set", rule));
    }
    Ok(writer)
}

/// Why this worker does not have `path`.
fn available(config: &WorkerConfig, path: Path) -> Result<(), String> {
    let has = |tier: Tier| match tier {
        Tier::G1 => config.g1.is_some() || config.movers.is_some(),
        Tier::G2 => config.g2.is_some(),
        Tier::G3 => config.g3.is_some(),
        Tier::G4 => config.volumes.is_some(),
    };
    if let Some(tier) = [path.src, path.dst].into_iter().find(|tier| !has(*tier)) {
        return Err(format!("this worker has no {tier}; configure it"));
    }
    if is_staged(path) && config.staging_bytes == 0 {
        return Err("this worker has no staging ring; set staging_bytes".into());
    }
    let is_direct = matches!(path, Path::G1_G3 | Path::G1_G4);
    if is_direct && config.movers.is_some() {
        return Err("G1 belongs to other processes, which copy to and from G2; offload to G2 first".into());
    }
    if is_direct && !config.direct_offload {
        let dst = path.dst;
        return Err(format!(
            "blocks go to {dst} by way of G2 here; offload to G2 first, or set direct_offload"
        ));
    }
    Ok(())
}

fn check_g1(config: &WorkerConfig, g1: &BoundLayout) -> Result<(), StartError> {
    match (g1.kind(), &config.device) {
        (StorageKind::System | StorageKind::Pinned, _) => Ok(()),
        (StorageKind::Device, Some(device)) if g1.device() == Some(device.id()) => Ok(()),
        (StorageKind::Device, Some(device)) => {
            Err(bad("g1", format!("memory of another device than {}", device.id()), "must lie on `device`"))
        }
        (StorageKind::Device, None) => Err(bad("device", "none", "must be set: g1 is device memory")),
        (kind, _) => Err(bad("g1", kind.to_string(), "must be device or host memory")),
    }
}

fn route(path: Path, src: BoundLayout, dst: BoundLayout) -> Result<Route, StartError> {
    Route::new(src, dst).map_err(|error| layouts(path.src, path.dst, &error))
}

impl Parts {
    /// The CPU where G1 is host memory, else a stream for this path alone.
    fn lane(&self, path: Path, routes: &[Route], limits: PathConfig) -> Result<Lane, StartError> {
        let Some(device) = self.config.device.as_ref().filter(|_| on_device(&self.config)) else {
            return Ok(Lane::Host);
        };
        let direction = if path.src == Tier::G1 { Direction::DeviceToHost } else { Direction::HostToDevice };
        let way = |route: &Route| match &self.kernels {
            Some(kernels) => kernels.way(path, route, direction, limits.batch_blocks),
            None => Ok(Way::Copies(CopyEngine::Auto)),
        };
        let ways = routes.iter().map(way).collect::<Result<_, _>>()?;
        Lane::on_device(Arc::clone(device), &path.to_string(), direction, ways)
            .map_err(|source| StartError::Stream { path, source })
    }

    fn mover_lane(&self, tier: &MoverTier, path: Path, first: u32) -> Lane {
        let (movers, next_id) = (Arc::clone(&tier.movers), Arc::clone(&self.next_move));
        let (into_g1, is_ring) = (path.dst == Tier::G1, !matches!(path.src, Tier::G1 | Tier::G2));
        Lane::Mover(MoverLane { movers, next_id, into_g1, first, is_ring })
    }

    /// A thread's share of the staging ring of `path`, as blocks of each cache group lie in it, and
    /// the ways between there and G1.
    fn staging_ring(
        &self,
        path: Path,
        limits: PathConfig,
    ) -> Result<(Vec<BoundLayout>, Vec<Route>, Lane), StartError> {
        let config = &self.config;
        if let Some(tier) = &config.movers {
            if limits.threads > 1 {
                let rule = "must be 1 where G1 belongs to other processes: its ring is one piece";
                return Err(bad("threads", limits.threads.to_string(), rule));
            }
            let MoverRing { slots, first } = &tier.rings[usize::from(path == Path::G4_G1)];
            let routes = slots.iter().map(|slots| route(path, slots.clone(), slots.clone()));
            let routes = routes.collect::<Result<_, _>>()?;
            return Ok((slots.clone(), routes, self.mover_lane(tier, path, *first)));
        }
        let shapes = config.host_shapes();
        let Some(g1) = config.groups().map(|[g1, _]| g1.cloned()).collect::<Option<Vec<_>>>() else {
            return Err(bad("paths", path.to_string(), "its tiers are not configured"));
        };
        let failed = |blocks| move |reason: String| StartError::Staging { blocks, reason };
        let slots = |shape: &dyn BlockLayout, blocks, slot_bytes| {
            let layout = ring_layout(shape, blocks, slot_bytes);
            layout.map_err(|error| failed(blocks)(error.to_string()))
        };
        let mut slot_bytes = 1;
        for shape in &shapes {
            slot_bytes = slots(*shape, 1, 0)?.total_bytes().max(slot_bytes);
        }
        let share = config.staging_bytes / limits.threads.max(1) as u64 / slot_bytes;
        let most = u32::try_from(limits.depth_blocks).unwrap_or(u32::MAX);
        // Two at least: one is read into while the other is copied from.
        let blocks = u32::try_from(share).unwrap_or(u32::MAX).clamp(2, most.max(2));
        let failed = failed(blocks);
        // Devices and disks like memory that lies in few large pieces.
        let huge_pages = HugePages::Try;
        let allocator: Box<dyn StorageAllocator> = match &config.device {
            Some(device) => {
                let pinned = PinnedAllocator::new(Arc::clone(device));
                Box::new(PinnedAllocator { huge_pages, fallback: PinFallback::Unpinned, ..pinned })
            }
            None => Box::new(SystemAllocator { huge_pages }),
        };
        let (mut rings, mut routes) = (Vec::<BoundLayout>::new(), Vec::new());
        for (g1, shape) in g1.into_iter().zip(shapes) {
            let layout = Arc::new(slots(shape, blocks, slot_bytes)?);
            let ring = match rings.first() {
                None => BoundLayout::allocate(layout, &*allocator),
                Some(first) => BoundLayout::bind(layout, first.bindings().to_vec()),
            };
            let ring = ring.map_err(|error| failed(error.to_string()))?;
            let (src, dst) = if path.src == Tier::G1 { (g1, ring.clone()) } else { (ring.clone(), g1) };
            routes.push(route(path, src, dst)?);
            rings.push(ring);
        }
        if config.device.is_some() && rings[0].kind() != StorageKind::Pinned {
            tracing::warn!(%path, "the staging ring could not be page-locked: copies to the device are slower");
        }
        let lane = self.lane(path, &routes, limits)?;
        Ok((rings, routes, lane))
    }
}

/// Whether G1 is memory of a device.
fn on_device(config: &WorkerConfig) -> bool {
    config.g1.as_ref().is_some_and(|g1| g1.kind() == StorageKind::Device)
}

/// Tells the disk's engine of memory that its operations use. The kernel locks what it is told of,
/// so it is told of page-locked memory alone.
fn register(engine: &DiskEngine, bound: &BoundLayout) {
    let kernel = !matches!(engine.info().engine.kind, EngineKind::Custom(_));
    if kernel && bound.kind() != StorageKind::Pinned {
        return;
    }
    for region in host_regions(bound).into_iter().flatten() {
        let Some(start) = NonNull::new(region.as_ptr()) else { continue };
        // SAFETY: a region's memory stays where it is while its owner lives.
        engine.register_memory(unsafe {
            IoMemory::new(start, region.len() as usize, Arc::clone(region.owner()))
        });
    }
}
