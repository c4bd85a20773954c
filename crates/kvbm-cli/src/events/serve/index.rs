//! An index that is followed and asked at the same time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::SequenceHash;
use kvbm::events_plane::vllm::EngineHash;
use kvbm::events_plane::{EventTransport, IndexFollower, KvIndex, RemoteSnapshots, Subscriber};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::note::note;

use super::api::{Chain, Found, Question, Served, tiers};

/// See the module.
pub(super) struct Index {
    follower: Mutex<IndexFollower<RemoteSnapshots>>,
    /// A source that was not heard of for so long is forgotten; zero for never.
    silence: Duration,
    forgotten: Mutex<u64>,
}

/// Most of the time that the index is kept from those who ask while there is much to take in.
pub(super) const TURN: Duration = Duration::from_micros(500);

impl Index {
    pub(super) fn new(
        subscriber: Subscriber,
        transport: Arc<dyn EventTransport>,
        index: KvIndex,
        silence: Duration,
    ) -> Self {
        let follower = IndexFollower::new(subscriber, RemoteSnapshots::new(transport), index);
        Self { follower: Mutex::new(follower), silence, forgotten: Mutex::new(0) }
    }

    fn forget_silent(&self) {
        if self.silence.is_zero() {
            return;
        }
        let mut follower = self.lock();
        let heard = follower.subscriber().heard();
        let silent: Vec<_> =
            heard.filter(|(_, at)| at.elapsed() > self.silence).map(|(source, _)| source).collect();
        for source in silent {
            follower.forget(source);
            *self.forgotten.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            note(&format!("source {source} was not heard of for {:?}: forgotten", self.silence));
        }
    }

    fn lock(&self) -> MutexGuard<'_, IndexFollower<RemoteSnapshots>> {
        // A panic while it was held is reported by its thread; the index itself is whole between two calls.
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Served for Index {
    fn follow(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let any = self.lock().poll(Duration::ZERO)?;
            // Whoever asks gets his turn.
            std::thread::sleep(if any { Duration::from_micros(50) } else { TURN });
        }
        self.forget_silent();
        Ok(())
    }

    fn find(&self, question: &Question) -> Result<Vec<Found>, String> {
        let Chain::Hashes(hashes) = &question.chain else {
            return Err("tokens are for engines (format=vllm): here ask with sequence hashes".into());
        };
        let chain = hashes.iter().map(sequence_hash).collect::<Result<Vec<_>, _>>()?;
        let mut found = Vec::new();
        self.lock().index().find(question.group, &chain, &mut found);
        found.sort_by_key(|found| (std::cmp::Reverse(found.blocks), found.source));
        let found = found.into_iter().map(|found| Found {
            source: found.source.to_string(),
            blocks: found.blocks,
            by_tier: found.by_tier.map(u64::from),
        });
        Ok(found.collect())
    }

    fn sources(&self) -> Vec<Value> {
        let follower = self.lock();
        let heard: BTreeMap<_, _> = follower.subscriber().heard().collect();
        let suspects: Vec<_> = follower.suspects().map(|stream| stream.source).collect();
        let mut sources: Vec<_> = heard.keys().copied().chain(follower.index().sources()).collect();
        sources.sort_unstable();
        sources.dedup();
        let one = |source| {
            json!({
                "source": format!("{source}"),
                "blocks": tiers(follower.index().blocks(source)),
                "suspect": suspects.contains(&source),
                "silent_s": heard.get(&source).map(|at| at.elapsed().as_secs_f64()),
            })
        };
        sources.into_iter().map(one).collect()
    }

    fn sizes(&self) -> [u64; 4] {
        let follower = self.lock();
        let mut sum = [0; 4];
        for source in follower.index().sources() {
            let blocks = follower.index().blocks(source);
            sum.iter_mut().zip(blocks).for_each(|(sum, blocks)| *sum += blocks);
        }
        sum
    }

    fn health(&self) -> Value {
        let follower = self.lock();
        let (index, follow) = (follower.index().stats(), follower.stats());
        let subscriber = follower.subscriber().stats();
        let suspects = follower.suspects().count();
        json!({
            "status": if suspects == 0 { "ok" } else { "resyncing" },
            "suspects": suspects,
            "sources": index.workers,
            "blocks": index.blocks,
            "refused_blocks": index.refused,
            "index_bytes": index.bytes,
            "events": subscriber.tracker.events,
            "gaps": subscriber.tracker.gaps,
            "missing": subscriber.tracker.missing,
            "duplicates": subscriber.tracker.duplicates,
            "malformed": subscriber.malformed,
            "dropped": subscriber.dropped,
            "resyncs": follow.resyncs,
            "restarts": follow.restarts,
            "forgotten": *self.forgotten.lock().unwrap_or_else(PoisonError::into_inner),
            "lag_batches": follower.subscriber().waiting(),
        })
    }
}

/// Ours are 16 bytes.
fn sequence_hash(hash: &EngineHash) -> Result<SequenceHash, String> {
    let bytes = match hash {
        EngineHash::Bytes(bytes) => bytes.as_slice().try_into().ok(),
        EngineHash::Uint(_) | EngineHash::Int(_) => None,
    };
    bytes
        .map(SequenceHash::from_bytes)
        .ok_or_else(|| format!("'{hash}' is not a sequence hash: 32 hex digits"))
}
