//! The block manager.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `administration` | what operators ask for beside an engine | - |
//! | `fences` | device events that plans wait for | - |
//! | `hints` | what an engine knows of the future, and of itself | - |
//! | `tenants` | calls about tenants | - |

mod administration;
mod fences;
mod hints;
mod tenants;

use crate::admin::Admin;
use crate::config::{Config, FIRST_GROUP, stored_bytes};
use crate::events::EventPump;
use crate::leader::{ClearError, Commit, FlushError, FlushReport, Leader, ShutdownReport};
use crate::metrics::Metrics;
use crate::onboard::Onboarding;
use crate::places::{self, Places};
use crate::remote::PeerStatus;
use crate::status::Status;
use crate::volume::{LocalVolumes, Probe, VolumeSetError};
#[cfg(feature = "worker")]
use crate::workers::Workers;
use kvbm_plan::{Command, Epoch, NamespaceId, Rank, Tier, VolumeDescriptor, VolumeId, deadline_after};
use kvbm_pool::{
    AllocError, BlockBatch, BlockMetadata, Cached, Complete, Duplicates, G1, Lost, Partial, PinError, Pinned,
    Prefix, RegisterError, RejectedBatch, Reset, SequenceError as CommitError, TierMask, TtlError,
};
use kvbm_tokens::{BlockChain, BlockHasher, ExternalSequence, Namespace, NamespaceTag, Token, TokenSequence};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A block manager: the leader of a deployment, over workers that move the bytes.
///
/// `G1` says whose the accelerator memory is: [`Owned`] (a pool of ours) or
/// [`Engine`](crate::Engine) (the engine allocates it and names its blocks). Made by
/// [`KvBlockManager::builder`].
///
/// All methods may be called from any thread. Dropping the manager stops its workers; what was not
/// written to disk by then is lost, so call [`shutdown`](Self::shutdown) first.
pub struct KvBlockManager<G1Memory = Owned> {
    /// First: nobody calls a manager that ends.
    pub(crate) admin: Admin,
    pub(crate) leader: Arc<Leader>,
    pub(crate) namespace: Namespace,
    pub(crate) hasher: BlockHasher,
    pub(crate) config: Config,
    pub(crate) events: Arc<EventPump>,
    pub(crate) g1: G1Memory,
    /// Last: the workers outlive whatever may still send to them.
    #[cfg(feature = "worker")]
    pub(crate) workers: Workers,
}

/// G1 is a pool of the manager's.
#[derive(Debug)]
pub struct Owned(pub(crate) ());

/// Complete blocks, and those that the sequence does not fill yet.
pub type Committed = (BlockBatch<G1, Complete>, BlockBatch<G1, Partial>);

/// An offload that cannot be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OffloadError {
    /// No path leads from one to the other.
    #[error("blocks of {from} cannot be offloaded to {to}: configure {to}, and offload one tier at a time")]
    NoPath {
        /// Where the blocks are.
        from: Tier,
        /// Where they should go.
        to: Tier,
    },
    /// The blocks are another manager's.
    #[error("the blocks belong to another manager: offload them with the one that they came from")]
    Foreign,
    /// The blocks are gone.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The manager is shutting down.
    #[error("the manager is shutting down: no offload starts")]
    ShuttingDown,
}

/// A rank that cannot be given up. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RankLostError {
    /// There is no such rank.
    #[error("there is no rank {rank}: the {ranks} ranks of this manager count from 0")]
    NoSuchRank {
        /// Asked for.
        rank: Rank,
        /// Ranks configured.
        ranks: usize,
    },
    /// Its worker may write to its memory until the manager ends.
    #[error(
        "rank {0} has its worker in this process, which may write to its memory as long as it lives: drop the manager instead"
    )]
    Local(Rank),
}

