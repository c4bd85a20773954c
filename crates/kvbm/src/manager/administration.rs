//! What operators ask for beside an engine: removal, volumes, tenants, ranks, and the end of a
//! manager.

use super::{KvBlockManager, RankLostError};
use crate::admin::Admin;
use crate::config::stored_bytes;
use crate::leader::{ClearError, Commit, FlushError, FlushReport, ForgetReceipt, ShutdownReport};
use crate::metrics::MetricsServer;
use crate::tenants::TenantError;
use crate::volume::VolumeSetError;
use kvbm_plan::{NamespaceId, Rank, Tier, VolumeDescriptor, VolumeId, deadline_after};
use kvbm_tokens::{Namespace, NamespaceTag};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

impl<G> KvBlockManager<G> {
    /// Where this manager is administered: what `admin.socket` and `admin.http` configure.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Where metrics are served, as `metrics.http` configures: with the port that was chosen, if 0
    /// was asked for.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics_server.as_ref().map(MetricsServer::addr)
    }

    /// Whether [`shutdown`](Self::shutdown) has begun, or somebody drained the manager: no transfer
    /// of a caller starts any more.
    pub fn is_draining(&self) -> bool {
        self.leader.transfers.refuses_callers()
    }

    /// Gives up on a rank: for a worker whose process is gone, or whose device is, so that it
    /// touches none of the memory any more. Transfers that it has not answered fail, their slots
    /// come back and nothing of them is registered. Nothing is sent to it from now on, so every
    /// later transfer fails at once and is computed again. Its part of what is cached is gone with
    /// it, so nothing is found on G1, G2 and G3 any more. What all disks hold is found again by the
    /// next manager. The number of plans that it owed.
    ///
    /// The rank is taken in again when its worker, started anew, says so
    /// ([`WorkerLink`](crate::worker::WorkerLink)). `transfer.rank_lost_after` does this by itself
    /// for ranks whose line stays closed. One that is silent on an open line may still write: make
    /// sure that its process is gone before this is called.
    ///
    /// What was given out before a loss (of a rank that is given up, or whose worker starts anew)
    /// is refused afterwards, with an error `Lost` that names the tier. Blocks that were allocated
    /// before are not registered or parked, parked ones not resumed, pinned ones not offloaded. Of
    /// an engine's own blocks those count as computed before that were not given to something since
    /// (`before_reuse`). Transfers that were under way do not arrive
    /// ([`FailureKind::Lost`](crate::FailureKind::Lost)). Drop such blocks and compute them again,
    /// together with what was computed from them. A batch that was allocated after the loss, but
    /// computed with blocks in G1 that were pinned before it (`Pinned::is_lost`), looks like any
    /// other. `kvbm_lost_batch_refusals_total{tier}` counts refusals.
    ///
    /// What was on G3 when a rank was given up stays on the disks, until [`forget`](Self::forget)
    /// or [`clear`](Self::clear) removes it, also there. A rank that is away is told when its
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

    /// Waits until no offload is queued or running, or `deadline` passes. Whether that was reached.
    pub fn wait_offloads(&self, deadline: Instant) -> bool {
        self.leader.offload.wait_idle(deadline)
    }

    /// Removes every block that nobody uses from `tier`. How many went. From G3 also what had left
    /// it and was not overwritten yet. The disks have made it durable when this returns, or the log
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
    /// told when its worker starts again under this manager. Where that is the only rank and the
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

    /// As [`forget`](Self::forget), with a receipt: what was removed where, and what has not
    /// confirmed it. Waits for volumes too, for `timeout` at most.
    pub fn forget_with_receipt(&self, namespace: &Namespace, timeout: Duration) -> ForgetReceipt {
        let deadline = deadline_after(kvbm_plan::clock::now(), timeout);
        self.leader.forget_with_receipt(NamespaceId::from(namespace.tag()), deadline)
    }

    /// Makes everything that is on G3 durable, and what was on its way there when this was called.
    /// Offloads that begin meanwhile are not waited for.
    ///
    /// # Errors
    /// The rank that failed or did not answer in time; offloads that did not end in time.
    pub fn flush(&self, timeout: Duration) -> Result<FlushReport, FlushError> {
        self.leader.flush(deadline_after(kvbm_plan::clock::now(), timeout))
    }

    /// Ends the manager's work. Nothing new starts, and blocks that are on no lower tier yet are
    /// written down as far as time allows. G3 is made durable, and what was forgotten is removed
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
    /// it runs, and reaches it within that deadline. Opening has twelve times that where a capacity
    /// has its objects counted. One that starts later, or starts again, is told of all volumes that
    /// there are then.
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

    /// The namespace of a tenant's sequences, for [`sequence_in`](Self::sequence_in): that of the
    /// manager, with the name as part of its tenant salt ([`Namespace::tenant`]). Its blocks are
    /// the tenant's on every tier, and shared with nobody else's.
    ///
    /// ```
    /// # use kvbm::config::{Blocks, ModelConfig};
    /// # use kvbm::{KvBlockManager, Namespace, Owned};
    /// # let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
    /// let manager = KvBlockManager::<Owned>::builder()
    ///     .model(model)
    ///     .namespace(Namespace::new("llama-3-8b"))
    ///     .device(Blocks(64))
    ///     .configure(|config| config.tenants.shares = [("acme", 0.5), ("beta", 0.25)].into_iter().collect())
    ///     .build()?;
    /// let acme = manager.tenant("acme")?; // an error names who is known
    /// let prompt: Vec<u32> = (0..40).collect();
    /// let tokens = manager.sequence_in(&acme, &prompt, b"")?;
    /// let fresh = manager.allocate_in(&acme, tokens.num_blocks())?;
    /// let (done, _tail) = manager.commit(fresh, &tokens, 0)?;
    /// drop(manager.register(done)?);
    /// assert_eq!(manager.status().tenants[1].tiers[0].blocks, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TenantError::Unknown`]: nobody configured it in `tenants.shares`.
    pub fn tenant(&self, name: &str) -> Result<Namespace, TenantError> {
        self.leader.tenants.id(name)?;
        Ok(self.namespace.clone().tenant(name))
    }

    /// Changes a tenant's share of every tier, from now on: what it has beyond goes when others
    /// need room.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant, not from 0 to 1, or all shares would be more than 1.
    /// Nothing changed.
    pub fn set_share(&self, name: &str, share: f64) -> Result<(), TenantError> {
        self.leader.tenants.set_share(name, share)
    }

    /// Gives a tenant another namespace beside its own (an adapter, say): blocks of both count for
    /// one share, also those that are known already, after a restart for one. Assignments are not
    /// kept beyond the process: say them again at its start.
    ///
    /// # Errors
    /// [`TenantError`]: no such tenant. Nothing changed.
    pub fn assign(&self, namespace: &Namespace, name: &str) -> Result<(), TenantError> {
        self.leader.tenants.assign(namespace, name)
    }
}
