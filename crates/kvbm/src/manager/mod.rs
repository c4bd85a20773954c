//! The block manager.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `administration` | removal, volumes, tenants, ranks, the end of a manager | `errors` |
//! | `blocks` | blocks of G1 where that is a pool of the manager's | `fences`, `errors` |
//! | `hints` | uses that an engine expects, pins, times to live, names of blocks | `describe` |
//! | `describe` | what an engine knows of its blocks | - |
//! | `fences` | device events that plans wait for | `errors` |
//! | `errors` | calls that a manager refuses | - |
//! | `local_volumes` | volumes of the workers of this process | - |

mod administration;
mod blocks;
mod describe;
mod errors;
pub(crate) mod fences;
mod hints;
mod local_volumes;

use crate::admin::Admin;
use crate::config::Config;
use crate::events::EventPump;
use crate::groups::{self, GroupPrefix};
use crate::leader::{Leader, leave_out_slow};
use crate::metrics::{Metrics, MetricsServer};
use crate::places::{self, Places};
use crate::remote::{PeerStatus, Pushed};
use crate::status::Status;
use crate::volume::Probe;
#[cfg(feature = "worker")]
use crate::workers::Workers;
pub use describe::DescribeError;
pub use errors::{FenceError, OffloadError, RankLostError, SequenceError};
use kvbm_plan::{Command, Epoch, Failure, FailureKind, GroupId, NodeId, Tier};
use kvbm_pool::{BlockBatch, Complete, G1, Partial, Pinned, Prefix};
use kvbm_tokens::{BlockChain, BlockHasher, ExternalSequence, Namespace, Token, TokenSequence};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

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
    pub(crate) metrics_server: Option<MetricsServer>,
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
    /// of them ([`Tier::G4`], not pinned). What an onboard does not find it leaves out. For a chain
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
        leave_out_slow(&self.leader, &mut prefix, 0, Tier::G1);
        prefix
    }

    /// The longest prefix of `chain` that every cache group can serve: each block of it with full
    /// attention, the last blocks with a sliding window, the last state. As
    /// [`match_prefix`](Self::match_prefix) in all else; a model whose layers are alike has one
    /// part.
    pub fn match_groups<'a>(&self, chain: impl Into<BlockChain<'a>>) -> GroupPrefix {
        let chain = chain.into();
        self.leader.metrics.lookups.add(chain.len() as u64);
        GroupPrefix::new(self.leader.match_groups(chain, Probe::Wait).0, chain)
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

    /// Where each block of `chain` in a cache group is, one entry for each, also behind blocks that
    /// are nowhere. Asks no volume, pins nothing and counts as no use.
    pub fn places_of<'a>(&self, group: GroupId, chain: impl Into<BlockChain<'a>>) -> Vec<Places> {
        places::of_each(&self.leader.registry, &self.leader.volumes, group, chain.into())
    }

    /// Which blocks of a request of `blocks` blocks a group keeps for later requests, as ranges of
    /// indices. With full attention it keeps all. Else it keeps what a prefix needs that ends where
    /// the request does, or at a multiple of `policy.checkpoint_every` blocks. The others need not
    /// be registered. Empty for a group that there is not.
    pub fn kept_blocks(&self, group: GroupId, blocks: usize) -> Vec<Range<usize>> {
        groups::kept_blocks(&self.config, group, blocks)
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

    /// Queues copies of registered blocks to the next tier, whosever G1 is.
    pub(crate) fn offload_pinned(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        let from = blocks.tier();
        if !self.leader.registry.owns_pinned(blocks) {
            return Err(OffloadError::Foreign);
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

    /// Writes the blocks of a sequence that a peer lacks into its host memory (`remote.enabled`),
    /// as many from the first on as are in host memory here. The peer sets slots aside, verifies
    /// every byte, and registers the blocks: from then on it has them as any of its own. Waits for
    /// that until `deadline`. What the peer did not take it can still read from here.
    ///
    /// A sequence whose blocks were registered just now is in host memory after
    /// [`wait_offloads`](Self::wait_offloads).
    pub fn push<'a>(&self, node: NodeId, chain: impl Into<BlockChain<'a>>, deadline: Instant) -> Pushed {
        let Some(peers) = self.leader.peers.get() else {
            let failure =
                Failure::new(FailureKind::Unsupported, "remote.enabled is false: there are no peers");
            return Pushed { written: 0, failure: Some(failure) };
        };
        peers.push(node, chain.into(), deadline)
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

fn sequence(hasher: BlockHasher, tokens: &[Token], salt: &[u8]) -> Result<TokenSequence, SequenceError> {
    let mut sequence =
        if salt.is_empty() { TokenSequence::new(hasher) } else { TokenSequence::with_salt(hasher, salt)? };
    sequence.add_tokens(tokens);
    Ok(sequence)
}