/// Device events that no plan could wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// Not one event for each rank.
    #[error("{given} device events for {ranks} ranks: record one on each rank's device, in order")]
    Ranks {
        /// Events given.
        given: usize,
        /// Ranks of this process.
        ranks: usize,
    },
    /// Plans wait for the latest number only.
    #[error("device event {0} is not above all earlier ones: give numbers that grow, below 2^64 - 1")]
    Number(u64),
    /// Nobody would tell workers of another process of these events.
    #[error(
        "the workers are in other processes: give each its device event there, under a number, and `fence_at` that number"
    )]
    Elsewhere,
    /// Nobody would tell workers of this process of an event of that number.
    #[error(
        "the workers are in this process, and know no device event {0}: give the events themselves to `fence`"
    )]
    Here(u64),
}

/// A namespace whose hashes this manager cannot make.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// The namespace is incomplete.
    #[error(transparent)]
    Namespace(#[from] kvbm_tokens::NamespaceError),
    /// The salt is too long.
    #[error(transparent)]
    Salt(#[from] kvbm_tokens::ExtraKeyError),
    /// Blocks of another size.
    #[error(
        "the namespace has {given} tokens a block, this manager {ours}: blocks of one manager are of one size"
    )]
    PageSize {
        /// Of the namespace.
        given: usize,
        /// Of the model.
        ours: u32,
    },
    /// What is on disk could not be found again by its hash.
    #[error(transparent)]
    NotPersistable(#[from] kvbm_tokens::NotPersistable),
}

impl<G> KvBlockManager<G> {
    /// The namespace of [`sequence`](Self::sequence).
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// What the manager was built from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What hashes blocks of the manager's namespace.
    pub(crate) fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// The tokens of a request, in the manager's namespace. Blocks are shared only among requests
    /// of the same `salt`; an empty one shares with all.
    ///
    /// # Errors
    /// A salt longer than [`kvbm_tokens::MAX_EXTRA_KEY_BYTES`].
    pub fn sequence(&self, tokens: &[Token], salt: &[u8]) -> Result<TokenSequence, SequenceError> {
        sequence(self.hasher, tokens, salt)
    }

    /// Like [`sequence`](Self::sequence), in another namespace: another tenant, adapter or model of
    /// the same shape.
    ///
    /// # Errors
    /// A namespace without page size or with another one, or whose hashes change with the process
    /// although there is a disk; a salt that is too long.
    pub fn sequence_in(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        salt: &[u8],
    ) -> Result<TokenSequence, SequenceError> {
        sequence(self.hasher_in(namespace)?, tokens, salt)
    }

    /// What hashes blocks of `namespace`, if this manager can keep them.
    fn hasher_in(&self, namespace: &Namespace) -> Result<BlockHasher, SequenceError> {
        let hasher = namespace.hasher()?;
        let (given, ours) = (hasher.page_size(), self.config.model.page_size);
        if given != ours as usize {
            return Err(SequenceError::PageSize { given, ours });
        }
        if self.leader.registry.capacity(Tier::G3) > 0 || !self.leader.volumes.is_empty() {
            namespace.check_persistable()?;
        }
        Ok(hasher)
    }

    /// The blocks of a request that the engine hashed itself, first block first.
    pub fn external_sequence<B: AsRef<[u8]>>(
        &self,
        engine_hashes: impl IntoIterator<Item = B>,
    ) -> ExternalSequence {
        ExternalSequence::from_hashes(self.hasher, engine_hashes)
    }

    /// Like [`external_sequence`](Self::external_sequence), in another namespace: another tenant,
    /// adapter or model of the same shape.
    ///
    /// # Errors
    /// A namespace without page size or with another one, or whose hashes change with the process
    /// although there is a disk.
    pub fn external_sequence_in<B: AsRef<[u8]>>(
        &self,
        namespace: &Namespace,
        engine_hashes: impl IntoIterator<Item = B>,
    ) -> Result<ExternalSequence, SequenceError> {
        Ok(ExternalSequence::from_hashes(self.hasher_in(namespace)?, engine_hashes))
    }

