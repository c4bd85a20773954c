//! All volumes of a leader. They come and go while it runs.

use super::log::{Change, Log};
use super::place::place;
use super::writes::Landing;
use super::{VolumeRequests, VolumeTier, opening};
use crate::config::{self, Config, VolumeLookup, VolumeOffload};
use crate::metrics::Metrics;
use crate::ranks::Ranks;
use crate::ranks::handshake::Handshakes;
use crate::ranks::requests::Requests;
use crate::transfers::Transfers;
use kvbm_plan::{
    BlockIdentity, Failure, GroupId, GroupKind, NamespaceId, Rank, SequenceHash, Tier, VolumeAnswer,
    VolumeDescriptor, VolumeId,
};
use kvbm_pool::TierStatus;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What goes for every volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolumePolicy {
    /// Whether they are asked for chains that are not known here.
    pub(crate) probe: bool,
    /// How long one is not asked again for what it did not have.
    pub(crate) recheck: Duration,
    /// Longest pause after failures.
    longest_pause: Duration,
    /// Whether blocks are copied to one when they are about to leave memory.
    pub(crate) keeps_victims: bool,
}

/// See the module.
pub(crate) struct Volumes {
    pub(crate) policy: VolumePolicy,
    /// Whether blocks can get to volumes.
    pub(crate) reachable: bool,
    pub(crate) pending: Arc<Requests<VolumeAnswer>>,
    requests: Arc<VolumeRequests>,
    pub(crate) handshakes: Handshakes,
    pub(super) transfers: Arc<Transfers>,
    /// Held while one is registered or unregistered: the volumes that somebody else opened in the
    /// workers of this process. This leader does not close them.
    pub(super) changing: Mutex<BTreeSet<VolumeId>>,
    tiers: RwLock<Vec<Arc<VolumeTier>>>,
    /// Volumes that were unregistered while copies to them could still land. One that is registered
    /// at the same place has to know: a removal there is not over before that.
    former: Mutex<Vec<Arc<VolumeTier>>>,
    /// How often a rank started.
    starts: AtomicU64,
    log: Arc<Mutex<Log>>,
    metrics: Metrics,
    /// By cache group, whether it has full attention.
    full: Arc<[bool]>,
}

impl Volumes {
    /// Those of the configuration. `reachable`: whether others may come.
    pub(crate) fn new(
        config: &Config,
        reachable: bool,
        metrics: Metrics,
        ranks: Arc<Ranks>,
        transfers: Arc<Transfers>,
    ) -> Self {
        let settings = &config.volumes;
        let pending = Arc::<Requests<VolumeAnswer>>::default();
        let requests = VolumeRequests { ranks, pending: Arc::clone(&pending), metrics: metrics.clone() };
        let volumes = Self {
            policy: VolumePolicy {
                probe: settings.lookup == VolumeLookup::Probe,
                recheck: settings.recheck,
                longest_pause: settings.longest_pause,
                keeps_victims: settings.offload == VolumeOffload::Victims,
            },
            reachable,
            pending,
            requests: Arc::new(requests),
            handshakes: Handshakes::default(),
            transfers,
            changing: Mutex::default(),
            tiers: RwLock::default(),
            former: Mutex::default(),
            starts: AtomicU64::new(0),
            log: Arc::new(Mutex::new(Log::new(config.events.ring_capacity as usize))),
            metrics,
            full: config.model.cache_groups().iter().map(|group| group.kind == GroupKind::Full).collect(),
        };
        for (descriptor, blocks) in config::volumes(config) {
            volumes.enter(volumes.tier(descriptor, blocks));
        }
        volumes
    }

    /// A rank started: it has to open every volume that there is. It may have started after they
    /// were registered.
    pub(crate) fn rank_started(&self, rank: Rank) {
        // Before the volumes are read: one that is registered later sees the start.
        self.starts.fetch_add(1, Ordering::SeqCst);
        let now = kvbm_plan::clock::now();
        for tier in self.all() {
            opening::start(&tier, rank, now);
        }
    }

    /// A rank's answer to a request about a volume.
    pub(crate) fn answered(&self, rank: Rank, token: u64, answer: VolumeAnswer) {
        if self.pending.answer(rank, token, answer) {
            let now = kvbm_plan::clock::now();
            for volume in self.all() {
                volume.tend_purges(now);
                volume.tend_discards(now);
                opening::tend(&volume, now);
            }
        } else {
            self.metrics.ignored_reports.add(1);
        }
    }

    /// A rank will not answer requests any more.
    pub(crate) fn fail_requests(&self, rank: Rank, reason: &Failure) {
        self.pending.lost(rank, || VolumeAnswer::Failed(reason.clone()));
    }

