//! The leader: decides, handles ids, never touches bytes. It holds the parts together; each part
//! decides its own matters.
//!
//! Callers' threads start transfers; the workers' threads bring their messages (`inbox`). Two
//! threads belong to the leader: `kvbm-deadlines` looks for what is late, `kvbm-offload` decides
//! which blocks are copied down.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `inbox` | messages of the workers | `key_notices` |
//! | `loads` | what of a prefix is copied, and what is computed | - |
//! | `prefetch_budget` | blocks that prefetches may have on their way | - |
//! | `rank_loss` | ranks that go away and come back | `leaving` |
//! | `leaving` | workers that are about to end: what they hold is saved before | `shutdown` |
//! | `shutdown` | flush, clear, forget, shutdown | `key_notices` |
//! | `key_notices` | what became of data keys of forgotten namespaces | - |
//! | `status` | the status and its metrics | - |
//! | `timed_pins` | pins that end at a time | - |

mod inbox;
mod key_notices;
mod leaving;
mod loads;
mod prefetch_budget;
mod rank_loss;
mod shutdown;
mod status;
mod timed_pins;

use crate::config::FIRST_GROUP;
use crate::events::EventPump;
use crate::metrics::Metrics;
use crate::offload::Offload;
use crate::ranks::Ranks;
use crate::ranks::recovery::Recoveries;
use crate::remote::Peers;
pub(crate) use crate::slots::Commit;
use crate::slots::Slots;
use crate::tenants::Tenants;
use crate::transfers::Transfers;
use crate::volume::{GroupChain, Probe, Volumes, known_of};
use inbox::Inbox;
pub use key_notices::ForgottenKey;
use key_notices::KeyNotices;
use kvbm_plan::{BlockId, GroupId, GroupKind, NamespaceId, Tier};
use kvbm_pool::{
    AllocError, BlockBatch, FoundOutside, G1, GroupConfig, PinError, Prefix, Registry, Reset, TierMask,
};
use kvbm_tokens::BlockChain;
use leaving::Leaving;
pub(crate) use leaving::worker_leaves;
pub(crate) use loads::leave_out_slow;
use parking_lot::Mutex;
pub(crate) use prefetch_budget::PrefetchBudget;
pub use shutdown::{ClearError, FlushError, FlushReport, ForgetReceipt, ShutdownReport};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
pub use timed_pins::PinForError;
use timed_pins::TimedPins;

/// How often late transfers are looked for.
const EXPIRY_TICK: Duration = Duration::from_millis(50);

/// The parts of a leader.
pub(crate) struct Parts {
    pub(crate) registry: Registry,
    pub(crate) groups: Vec<GroupConfig>,
    pub(crate) tenants: Tenants,
    pub(crate) metrics: Metrics,
    pub(crate) ranks: Arc<Ranks>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) offload: Arc<Offload>,
    pub(crate) prefetch_budget: PrefetchBudget,
}

/// See the module.
pub(crate) struct Leader {
    pub(crate) registry: Registry,
    /// Cache groups, by their ids.
    groups: Vec<GroupConfig>,
    pub(crate) tenants: Tenants,
    pub(crate) metrics: Metrics,
    pub(crate) ranks: Arc<Ranks>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) offload: Arc<Offload>,
    pub(crate) prefetch_budget: PrefetchBudget,
    pub(crate) recoveries: Recoveries,
    /// Where remote memory is in use.
    pub(crate) peers: OnceLock<Arc<dyn Peers>>,
    /// For its figures; the manager owns it.
    pub(crate) events: OnceLock<Weak<EventPump>>,
    inbox: Mutex<Inbox>,
    timed_pins: TimedPins,
    key_notices: KeyNotices,
    leaving: Leaving,
    /// From here on the registry's seconds count.
    began: Instant,
    /// Names given to private blocks.
    private_names: AtomicU64,
}