    /// The longest prefix of `chain` that is on some tier, pinned where it is nearest while the
    /// result is held. Counts as one use of every block in it. While disks fail or do not answer,
    /// the prefix ends before the first block that only they have ([`Status::disk_down`]). It also
    /// ends where its blocks would arrive later than the engine computes them, where that is known
    /// ([`prefilled`](Self::prefilled)); `kvbm_load_decisions_total{tier,reason}` counts both.
    ///
    /// With volumes, the prefix goes on with blocks that are thought to be on the one that has most
    /// of them ([`Tier::G4`], not pinned): what an onboard does not find it leaves out. For a chain
    /// that is not known yet volumes are asked, in a few round trips within their deadlines;
    /// `volume.lookup = "known"` never asks.
    ///
    /// With `remote.enabled`, peers are asked first, for `remote.lookup_deadline` at most. What one
    /// has in its memory is listed as [`Tier::G4`] too, with the peer in [`Prefix::node`]; it is
    /// not pinned there before an onboard reads it.
    ///
    /// Of a model with several cache groups, this is the first group's part of what every group can
    /// serve: [`match_groups`](Self::match_groups) has all parts.
    pub fn match_prefix<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Prefix {
        let chain = chain.into();
        self.leader.metrics.lookups.add(chain.len() as u64);
        let (mut prefix, _) = self.leader.match_prefix(chain, Probe::Wait);
        self.leader.leave_out_slow(&mut prefix, 0, Tier::G1);
        prefix
    }