    pub(super) fn ranks(&self) -> &Ranks {
        &self.requests.ranks
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(super) fn starts(&self) -> u64 {
        self.starts.load(Ordering::SeqCst)
    }

    /// A volume that nobody knows yet.
    pub(super) fn tier(&self, descriptor: VolumeDescriptor, blocks: Option<u64>) -> Arc<VolumeTier> {
        let counters = self.metrics.volume(descriptor.id);
        let (pause, log) = (self.policy.longest_pause, Arc::clone(&self.log));
        let (requests, full) = (Arc::clone(&self.requests), Arc::clone(&self.full));
        let tier = VolumeTier::new(descriptor, blocks, pause, log, counters, requests, full);
        let now = kvbm_plan::clock::now();
        let place = place(&tier.descriptor.uri);
        for former in self.former(now).iter().filter(|former| self::place(&former.descriptor.uri) == place) {
            tier.index
                .lock()
                .inherit(&former.index.lock(), kvbm_plan::deadline_after(now, former.descriptor.deadline));
        }
        Arc::new(tier)
    }

    /// Unregistered volumes that still matter.
    pub(super) fn former(&self, now: Instant) -> MutexGuard<'_, Vec<Arc<VolumeTier>>> {
        let mut former = self.former.lock();
        former.retain(|tier| tier.index.lock().landing(None, now) != Landing::Over);
        former
    }

    pub(super) fn enter(&self, tier: Arc<VolumeTier>) {
        let mut tiers = self.tiers.write();
        tiers.push(tier);
        tiers.sort_unstable_by_key(|tier| tier.descriptor.id);
    }

    pub(super) fn remove(&self, id: VolumeId) -> Option<Arc<VolumeTier>> {
        let mut tiers = self.tiers.write();
        let at = tiers.iter().position(|tier| tier.descriptor.id == id)?;
        let tier = tiers.remove(at);
        self.former(kvbm_plan::clock::now()).push(Arc::clone(&tier));
        Some(tier)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tiers.read().is_empty()
    }

    /// All, by id.
    pub(crate) fn all(&self) -> Vec<Arc<VolumeTier>> {
        self.tiers.read().clone()
    }

    pub(crate) fn get(&self, id: VolumeId) -> Option<Arc<VolumeTier>> {
        self.tiers.read().iter().find(|tier| tier.descriptor.id == id).cloned()
    }

    /// All, in the order in which a chain that begins with `root` prefers them: the same in every
    /// process that knows the same volumes.
    pub(super) fn preferred(&self, root: SequenceHash) -> Vec<Arc<VolumeTier>> {
        let mut tiers = self.all();
        tiers.sort_by_cached_key(|tier| mixed(root, tier.descriptor.id));
        tiers
    }

    /// Those that may be asked for blocks of `namespace`, in that order. Whether one answers shows
    /// in the transfers; while it is left alone it holds nothing.
    pub(super) fn usable(&self, root: SequenceHash, namespace: NamespaceId) -> Vec<Arc<VolumeTier>> {
        let mut tiers = self.preferred(root);
        tiers.retain(|tier| (!tier.is_down() || tier.allows_requests()) && !tier.is_purging(namespace));
        tiers
    }

    /// Blocks that are known to be on volumes.
    pub(crate) fn blocks(&self) -> usize {
        self.tiers.read().iter().map(|tier| tier.len()).sum()
    }

    /// Those that a block of `namespace` would be read from now: not left alone, and not still
    /// a request to forget it.
    pub(crate) fn answering(&self, namespace: NamespaceId) -> Vec<Arc<VolumeTier>> {
        let mut tiers = self.all();
        tiers.retain(|tier| !tier.is_down() && !tier.is_purging(namespace));
        tiers
    }

    /// All of them as one tier, in blocks: what they are known to hold, and what may still come
    /// where all of them are limited.
    pub(crate) fn tier_status(&self) -> TierStatus {
        let (mut held, mut free, mut limited) = (0_u64, 0_u64, true);
        for tier in self.tiers.read().iter() {
            let blocks = tier.len() as u64;
            held += blocks;
            free += tier.limit.map_or(0, |limit| limit.saturating_sub(blocks));
            limited &= tier.limit.is_some();
        }
        let slots = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        let free = if limited { slots(free) } else { 0 };
        let inactive = slots(held).min(u32::MAX - free);
        TierStatus { capacity: inactive + free, free, inactive, ..TierStatus::without_slots(Tier::G4) }
    }

    pub(crate) fn contains(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.tiers.read().iter().any(|tier| tier.contains(group, hash))
    }

    /// Whether the block is on a volume or on its way there.
    pub(crate) fn awaits(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.tiers.read().iter().any(|tier| tier.index.lock().awaits(group, hash))
    }

