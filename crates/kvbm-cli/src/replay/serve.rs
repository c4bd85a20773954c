//! One request, as an engine serves it: match the prefix, onboard hits, compute misses, register.

use anyhow::{Context, Result};
use kvbm::{AllocError, BlockBatch, Cached, G1, KvBlockManager, Namespace, Owned, Reset, SequenceHash, Tier};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::permits::Permits;
use super::requests::Requests;
use super::tenants::Tenants;
use crate::args::OffloadMode;
use crate::note::note;

/// Longest time that a request's offloads, or room for its blocks, are waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// Troubles that are told one by one.
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
    /// Blocks that it got, by the tier that held them. What a tier held and could not give unharmed is no hit.
    pub(super) hits: [u64; 4],
    /// Blocks whose bytes were compared.
    pub(super) verified: u64,
    /// Blocks with wrong bytes.
    pub(super) corrupt: u64,
}

/// What all requests share.
pub(super) struct Server<'a> {
    manager: &'a KvBlockManager<Owned>,
    requests: &'a Requests,
    permits: &'a Permits,
    tenants: Tenants,
    offload: OffloadMode,
    /// Which requests are said to end their branch, where hints are given at all.
    ends: Option<Vec<bool>>,
    /// Troubles told so far.
    told: AtomicU64,
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
        Self { manager, requests, permits, tenants, offload, ends, told: AtomicU64::new(0) }
    }

    /// Serves request `index`; without an engine only the books are kept.
    pub(super) fn serve(&self, index: usize, engine: Option<&mut Engine<'_>>) -> Result<Served> {
        let all = self.requests.hashes(index);
        // What is larger than G1 cannot be computed in one piece; its front can.
        let most = self.permits.total().min(self.tenants.most(self.requests.namespace(index)));
        let hashes = &all[..all.len().min(most)];
        let _of_tenant = self.tenants.acquire(self.requests.namespace(index), hashes.len());
        let _permit = self.permits.acquire(hashes.len());
        let left_out = (all.len() - hashes.len()) as u64;
        let mut served = Served { blocks: all.len() as u64, left_out, ..Served::default() };
        self.run(index, hashes, engine, &mut served)?;
        if self.ends.as_ref().is_some_and(|ends| ends[index]) {
            self.manager.branch_ends(self.requests.chain(index, hashes));
        }
        self.wait_offloads()?;
        Ok(served)
    }

    /// Waits until no offload is queued or running, where the mode is `wait`.
    fn wait_offloads(&self) -> Result<()> {
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
                self.tell(&error.to_string());
                error.arrived
            }
        };
        for tier in &tiers[..cached.len().min(tiers.len())] {
            served.hits[tier.index()] += 1;
        }
        if let Some(engine) = engine.as_deref_mut() {
            self.verify(engine, &cached, hashes, served)?;
        }
        // Onboarded blocks are offloaded to the tiers that lack them. These offloads evict blocks
        // of their own: their order against the offload of the new blocks would be left to chance.
        self.wait_offloads()?;
        let namespace = self.tenants.namespace(self.requests.namespace(index));
        let fresh = self.allocate(namespace, hashes.len() - cached.len())?;
        if !fresh.is_empty() {
            if let Some(engine) = engine {
                engine.compute(fresh.block_ids(), &hashes[cached.len()..])?;
            }
            let chain = self.requests.chain(index, hashes);
            let (done, _) = self.manager.commit(fresh, chain, cached.len()).context("commit")?;
            // Let go of before the prefix: the tail of a request is the first to be evicted.
            drop(self.manager.register(done).context("register")?);
        }
        Ok(())
    }

    /// Offloads that still read blocks of G1 may hold more than the eviction can find for a moment.
    fn allocate(&self, namespace: &Namespace, blocks: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.manager.allocate_in(namespace, blocks) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
                result => return result,
            }
        }
    }

    fn verify(
        &self,
        engine: &mut Engine<'_>,
        cached: &Cached<G1>,
        hashes: &[SequenceHash],
        served: &mut Served,
    ) -> Result<()> {
        let wrong = engine.verify(cached.block_ids(), &hashes[..cached.len()])?;
        for block in &wrong {
            let [rank, layer, outer] = block.place;
            self.tell(&format!(
                "wrong bytes in G1 block {} ({}), rank {rank}, layer {layer}, outer {outer}: {}",
                block.block, block.hash, block.mismatch
            ));
        }
        served.verified = cached.len() as u64;
        served.corrupt = wrong.len() as u64;
        Ok(())
    }

    /// Says what went wrong, the first few times: all of it is counted.
    fn tell(&self, trouble: &str) {
        match self.told.fetch_add(1, Ordering::Relaxed) {
            ..MAX_TOLD => note(&format!("kvbm: {trouble}")),
            MAX_TOLD => note("kvbm: more troubles like these are only counted"),
            _ => {}
        }
    }
}