    /// Nothing will continue `chain` (the session is over, the branch was given up): a soft hint.
    /// Its blocks at the end that belong to no other branch may go sooner; how much sooner,
    /// `hazard` learns from what such hints proved to be worth. Under `lru-leaf` they are the next
    /// to go, unless they are used again.
    pub fn branch_ends<'a>(&self, chain: impl Into<BlockChain<'a>>) {
        let chain = chain.into();
        for group in self.leader.groups() {
            self.leader.registry.branch_ends(group, chain.hashes());
        }
    }

    /// Keeps what is there of `chain` on `tiers` from eviction until iteration `until` (see
    /// [`iteration`](Self::iteration)), or until it is unpinned. Of several pins of a block the one
    /// that ends last counts. How many blocks of the chain are pinned, of all cache groups. A block
    /// that comes to a tier later is not.
    ///
    /// # Errors
    /// [`PinError`]: more than half of a tier would be pinned, or the iteration is over. Nothing
    /// changed.
    pub fn pin<'a>(
        &self,
        chain: impl Into<BlockChain<'a>>,
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        self.leader.pin(chain.into(), tiers, until)
    }

    /// Takes the pins of `chain` on `tiers` back, but for blocks that another pinned one continues.
    /// How many ended (a block on two tiers has two).
    pub fn unpin<'a>(&self, chain: impl Into<BlockChain<'a>>, tiers: TierMask) -> usize {
        self.leader.unpin(chain.into(), tiers)
    }

    /// Blocks of a namespace (a tenant, a model) leave every tier after `iterations` without use;
    /// `None` lifts that. A use is a match, the end of a handle, and an arrival on a tier. Blocks
    /// in use, pinned ones and those that another continues stay until they are not.
    /// [`step`](Self::step) removes what is due, within 1,024 iterations where a registry has more
    /// blocks than that. For what must be gone there is [`forget`](Self::forget): a block that left
    /// the disk like this may be found there again after a restart, as an evicted one may, until
    /// its slot is written again or its namespace is forgotten.
    ///
    /// # Errors
    /// [`TtlError`]: 0, or more than
    /// [`RegistryConfig::MAX_TTL`](kvbm_pool::RegistryConfig::MAX_TTL). Nothing changed.
    pub fn set_ttl(&self, namespace: &Namespace, iterations: Option<u64>) -> Result<(), TtlError> {
        self.leader.registry.set_ttl(NamespaceId::from(namespace.tag()), iterations)
    }

    /// Like [`set_ttl`](Self::set_ttl), after a time without use: the engine may be idle meanwhile.
    /// Both may be set. What is there counts as used now. Blocks leave within half a minute of
    /// their time.
    ///
    /// # Errors
    /// [`TtlError`]: less than a second, or more than a year. Nothing changed.
    pub fn set_ttl_time(&self, namespace: &Namespace, time: Option<Duration>) -> Result<(), TtlError> {
        self.leader.registry.set_ttl_time(NamespaceId::from(namespace.tag()), time)
    }

    /// Where each block of `chain` is, up to the first that is nowhere: tiers, and the volume that
    /// is known to have it. Asks no volume, pins nothing and counts as no use. With
    /// `remote.enabled`, peers are asked for what is nowhere here, for `remote.lookup_deadline` at
    /// most. Of a model with several cache groups it is the first one with full attention that is
    /// looked at.
    pub fn look_up<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Vec<Places> {
        let group = self.leader.full_group();
        let Leader { registry, volumes, peers, .. } = &*self.leader;
        let peers = peers.get().map(|peers| &**peers);
        places::look_up_with_peers(registry, volumes, peers, group, chain.into())
    }

    /// Gives up on a rank: for a worker whose process is gone, or whose device is, so that it
    /// touches none of the memory any more. Transfers that it has not answered fail, their slots
    /// come back and nothing of them is registered; nothing is sent to it from now on, so every
    /// later transfer fails at once and is computed again. Its part of what is cached is gone with
    /// it, so nothing is found on G1, G2 and G3 any more; what all disks hold is found again by the
    /// next manager. The number of plans that it owed.
    ///
    /// The rank is taken in again when its worker, started anew, says so
    /// ([`WorkerLink`](crate::worker::WorkerLink)). `transfer.rank_lost_after` does this by itself
    /// for ranks whose line stays closed. One that is silent on an open line may still write: make
    /// sure that its process is gone before this is called.
    ///
    /// What was given out before a loss (of a rank that is given up, or whose worker starts anew)
    /// is refused afterwards, with an error `Lost` that names the tier: blocks that were allocated
    /// before are not registered or parked, parked ones not resumed, pinned ones not offloaded; of
    /// an engine's own blocks those count as computed before that were not given to something since
    /// (`before_reuse`). Transfers that were under way do not arrive
    /// ([`FailureKind::Lost`](crate::FailureKind::Lost)). Drop such blocks and compute them again,
    /// together with what was computed from them: a batch that was allocated after the loss, but
    /// computed with blocks in G1 that were pinned before it ([`Pinned::is_lost`]), looks like any
    /// other. `kvbm_lost_batch_refusals_total{tier}` counts refusals.
    ///
    /// What was on G3 when a rank was given up stays on the disks, until [`forget`](Self::forget)
    /// or [`clear`](Self::clear) removes it, also there; a rank that is away is told when its
    /// worker starts again under this manager.
    ///
    /// # Errors
    /// [`RankLostError`]: there is no such rank, or its worker runs in this process.
    pub fn rank_lost(&self, rank: Rank) -> Result<usize, RankLostError> {
        let ranks = self.leader.ranks.len();
        if rank.index() >= ranks {
            return Err(RankLostError::NoSuchRank { rank, ranks });
        }
        if self.has_local_workers() {
            return Err(RankLostError::Local(rank));
        }
        Ok(self.leader.rank_lost(rank))
    }

    /// Whether the workers are in this process.
    #[cfg_attr(not(feature = "worker"), expect(clippy::unused_self, reason = "as with workers"))]
    fn has_local_workers(&self) -> bool {
        #[cfg(feature = "worker")]
        let local = self.workers.iter().len() > 0;
        #[cfg(not(feature = "worker"))]
        let local = false;
        local
    }

    /// The life of this manager: larger in every life.
    pub fn epoch(&self) -> Epoch {
        self.leader.transfers.settings.epoch
    }

    /// The number of the last iteration that [`step`](Self::step) ended; 0 before the first.
    pub fn iteration(&self) -> u64 {
        self.leader.registry.iteration()
    }

    /// An iteration of the engine is over: advances the clock that idle blocks are measured by,
    /// opens the gates of plans that wait for it, and checks the offload triggers. The number of
    /// the iteration.
    pub fn step(&self) -> u64 {
        let iteration = self.leader.registry.step();
        // A worker that cannot be reached fails its plans by itself.
        let _not_sent = self.leader.ranks.broadcast(&Command::Advance { iteration, layer: None });
        self.leader.offload.iteration_ended();
        iteration
    }

    /// Waits until no offload is queued or running, or `deadline` passes. Whether that was reached.
    pub fn wait_offloads(&self, deadline: Instant) -> bool {
        self.leader.offload.wait_idle(deadline)
    }

    /// Removes every block that nobody uses from `tier`. How many went. From G3 also what had left
    /// it and was not overwritten yet; the disks have made it durable when this returns, or the log
    /// says which has not (at most `transfer.deadline` later).
    ///
    /// # Errors
    /// A tier that is not configured, or not ours.
    pub fn clear(&self, tier: Tier) -> Result<u64, ClearError> {
        self.leader.clear(tier, Commit::Await)
    }

    /// As [`clear`](Self::clear), without waiting for a disk: for the thread of a scheduler. The
    /// blocks cannot be found any more when this returns. A process that is killed before the
    /// disks' next commit may find some of them on G3 in its next life; [`flush`](Self::flush)
    /// waits for that commit.
    ///
    /// # Errors
    /// A tier that is not configured, or not ours.
    pub fn clear_in_background(&self, tier: Tier) -> Result<u64, ClearError> {
        self.leader.clear(tier, Commit::Background)
    }

    /// Removes a model or tenant from all tiers. How many blocks went. Blocks that are in use go
    /// when their last user lets go; they cannot be found any more from now on. A volume is asked
    /// until it has removed them, also what lands there late; until then nothing of the namespace
    /// goes there. [`shutdown`](Self::shutdown) waits for that.
    ///
    /// On G3 everything of it goes, also what had been evicted or was idle for too long and would
    /// be found again after a restart. The disks have made that durable when this returns, or the
    /// log says which has not (at most `transfer.deadline` later): then [`flush`](Self::flush) says
    /// why. What was being copied to G3 is removed there when the copy ends; a flush after this
    /// waits for that too. A rank that is away, or whose worker ends before that is durable, is
    /// told when its worker starts again under this manager; where that is the only rank and the
    /// manager ends first, repeat this under the next one.
    pub fn forget(&self, namespace: &Namespace) -> u64 {
        let (blocks, _, on_volumes) = self.leader.forget(NamespaceId::from(namespace.tag()), Commit::Await);
        blocks + on_volumes
    }

    /// As [`forget`](Self::forget), without waiting for a disk, as
    /// [`clear_in_background`](Self::clear_in_background).
    pub fn forget_in_background(&self, namespace: &Namespace) -> u64 {
        self.forget_tag_in_background(namespace.tag())
    }

    /// The same for a namespace whose tag alone is known.
    pub fn forget_tag_in_background(&self, tag: NamespaceTag) -> u64 {
        let (blocks, _, on_volumes) = self.leader.forget(NamespaceId::from(tag), Commit::Background);
        blocks + on_volumes
    }

    /// Makes everything that is on G3 durable, and what was on its way there when this was called.
    /// Offloads that begin meanwhile are not waited for.
    ///
    /// # Errors
    /// The rank that failed or did not answer in time; offloads that did not end in time.
    pub fn flush(&self, timeout: Duration) -> Result<FlushReport, FlushError> {
        self.leader.flush(deadline_after(kvbm_plan::clock::now(), timeout))
    }

    /// Ends the manager's work: nothing new starts, blocks that are on no lower tier yet are
    /// written down as far as time allows, G3 is made durable, and what was forgotten is removed
    /// from volumes. What was not saved is in the report, and whether removals were not confirmed
    /// in time.
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let deadline = deadline_after(kvbm_plan::clock::now(), timeout);
        let mut report = self.leader.shut_down(deadline);
        report.events_unpublished = self.events.flush_last(deadline);
        report
    }

    /// Adds a volume of G4: a store that somebody made and mounted; nothing is created or
    /// formatted. From now on chains go to it and are looked for on it. Blocks choose a volume by
    /// the first of their chain, so several volumes share what is written.
    ///
    /// Every worker has to be there, says so within the descriptor's deadline, opens it, wherever
    /// it runs, and reaches it within that deadline (twelve times that for opening, where a
    /// capacity has its objects counted). One that starts later, or starts again, is told of all
    /// volumes that there are then.
    ///
    /// With a capacity, what is used least goes from it when it is full; a block for which that
    /// makes no room is refused and counted.
    ///
    /// # Errors
    /// [`VolumeSetError`]; nothing changed.
    pub fn register_volume(&self, descriptor: VolumeDescriptor) -> Result<(), VolumeSetError> {
        let block_bytes = stored_bytes(&self.config, descriptor.alignment);
        self.leader.volumes.register(descriptor, &self.namespace, block_bytes, self)
    }

    /// Forgets a volume: its blocks leave (Remove events), transfers from and to it end, at the
    /// latest after its deadline, and its objects stay in the store. Workers that had opened it by
    /// their own configuration keep it open. How many blocks it was known to hold.
    ///
    /// # Errors
    /// [`VolumeSetError::Unknown`].
    pub fn unregister_volume(&self, id: VolumeId) -> Result<u64, VolumeSetError> {
        self.leader.volumes.unregister(id, self)
    }

    /// Queues copies of registered blocks to the next tier, whosever G1 is.
    pub(crate) fn offload_pinned(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        let from = blocks.tier();
        if !self.leader.registry.owns_pinned(blocks) {
            return Err(OffloadError::Foreign);
        }
        if from.below() != Some(to) && (from, to) != (Tier::G2, Tier::G4) {
            return Err(OffloadError::NoPath { from, to });
        }
        if self.leader.transfers.refuses_callers() {
            return Err(OffloadError::ShuttingDown);
        }
        self.leader.transfers.check_lost(from, blocks.losses())?;
        if self.leader.offload.offload_now(blocks.clone(), to) {
            Ok(())
        } else {
            Err(OffloadError::NoPath { from, to })
        }
    }

    /// What every tier and path is doing.
    pub fn status(&self) -> Status {
        #[cfg_attr(not(feature = "worker"), expect(unused_mut, reason = "disks belong to workers"))]
        let mut status = self.leader.status();
        #[cfg(feature = "worker")]
        status.disks.extend(self.workers.disks());
        status
    }

    /// The peers that this node has found (`remote.enabled`).
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.leader.peers.get().map_or_else(Vec::new, |peers| peers.status())
    }

    /// Counters and histograms, brought up to date.
    pub fn metrics(&self) -> &Metrics {
        self.leader.metrics.refresh();
        &self.leader.metrics
    }

    /// The stream of events.
    pub fn events(&self) -> &EventPump {
        &self.events
    }

    /// The workers of this process.
    #[cfg(feature = "worker")]
    pub fn workers(&self) -> &Workers {
        &self.workers
    }
}