impl Leader {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts {
            registry,
            groups,
            tenants,
            metrics,
            ranks,
            slots,
            transfers,
            volumes,
            offload,
            prefetch_budget,
        } = parts;
        let leader = Arc::new(Self {
            recoveries: Recoveries::new(ranks.len(), registry.capacity(Tier::G3)),
            peers: OnceLock::new(),
            events: OnceLock::new(),
            inbox: Mutex::default(),
            timed_pins: TimedPins::default(),
            key_notices: KeyNotices::default(),
            leaving: Leaving::default(),
            began: kvbm_plan::clock::now(),
            private_names: AtomicU64::new(0),
            registry,
            groups,
            tenants,
            metrics,
            ranks,
            slots,
            transfers,
            volumes,
            offload,
            prefetch_budget,
        });
        let weak = Arc::downgrade(&leader);
        leader.metrics.refresh_by(move || {
            if let Some(leader) = weak.upgrade() {
                leader.refresh_metrics();
            }
        });
        leader
    }

    /// Starts the leader's threads. They end with the leader.
    ///
    /// # Errors
    /// The name of the thread that the system refused, and why.
    pub(crate) fn start_threads(self: &Arc<Self>) -> Result<(), (&'static str, std::io::Error)> {
        if cfg!(kvbm_sim) {
            // The simulator does what they do.
            return Ok(());
        }
        let name = "kvbm-offload";
        self.offload.start_thread(name).map_err(|error| (name, error))?;
        let weak = Arc::downgrade(self);
        let watch = move || {
            while let Some(leader) = weak.upgrade() {
                leader.expire(kvbm_plan::clock::now());
                drop(leader);
                std::thread::sleep(EXPIRY_TICK);
            }
        };
        let name = "kvbm-deadlines";
        std::thread::Builder::new().name(name.into()).spawn(watch).map(drop).map_err(|error| (name, error))
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(&self, now: Instant) {
        let end_pins = || self.end_timed_pins(now);
        let second = now.saturating_duration_since(self.began).as_secs();
        let end_lives = || self.registry.second(u32::try_from(second).unwrap_or(u32::MAX));
        let tasks: [&dyn Fn(); 5] = [
            &|| self.volumes.tend(now),
            &|| self.watch_ranks(now),
            &|| self.transfers.expire(now),
            &end_pins,
            &end_lives,
        ];
        for task in tasks {
            // Links and policies are foreign code. Whatever they do, deadlines are kept: others
            // wait for them.
            if catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("the leader failed while it looked for late transfers; it goes on looking");
            }
        }
    }

    /// The longest prefix of `chain` that is on some tier or at a peer, pinned where it is on a
    /// tier, and whether peers or volumes were asked, or would be. Counts as one use of every block
    /// in it.
    pub(crate) fn match_prefix(&self, chain: BlockChain<'_>, probe: Probe) -> (Prefix, bool) {
        // A window or a state is of use as a whole, and its first blocks are not needed.
        if self.has_groups() || !self.needs_all(FIRST_GROUP) {
            let (mut parts, asks, _) = self.find_groups(chain, probe);
            return (parts.swap_remove(0), asks);
        }
        let (mut prefix, agrees) = self.registry.match_chain(FIRST_GROUP, chain);
        self.transfers.leave_out_disk(&mut prefix);
        // On every tier that holds them: a block that is hot in G1 does not grow cold below. The
        // whole chain, since the eviction policy asks how far a block is from the end of its
        // request.
        self.registry.touch(FIRST_GROUP, chain.hashes());
        // A chain that contradicts what is known is none of ours: others have nothing to add.
        if !agrees {
            return (prefix, false);
        }
        // Memory of a peer is nearer than a store.
        let asks_peers = self.peers.get().is_some_and(|peers| peers.extend(&mut prefix, chain, probe));
        if prefix.node().is_some() {
            return (prefix, true);
        }
        let asks_volumes = self.volumes.extend(&mut prefix, chain, probe);
        (prefix, asks_peers || asks_volumes)
    }

    /// For each cache group its part of the longest prefix of `chain` that all of them can serve,
    /// and whether volumes or peers were asked for more of it, or would be.
    pub(crate) fn match_groups(&self, chain: BlockChain<'_>, probe: Probe) -> (Vec<Prefix>, bool) {
        if !self.has_groups() {
            let (prefix, asks) = self.match_prefix(chain, probe);
            return (vec![prefix], asks);
        }
        let (parts, asks, _) = self.find_groups(chain, probe);
        (parts, asks)
    }

    /// The same, and what peers and volumes are known to have of the chain.
    pub(crate) fn find_groups(
        &self,
        chain: BlockChain<'_>,
        probe: Probe,
    ) -> (Vec<Prefix>, bool, Vec<FoundOutside>) {
        let mut parts = self.match_known(chain, &[]);
        let lacks_some = |parts: &[Prefix]| parts.iter().all(|part| part.len() < chain.len());
        // Memory of a peer is nearer than a store.
        let peers = self.peers.get().filter(|_| lacks_some(&parts));
        let asks_peers = peers.is_some_and(|peers| peers.has_usable());
        // Only those who ask pay for a look at every block of the chain.
        let asked = peers.filter(|_| asks_peers && probe == Probe::Wait);
        let found = asked.and_then(|peers| peers.find_groups(&self.group_chain(chain)));
        let mut known = Vec::from_iter(found);
        if !known.is_empty() {
            parts = self.match_known(chain, &known);
        }
        let mut asks_volumes = false;
        if lacks_some(&parts) {
            let at_peers = known.len();
            known.extend(known_of(&self.volumes, chain, self.groups.len()));
            if known.len() > at_peers {
                parts = self.match_known(chain, &known);
                asks_volumes = self.volumes.policy.probe && lacks_some(&parts);
            }
            let on_volumes = &mut known[at_peers..];
            if asks_volumes
                && probe == Probe::Wait
                && self.volumes.ask_groups(&self.group_chain(chain), on_volumes)
            {
                parts = self.match_known(chain, &known);
            }
        }
        for (group, part) in self.groups().zip(&parts) {
            // With a window or state, what was found is used, and nothing before it.
            let used = if self.needs_all(group) { chain.hashes() } else { part.hashes() };
            self.registry.touch(group, used);
            self.volumes.touch(group, used);
        }
        (parts, asks_peers || asks_volumes, known)
    }

    /// The parts on tiers that answer, at peers, and on volumes that are known to have them.
    pub(crate) fn match_known(&self, chain: BlockChain<'_>, known: &[FoundOutside]) -> Vec<Prefix> {
        let mut parts = self.registry.match_groups(chain, TierMask::ALL, known);
        let is_shorter = |part: &mut Prefix| {
            let found = part.len();
            self.transfers.leave_out_disk(part);
            part.len() < found
        };
        let down = parts.iter_mut().filter_map(|part| is_shorter(part).then_some(())).count();
        if down > 0 {
            let memory = TierMask::only(Tier::G1).with(Tier::G2);
            parts = self.registry.match_groups(chain, memory, known);
        }
        parts
    }

    /// What tiers have of `chain` in each cache group, for a search elsewhere. As in
    /// [`match_known`](Self::match_known), a disk that does not answer has nothing.
    fn group_chain<'a>(&self, chain: BlockChain<'a>) -> GroupChain<'a> {
        let needed = self.groups.iter().map(|group| group.blocks_needed()).collect();
        let tiers = self.groups().map(|group| self.registry.peek_each(group, chain.hashes()));
        let tiers: Vec<Vec<TierMask>> = tiers.collect();
        let reads_disk = self.reads_disk(chain, &tiers);
        let is_there =
            |tiers: TierMask| tiers.nearest().is_some_and(|nearest| nearest != Tier::G3 || reads_disk);
        let on_tiers = tiers.into_iter().map(|of_group| of_group.into_iter().map(is_there).collect());
        GroupChain { chain, needed, on_tiers: on_tiers.collect() }
    }

    /// Whether all blocks of `chain` that are nowhere but on disk may be read there now. `tiers` is
    /// by group, then by block.
    fn reads_disk(&self, chain: BlockChain<'_>, tiers: &[Vec<TierMask>]) -> bool {
        if !self.transfers.is_disk_down() {
            return true;
        }
        let slots = self.groups().zip(tiers).flat_map(|(group, tiers)| {
            let only_there = chain.hashes().iter().zip(tiers);
            let only_there = only_there.filter(|(_, tiers)| tiers.nearest() == Some(Tier::G3));
            only_there.filter_map(move |(hash, _)| self.registry.slot_of(Tier::G3, group, *hash))
        });
        // No lock of the registry is taken under that of the directories.
        let slots: Vec<BlockId> = slots.collect();
        self.slots.directories().first_unreadable(slots).is_none()
    }

    /// Whether the model has several cache groups.
    pub(crate) fn has_groups(&self) -> bool {
        self.groups.len() > 1
    }

    /// The cache groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.groups.len() as u16).map(GroupId)
    }

    /// Whether a group needs every block of a prefix.
    pub(crate) fn needs_all(&self, group: GroupId) -> bool {
        self.groups.get(usize::from(group.0)).is_some_and(|group| group.kind == GroupKind::Full)
    }

    /// The first group that needs every block of a prefix; the first of all where none does.
    pub(crate) fn full_group(&self) -> GroupId {
        self.groups().find(|group| self.needs_all(*group)).unwrap_or(FIRST_GROUP)
    }

    /// `n` blocks of G1 for a namespace. What a tenant is refused is counted.
    pub(crate) fn allocate(
        &self,
        namespace: NamespaceId,
        n: usize,
    ) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let allocated = self.registry.pool::<G1>().get_mutable_blocks_for(namespace, n);
        allocated.inspect_err(|refusal| self.tenants.count_refusal(namespace, refusal))
    }

    /// Pins what is there of `chain`, in every cache group or in none.
    pub(crate) fn pin(&self, chain: BlockChain<'_>, tiers: TierMask, until: u64) -> Result<usize, PinError> {
        let mut pinned = 0;
        for group in self.groups() {
            match self.registry.pin(group, chain.hashes(), tiers, until) {
                Ok(count) => pinned += count,
                Err(error) => {
                    for before in self.groups().take_while(|other| *other != group) {
                        self.registry.unpin(before, chain.hashes(), tiers);
                    }
                    return Err(error);
                }
            }
        }
        Ok(pinned)
    }

    /// Takes the next `count` numbers of private blocks. The first of them.
    pub(crate) fn next_private(&self, count: usize) -> u64 {
        self.private_names.fetch_add(count as u64, Ordering::Relaxed)
    }

    /// A hit counts once, on the nearest tier that held the block, after the block was verified.
    pub(crate) fn count_hits(&self, prefix: &Prefix, arrived: usize) {
        let volume = prefix.volume().and_then(|id| self.volumes.get(id));
        let peer = prefix.node().map(|node| self.metrics.peer(node));
        for block in prefix.blocks().iter().take(arrived) {
            if let (Tier::G4, Some(peer)) = (block.tier, &peer) {
                peer.hits.add(1);
                continue;
            }
            self.metrics.tier(block.tier).hits.add(1);
            if let (Tier::G4, Some(volume)) = (block.tier, &volume) {
                volume.counters.hits.add(1);
            }
        }
    }
}

