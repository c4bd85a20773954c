//! One request, as an engine serves it: match the prefix, onboard hits, compute misses, register.

use anyhow::{Context, Result, ensure};
use kvbm::{
    AllocError, BlockBatch, BlockId, Cached, G1, GroupId, KvBlockManager, Namespace, Owned, Reset,
    SequenceHash, Tier,
};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::groups::Groups;
use super::permits::Permits;
use super::requests::Requests;
use super::tenants::Tenants;
use crate::args::OffloadMode;
use crate::note::note;

/// The only group of models whose layers are alike.
const FIRST: GroupId = GroupId(0);
/// Longest time that a request's offloads, or room for its blocks, are waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// Troubles that are logged one by one; more are only counted.
const MAX_TOLD: u64 = 5;
/// How often room is asked for again.
const RETRY: Duration = Duration::from_micros(200);

/// What one request found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Served {
    /// Blocks that it asked for.
    pub(super) blocks: u64,
    /// Blocks at its end that do not fit into G1 beside the others and were not computed.
    pub(super) left_out: u64,
    /// Blocks that it got, by the tier that held them. A block that did not arrive, or arrived with
    /// wrong bytes, is a miss, and so are the blocks behind it.
    pub(super) hits: [u64; 4],
    /// Blocks whose bytes were compared.
    pub(super) verified: u64,
    /// Of these, blocks that came from a lower tier.
    pub(super) verified_onboarded: u64,
    /// Blocks with wrong bytes.
    pub(super) corrupt: u64,
    /// Blocks that the oracle says could be served.
    pub(super) oracle: u64,
}

/// What all requests share.
pub(super) struct Server<'a> {
    pub(super) manager: &'a KvBlockManager<Owned>,
    pub(super) requests: &'a Requests,
    permits: &'a Permits,
    pub(super) tenants: Tenants,
    offload: OffloadMode,
    /// Of a model with several cache groups.
    pub(super) groups: Option<Groups>,
    /// Which requests are said to end their branch, where hints are given at all.
    ends: Option<Vec<bool>>,
    /// Every block registered so far: what a replay without bytes compares its hits with.
    registered: Mutex<HashSet<SequenceHash>>,
    /// Troubles logged so far.
    logged: AtomicU64,
}

impl<'a> Server<'a> {
    pub(super) fn new(
        manager: &'a KvBlockManager<Owned>,
        requests: &'a Requests,
        permits: &'a Permits,
        tenants: Tenants,
        offload: OffloadMode,
        ends: Option<Vec<bool>>,
    ) -> Self {
        Self {
            manager,
            requests,
            permits,
            tenants,
            offload,
            groups: Groups::of(manager),
            ends,
            registered: Mutex::default(),
            logged: AtomicU64::new(0),
        }
    }

    /// Serves request `index`; without an engine only the books are kept.
    pub(super) fn serve(&self, index: usize, engine: Option<&mut Engine<'_>>) -> Result<Served> {
        let all = self.requests.hashes(index);
        // What is larger than G1 cannot be computed in one piece; its front can.
        let most = self.permits.total().min(self.tenants.most(self.requests.namespace(index)));
        let most = self.groups.as_ref().map_or(most, |groups| groups.blocks_within(most));
        let hashes = &all[..all.len().min(most)];
        let slots = self.groups.as_ref().map_or(hashes.len(), |groups| groups.slots(hashes.len()));
        let _of_tenant = self.tenants.acquire(self.requests.namespace(index), slots);
        let _permit = self.permits.acquire(slots);
        let left_out = (all.len() - hashes.len()) as u64;
        let mut served = Served { blocks: all.len() as u64, left_out, ..Served::default() };
        match &self.groups {
            Some(groups) => groups.run(self, index, hashes, engine, &mut served)?,
            None => self.run(index, hashes, engine, &mut served)?,
        }
        if self.ends.as_ref().is_some_and(|ends| ends[index]) {
            self.manager.branch_ends(self.requests.chain(index, hashes));
        }
        self.wait_offloads()?;
        Ok(served)
    }

    /// Waits until no offload is queued or running, where the mode is `wait`.
    pub(super) fn wait_offloads(&self) -> Result<()> {
        if self.offload == OffloadMode::Wait {
            let done = self.manager.wait_offloads(Instant::now() + PATIENCE);
            anyhow::ensure!(
                done,
                "offloads did not end within {} s: is the disk or the volume stuck?",
                PATIENCE.as_secs()
            );
        }
        Ok(())
    }