/// The volumes of the workers of this process; workers elsewhere have none here.
impl<G> LocalVolumes for KvBlockManager<G> {
    #[cfg(feature = "worker")]
    fn open(&self, descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        let Some(registry) = self.workers.volumes() else { return Ok(true) };
        if registry.get(descriptor.id).is_ok_and(|known| known.descriptor() == descriptor) {
            return Ok(false);
        }
        registry.register_volume(descriptor.clone())?;
        Ok(true)
    }

    #[cfg(feature = "worker")]
    fn close(&self, id: VolumeId) {
        if let Some(registry) = self.workers.volumes() {
            // Somebody else may have taken it out.
            let _unknown = registry.unregister_volume(id);
        }
    }

    #[cfg(not(feature = "worker"))]
    fn open(&self, _descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        Ok(true)
    }

    #[cfg(not(feature = "worker"))]
    fn close(&self, _id: VolumeId) {}
}

impl KvBlockManager<Owned> {
    /// Brings a prefix to G1. Blocks that are there stay where they are.
    pub fn onboard(&self, prefix: Prefix) -> Onboarding {
        Onboarding::start(&self.leader, prefix, None)
    }

    /// Like [`onboard`](Self::onboard), for a request that does not wait beyond `deadline`: what
    /// has arrived by then counts, and copies that have not started never do.
    pub fn onboard_until(&self, prefix: Prefix, deadline: Instant) -> Onboarding {
        Onboarding::start(&self.leader, prefix, Some(deadline))
    }

