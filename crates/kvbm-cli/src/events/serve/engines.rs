//! An index of engines, which speak vLLM's format or SGLang's.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::events_plane::vllm::{EngineSource, FollowerStats};
use kvbm::events_plane::zmq::{EngineFollower, ZmqTransport};
use kvbm::events_plane::{KvIndex, SourceId};
use kvbm::plan::NodeId;
use serde_json::{Value, json};

use super::api::{Chain, Found, Question, Served, tiers};
use super::index::TURN;
use crate::events::engines::{Engines, age};

/// Follows engines and is asked at the same time. Blocks stand in the index by their tokens, so
/// engines whose hashes differ are found by one question.
pub(super) struct EngineIndex {
    addresses: Vec<String>,
    follower: Mutex<EngineFollower>,
    /// Its connections end with it.
    _transport: ZmqTransport,
}

impl EngineIndex {
    pub(super) fn new(engines: Engines, max_blocks: usize) -> Self {
        let Engines { addresses, receiver, transport } = engines;
        let worker = |at: usize| EngineSource { source: SourceId(at as u64), node: NodeId(at as u32) };
        let workers: Vec<EngineSource> = (0..addresses.len()).map(worker).collect();
        let follower = EngineFollower::new(receiver, &workers, KvIndex::new(max_blocks));
        let follower = Mutex::new(follower.by_tokens(max_blocks));
        Self { addresses, follower, _transport: transport }
    }

    fn lock(&self) -> MutexGuard<'_, EngineFollower> {
        // A panic while it was held is reported by its thread; the index itself is whole between
        // two calls.
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self, source: SourceId) -> String {
        self.addresses.get(source.0 as usize).cloned().unwrap_or_default()
    }
}

impl Served for EngineIndex {
    fn follow(&self, time: Duration) -> Result<()> {
        let end = kvbm::plan::deadline_after(Instant::now(), time);
        while Instant::now() < end {
            let any = self.lock().poll(Duration::ZERO)?;
            // Whoever asks gets his turn.
            std::thread::sleep(if any { Duration::from_micros(50) } else { TURN });
        }
        Ok(())
    }

    fn find(&self, question: &Question) -> Result<Vec<Found>, String> {
        let follower = self.lock();
        let matches = match &question.chain {
            Chain::Hashes(hashes) => follower.find_hashes(question.group, hashes),
            Chain::Tokens { tokens, adapter, extra_keys } => {
                follower.find_tokens(question.group, adapter, extra_keys, tokens)
            }
        };
        let found = matches.into_iter().map(|found| Found {
            source: self.name(found.source),
            blocks: found.blocks,
            by_tier: found.by_tier.map(u64::from),
        });
        Ok(found.collect())
    }

    fn sources(&self) -> Vec<Value> {
        let follower = self.lock();
        let one = |(at, address): (usize, &String)| {
            let stats = follower.stats(at);
            json!({
                "source": address,
                "blocks": tiers(follower.index().blocks(SourceId(at as u64))),
                "messages_missing": stats.missing,
                "restarts": stats.restarts,
                "forgotten": follower.forgotten(at),
                "block_tokens": follower.block_sizes(at),
                "last_message_s": (stats.timestamp > 0.0).then(|| age(stats.timestamp)),
            })
        };
        self.addresses.iter().enumerate().map(one).collect()
    }

    fn sizes(&self) -> [u64; 4] {
        let follower = self.lock();
        let mut sum = [0; 4];
        for at in 0..self.addresses.len() {
            let blocks = follower.index().blocks(SourceId(at as u64));
            sum.iter_mut().zip(blocks).for_each(|(sum, blocks)| *sum += blocks);
        }
        sum
    }

    fn health(&self) -> Value {
        let follower = self.lock();
        let index = follower.index().stats();
        let all = |of: fn(FollowerStats) -> u64| {
            (0..self.addresses.len()).map(|at| of(follower.stats(at))).fold(0, u64::saturating_add)
        };
        json!({
            // What was lost was forgotten: the index knows too little then, never too much.
            "status": "ok",
            "sources": index.workers,
            "blocks": index.blocks,
            "refused_blocks": index.refused + all(|stats| stats.refused),
            "index_bytes": index.bytes,
            "events": all(|stats| stats.events),
            "messages_missing": all(|stats| stats.missing),
            // A message comes once: what a replay and a connection both have is handed on once.
            "duplicates": 0,
            "malformed": all(|stats| stats.malformed),
            "unknown_events": all(|stats| stats.unknown_events),
            "unknown_medium": all(|stats| stats.unknown_medium),
            "dropped": follower.dropped(),
            "restarts": all(|stats| stats.restarts),
            "forgotten": (0..self.addresses.len()).map(|at| follower.forgotten(at)).sum::<u64>(),
            "lag_batches": follower.waiting(),
        })
    }
}
