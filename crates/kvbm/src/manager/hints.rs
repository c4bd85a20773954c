//! What an engine knows of the future, and of itself: uses that it expects, blocks to keep, its
//! speed, names of its own for blocks.

use super::{DescribeError, KvBlockManager, describe};
use crate::config::FIRST_GROUP;
use crate::leader::PinForError;
use crate::prefetch::{self, Prefetched};
use kvbm_events::vllm::EngineBlock;
use kvbm_plan::{NamespaceId, deadline_after};
use kvbm_pool::{PinError, TierMask, TtlError};
use kvbm_tokens::{BlockChain, Namespace};
use std::time::Duration;

impl<G> KvBlockManager<G> {
    /// The engine computed `tokens` tokens of prompts in `elapsed`: a step, whatever else was in
    /// it. From such steps kvbm knows what computing a block costs, where
    /// `policy.prefill_tokens_per_s` does not say it. What would come from a lower tier later than
    /// it is computed is not promised then. Steps of fewer than 64 tokens, and pauses of more than
    /// 30 s, do not count; whether this one did.
    pub fn prefilled(&self, tokens: u64, elapsed: Duration) -> bool {
        self.leader.transfers.saw_prefill(tokens, elapsed)
    }

    /// A request for `chain` will come: copies what only G3 has of it to G2, in the background and
    /// within a budget (`policy.prefetch_share`). Asks no volume. Returns at once.
    pub fn prefetch<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Prefetched {
        prefetch::ahead(&self.leader, chain.into())
    }

    /// The session of `chain` goes on soon: its blocks count as used now, and
    /// [`prefetch`](Self::prefetch) begins. The opposite of [`branch_ends`](Self::branch_ends).
    pub fn session_resumes<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Prefetched {
        let chain = chain.into();
        self.leader.registry.touch(FIRST_GROUP, chain.hashes());
        prefetch::ahead(&self.leader, chain)
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

    /// Like [`pin`](Self::pin), for a time in place of iterations. When it is over, the blocks are
    /// unpinned but for those that another such pin holds: pins until an iteration of the same
    /// blocks end with it.
    ///
    /// # Errors
    /// [`PinForError`]; nothing changed.
    pub fn pin_for<'a>(
        &self,
        chain: impl Into<BlockChain<'a>>,
        tiers: TierMask,
        time: Duration,
    ) -> Result<usize, PinForError> {
        self.leader.pin_until(chain.into(), tiers, deadline_after(kvbm_plan::clock::now(), time))
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
    /// blocks than that. A block that left the disk like this may be found there again after a
    /// restart, as an evicted one may, until its slot is written again or its namespace is
    /// forgotten. For what must be gone there is [`forget`](Self::forget).
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

    /// Says what the engine knows of blocks `first`, `first + 1`, .. of `chain`: its own hashes,
    /// their tokens, what else went into the hashes, the adapter. Call it before the blocks are
    /// registered (or offloaded, where the engine owns G1); what is left empty is taken from the
    /// chain, where that knows it.
    ///
    /// Events in an engine's format (`events.url` with `format=vllm`) tell of the blocks by these
    /// names from then on. The table is bounded: it holds as many blocks as all tiers (1,048,576 at
    /// most) and the event ring. Blocks that it does not know are told by kvbm's hash, without
    /// tokens, and counted ([`EventsStatus`](crate::EventsStatus)). In kvbm's own format only the
    /// tokens matter, as `local_hash`; nothing else is kept then.
    ///
    /// # Errors
    /// [`DescribeError`]: nothing was noted.
    pub fn describe<'a>(
        &self,
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        blocks: impl IntoIterator<Item = EngineBlock>,
    ) -> Result<(), DescribeError> {
        describe::describe(&self.events, self.hasher(), chain.into(), first, blocks)
    }
}