#[cfg(all(test, feature = "worker"))]
mod tests {
    use super::*;
    use crate::config::{Blocks, Config, LayoutKind, ModelConfig};
    use crate::{KvBlockManager, Namespace, Owned};
    use kvbm_plan::{BlockIdentity, Failure, FailureKind, clock};

    fn manager(directory: &std::path::Path) -> KvBlockManager<Owned> {
        let mut text = Config::default();
        text.set("model.groups", "full layers=1 heads=2 head_dim=8, state layers=1 bytes=64")
            .expect("groups");
        KvBlockManager::<Owned>::builder()
            .model(ModelConfig { page_size: 16, ..text.model })
            .namespace(Namespace::new("test-model").weights("1"))
            .device(Blocks(8))
            .host(Blocks(8))
            .disk(directory, Blocks(8))
            .configure(|config| config.device.layout = LayoutKind::FullyContiguous)
            .build()
            .expect("a manager")
    }

    /// Mutation that makes it fail: `group_chain` counts what is on any tier.
    #[test]
    fn a_disk_that_fails_has_nothing_when_peers_are_asked() {
        let directory = tempfile::tempdir().unwrap();
        let manager = manager(directory.path());
        let leader = &manager.leader;
        let sequence = manager.sequence(&[7; 48], b"").unwrap();
        let chain = sequence.chain();
        let namespace = NamespaceId::from(chain.namespace());
        let put = |tier, group, count: usize| {
            let identities = BlockIdentity::run(namespace, group, chain.origin(), chain.hashes());
            let identities: Vec<BlockIdentity> = identities.take(count).collect();
            leader.registry.begin_arrivals(tier, &identities).unwrap().complete_each(0..count);
        };
        put(Tier::G2, GroupId(0), 1);
        put(Tier::G3, GroupId(0), 3);
        put(Tier::G3, GroupId(1), 2);
        let on_tiers = || leader.group_chain(chain).on_tiers;
        assert_eq!(on_tiers(), [[true, true, true], [true, true, false]]);
        let slot = leader.registry.slot_of(Tier::G3, GroupId(0), chain.hashes()[2]).unwrap();
        let failure = Failure::new(FailureKind::Io, "planted");
        for _ in 0..2 {
            let read = [(slot, Some(&failure))];
            leader.slots.directories().record_reads(read, (&[], None), clock::now());
        }
        assert_eq!(on_tiers(), [[true, false, false], [false; 3]], "only memory answers");
        leader.slots.directories().reset_reads();
        assert_eq!(on_tiers(), [[true, true, true], [true, true, false]]);
    }
}