    /// `n` blocks of G1 to compute into, all or none, evicting what nobody uses. Never waits for a
    /// transfer. They are for sequences of the manager's namespace; where tenants have shares, ask
    /// for those of another one with [`allocate_in`](Self::allocate_in).
    ///
    /// # Errors
    /// [`AllocError`] says what holds the blocks.
    pub fn allocate(&self, n: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let namespace = NamespaceId::from(self.hasher.tag());
        self.allocate_for(namespace, n)
    }

    /// Says that `blocks` hold consecutive blocks of `sequence`, the first of them at position
    /// `first`. What `sequence` fills comes back complete, the rest as it is.
    ///
    /// # Errors
    /// The batch comes back where not even its first block is full.
    pub fn commit<'a>(
        &self,
        blocks: BlockBatch<G1, Reset>,
        sequence: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<Committed, RejectedBatch<BlockBatch<G1, Reset>, CommitError>> {
        self.commit_group(FIRST_GROUP, blocks, sequence, first)
    }

    /// Makes computed blocks visible to everybody and starts their offload. A block that another
    /// request registered in the meantime is taken instead of ours.
    ///
    /// Speculative decoding registers what was accepted and nothing else:
    /// [`TokenSequence::roll_back`] takes rejected tokens off, and what `commit` then leaves over
    /// goes back to the pool with its bytes.
    ///
    /// ```
    /// # use kvbm::config::{Blocks, ModelConfig};
    /// # use kvbm::{KvBlockManager, Namespace, Owned};
    /// # let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
    /// # let manager = KvBlockManager::<Owned>::builder()
    /// #     .model(model).namespace(Namespace::new("llama-3-8b")).device(Blocks(8)).build()?;
    /// let mut tokens = manager.sequence(&[7; 20], b"")?; // 16 tokens a block: one is full
    /// tokens.add_tokens(&[8; 30]); // drafted: three blocks would be full
    /// let fresh = manager.allocate(tokens.len().div_ceil(16))?;
    /// // ... the engine computes the draft into `fresh`; the target model takes 13 of its 30 tokens ...
    /// tokens.roll_back(17)?;
    /// let (accepted, rest) = manager.commit(fresh, &tokens, 0)?;
    /// assert_eq!((accepted.len(), rest.len()), (2, 2));
    /// drop(rest); // drafted into, not full: free again
    /// drop(manager.register(accepted)?);
    /// assert_eq!(manager.match_prefix(&tokens).len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The batch comes back with the reason: [`RegisterError::Lost`] where it was allocated before
    /// a worker lost its memory ([`rank_lost`](Self::rank_lost)).
    pub fn register(
        &self,
        blocks: BlockBatch<G1, Complete>,
    ) -> Result<Cached<G1>, RejectedBatch<BlockBatch<G1, Complete>, RegisterError>> {
        self.register_with(blocks, BlockMetadata::default())
    }