    /// How many of `blocks`, from the first on, are on one volume or on their way there.
    pub(crate) fn awaited_prefix(&self, blocks: &[BlockIdentity]) -> usize {
        let on = |tier: &Arc<VolumeTier>| {
            let index = tier.index.lock();
            blocks.iter().take_while(|block| index.awaits(block.group, block.hash)).count()
        };
        self.tiers.read().iter().map(on).max().unwrap_or(0)
    }

    /// What happened, oldest first, and the number that follows the last change that was taken or
    /// lost.
    pub(crate) fn drain(&self, max: usize, take: impl FnMut(u64, Change)) -> u64 {
        self.log.lock().drain(max, take)
    }

    /// What volumes are known for certain to hold, each block with the first of its chain, and the
    /// number of the next change.
    pub(crate) fn snapshot(&self) -> (Vec<(VolumeId, BlockIdentity, SequenceHash)>, u64) {
        let tiers = self.tiers.read();
        // Nothing changes while all locks are held, since a change of a volume needs its lock.
        let indices: Vec<_> = tiers.iter().map(|tier| (tier.descriptor.id, tier.index.lock())).collect();
        let published = |(id, index): &(VolumeId, _)| {
            let index: &parking_lot::MutexGuard<'_, super::Index> = index;
            let id = *id;
            index.published().into_iter().map(move |(identity, root)| (id, identity, root))
        };
        (indices.iter().flat_map(published).collect(), self.log.lock().next())
    }
}

/// A number that depends on every bit of both: the finalizer of `SplitMix64` over their sum.
fn mixed(root: SequenceHash, id: VolumeId) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&root.as_bytes()[..8]);
    let mut x = u64::from_le_bytes(first).wrapping_add(u64::from(id.0).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Volumes of a leader without ranks.
    fn without_ranks() -> Volumes {
        use crate::slots::Slots;
        use crate::transfers::{BlockCosts, TransferSettings};
        let registry =
            kvbm_pool::Registry::new(&kvbm_pool::RegistryConfig::new([1, 0, 0])).expect("a registry");
        let (metrics, deadline) = (Metrics::new(), Duration::from_secs(1));
        let settings = TransferSettings {
            epoch: registry.epoch(),
            writers: Vec::new(),
            max_plan_blocks: 1,
            max_read_blocks: 1,
            transfer_deadline: deadline,
            read_deadline: deadline,
            keep_loaded: true,
            onboard_patience: 0.0,
            num_layers: 1,
            layer_steps: 1,
            block_costs: BlockCosts::default(),
        };
        let ranks = Arc::new(Ranks::new(0, metrics.clone(), Duration::ZERO));
        let striping = kvbm_plan::Striping::new(1, 4096);
        let directories = crate::slots::Directories::new(striping, deadline, deadline);
        let slots =
            Slots::new(registry.clone(), Arc::clone(&ranks), metrics.clone(), deadline, directories, false);
        let transfers =
            Transfers::new(registry, Arc::clone(&ranks), Arc::new(slots), metrics.clone(), settings);
        Volumes::new(&Config::default(), true, metrics, ranks, transfers)
    }

    fn block(namespace: u32) -> BlockIdentity {
        BlockIdentity {
            namespace: NamespaceId(namespace),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([namespace as u8; 16]),
            parent: None,
            position: 0,
        }
    }

    #[test]
    fn what_can_land_yet_is_known_when_the_place_is_registered_again() {
        let volumes = without_ranks();
        let deadline = Duration::from_secs(30);
        let register = |id: u32, uri: &str| {
            let tier =
                volumes.tier(VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(id), uri) }, None);
            volumes.enter(Arc::clone(&tier));
            tier
        };
        let landing = |tier: &VolumeTier| {
            let index = tier.index.lock();
            [1, 2, 3].map(|namespace| index.landing(Some(NamespaceId(namespace)), Instant::now()))
        };
        let first = register(1, "file:///a");
        for namespace in [1, 2] {
            first.index.lock().begin(&block(namespace));
        }
        first.index.lock().fail(&block(1), Some(Instant::now() + deadline));
        volumes.remove(VolumeId(1)).expect("registered").index.lock().retire();
        let again = register(7, "file:///a");
        assert_eq!(landing(&again), [Landing::Doubtful, Landing::Doubtful, Landing::Over], "under any id");
        let differently = landing(&register(9, "/a/"));
        assert_eq!(
            differently,
            [Landing::Doubtful, Landing::Doubtful, Landing::Over],
            "however it is written"
        );
        assert_eq!(landing(&register(8, "file:///b")), [Landing::Over; 3], "another place");
        first.index.lock().fail(&block(2), Some(Instant::now()));
        volumes.remove(VolumeId(7));
        assert_eq!(volumes.former(Instant::now() + 2 * deadline).len(), 0, "once nothing can land any more");
    }
}