    fn run(
        &self,
        index: usize,
        hashes: &[SequenceHash],
        engine: Option<&mut Engine<'_>>,
        served: &mut Served,
    ) -> Result<()> {
        let mut engine = engine;
        let prefix = self.manager.match_prefix(self.requests.chain(index, hashes));
        let tiers: Vec<Tier> = prefix.blocks().iter().map(|block| block.tier).collect();
        let cached = match self.manager.onboard(prefix).wait() {
            Ok(cached) => cached,
            // What failed is in the manager's metrics and is computed again.
            Err(error) => {
                self.log(&error.to_string());
                error.arrived
            }
        };
        let tiers = &tiers[..cached.len().min(tiers.len())];
        let good = match engine.as_deref_mut() {
            Some(engine) => self.verify(engine, &cached, hashes, served)?,
            None => self.check_registered(index, &hashes[..cached.len()])?,
        };
        for tier in &tiers[..good.min(tiers.len())] {
            served.hits[tier.index()] += 1;
        }
        if engine.is_some() {
            served.verified_onboarded = tiers.iter().filter(|tier| **tier != Tier::G1).count() as u64;
        }
        // Onboarded blocks are offloaded to the tiers that lack them. These offloads evict blocks
        // of their own: their order against the offload of the new blocks would be left to chance.
        self.wait_offloads()?;
        let namespace = self.tenants.namespace(self.requests.namespace(index));
        let fresh = self.allocate(namespace, hashes.len() - cached.len())?;
        if !fresh.is_empty() {
            match engine {
                Some(engine) => engine.compute(FIRST, fresh.block_ids(), &hashes[cached.len()..])?,
                // Before the blocks can be found.
                None => self.registered().extend(&hashes[cached.len()..]),
            }
            let chain = self.requests.chain(index, hashes);
            let (done, _) = self.manager.commit(fresh, chain, cached.len()).context("commit")?;
            // Let go of before the prefix: the tail of a request is the first to be evicted.
            drop(self.manager.register(done).context("register")?);
        }
        Ok(())
    }

    /// Offloads that still read blocks of G1 may hold more than the eviction can find for a moment.
    pub(super) fn allocate(
        &self,
        namespace: &Namespace,
        blocks: usize,
    ) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.manager.allocate_in(namespace, blocks) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
                result => return result,
            }
        }
    }

    fn registered(&self) -> std::sync::MutexGuard<'_, HashSet<SequenceHash>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails where a block was found that no request has registered. How many blocks were found.
    fn check_registered(&self, index: usize, found: &[SequenceHash]) -> Result<usize> {
        let registered = self.registered();
        let unknown = found.iter().position(|hash| !registered.contains(hash));
        ensure!(
            unknown.is_none(),
            "request {index}: block {} was found and was never registered; please report this",
            unknown.unwrap_or_default()
        );
        Ok(found.len())
    }

    /// Compares the blocks of `cached` with what was computed. How many are right before the first
    /// wrong one.
    fn verify(
        &self,
        engine: &mut Engine<'_>,
        cached: &Cached<G1>,
        hashes: &[SequenceHash],
        served: &mut Served,
    ) -> Result<usize> {
        let wrong = self.wrong(engine, FIRST, cached.block_ids(), &hashes[..cached.len()])?;
        served.verified = cached.len() as u64;
        served.corrupt = wrong.len() as u64;
        Ok(cached.block_ids().iter().position(|block| wrong.contains(block)).unwrap_or(cached.len()))
    }

    /// The blocks of a cache group that do not hold what was computed for `hashes`; says so.
    pub(super) fn wrong(
        &self,
        engine: &mut Engine<'_>,
        group: GroupId,
        blocks: &[BlockId],
        hashes: &[SequenceHash],
    ) -> Result<Vec<BlockId>> {
        let wrong = engine.verify(group, blocks, hashes)?;
        for block in &wrong {
            let [rank, layer, outer] = block.place;
            self.log(&format!(
                "wrong bytes in G1 block {} ({}), group {group}, rank {rank}, layer {layer}, outer {outer}: {}",
                block.block, block.hash, block.mismatch
            ));
        }
        Ok(wrong.into_iter().map(|wrong| wrong.block).collect())
    }

    /// Says what went wrong, the first few times: all of it is counted.
    pub(super) fn log(&self, trouble: &str) {
        match self.logged.fetch_add(1, Ordering::Relaxed) {
            ..MAX_TOLD => note(&format!("kvbm: {trouble}")),
            MAX_TOLD => note("kvbm: more troubles like these are only counted"),
            _ => {}
        }
    }
}