    /// The same, with a priority for those of the blocks that are on no tier yet: the larger, the
    /// longer they stay, on every tier.
    ///
    /// # Errors
    /// The batch comes back with the reason.
    pub fn register_with(
        &self,
        blocks: BlockBatch<G1, Complete>,
        metadata: BlockMetadata,
    ) -> Result<Cached<G1>, RejectedBatch<BlockBatch<G1, Complete>, RegisterError>> {
        self.events.make_room();
        let pool = self.leader.registry.pool::<G1>();
        let cached = pool.register_with(blocks, Duplicates::Reuse, metadata).inspect_err(|rejected| {
            if let RegisterError::Lost(lost) = rejected.error {
                self.leader.transfers.count_lost(lost);
            }
        })?;
        self.leader.offload.registered(&cached.clone().erase(), None);
        Ok(cached)
    }

    /// Copies blocks to the next tier in the background, now rather than when a trigger says so:
    /// `&Cached<G1>` to G2, `&Cached<G2>` to G3 or to a volume (G4). Ancestors that are missing
    /// there go first.
    ///
    /// # Errors
    /// [`OffloadError`]; nothing was started.
    pub fn offload(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        self.offload_pinned(blocks, to)
    }
}

fn sequence(hasher: BlockHasher, tokens: &[Token], salt: &[u8]) -> Result<TokenSequence, SequenceError> {
    let mut sequence =
        if salt.is_empty() { TokenSequence::new(hasher) } else { TokenSequence::with_salt(hasher, salt)? };
    sequence.add_tokens(tokens);
    Ok(sequence)
}
