//! An index that is followed and asked at the same time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::SequenceHash;
use kvbm::events_plane::vllm::EngineHash;
use kvbm::events_plane::{EventTransport, IndexFollower, KvIndex, RemoteSnapshots, SourceId, Subscriber};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::events::joining::conflicting_epochs;
use crate::note::note;

use super::api::{Chain, Found, Question, Served, tiers};

/// See the module.
pub(super) struct Index {
    follower: Mutex<IndexFollower<RemoteSnapshots>>,
    /// A source that sent nothing for so long is forgotten; zero for never.
    silence: Duration,
    forgotten: Mutex<u64>,
    ignored: Mutex<Ignored>,
}

/// Batches that are not taken in: of lives that are over, and of too many streams.
#[derive(Default)]
struct Ignored {
    batches: u64,
    /// When there were more of them.
    rose: Option<Instant>,
    /// Sources with two lives that were logged.
    logged: BTreeSet<SourceId>,
}

/// How long `/health` says that batches are ignored after the last one: some heartbeats.
const IGNORING: Duration = Duration::from_secs(5);

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
        Self { follower: Mutex::new(follower), silence, forgotten: Mutex::new(0), ignored: Mutex::default() }
    }

    fn forget_silent(&self) {
        if self.silence.is_zero() {
            return;
        }
        let mut follower = self.lock();
        let received = follower.subscriber().last_received();
        let silent: Vec<_> =
            received.filter(|(_, at)| at.elapsed() > self.silence).map(|(source, _)| source).collect();
        for source in silent {
            follower.forget(source);
            *self.forgotten.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            note(&format!("source {source} sent nothing for {:?}: forgotten", self.silence));
        }
    }

    /// Notes what is ignored, and says once which sources have two lives.
    fn watch_ignored(&self) {
        let (stats, two) = {
            let follower = self.lock();
            let two: Vec<_> = follower.subscriber().conflicting_epochs().collect();
            (follower.subscriber().stats().tracker, two)
        };
        let mut ignored = self.ignored.lock().unwrap_or_else(PoisonError::into_inner);
        let batches = stats.stale_batches + stats.untracked_batches;
        if batches > ignored.batches {
            (ignored.batches, ignored.rose) = (batches, Some(Instant::now()));
        }
        for lives in &two {
            if ignored.logged.insert(lives.source) {
                note(&conflicting_epochs(&lives.source.to_string(), lives.followed.0, lives.ignored.0));
            }
        }
        ignored.logged.retain(|source| two.iter().any(|lives| lives.source == *source));
    }

    fn lock(&self) -> MutexGuard<'_, IndexFollower<RemoteSnapshots>> {
        // A panic while it was held is reported by its thread; the index itself is whole between
        // two calls.
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Served for Index {
    fn follow(&self, time: Duration) -> Result<()> {
        let end = kvbm::plan::deadline_after(Instant::now(), time);
        while Instant::now() < end {
            let any = self.lock().poll(Duration::ZERO)?;
            // Whoever asks gets his turn.
            std::thread::sleep(if any { Duration::from_micros(50) } else { TURN });
        }
        self.forget_silent();
        self.watch_ignored();
        Ok(())
    }

    fn find(&self, question: &Question) -> Result<Vec<Found>, String> {
        let Chain::Hashes(hashes) = &question.chain else {
            return Err("tokens are for engines (format=vllm): use sequence hashes here".into());
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
        let received: BTreeMap<_, _> = follower.subscriber().last_received().collect();
        let suspects: Vec<_> = follower.suspects().map(|stream| stream.source).collect();
        let mut sources: Vec<_> = received.keys().copied().chain(follower.index().sources()).collect();
        sources.sort_unstable();
        sources.dedup();
        let one = |source| {
            json!({
                "source": format!("{source}"),
                "blocks": tiers(follower.index().blocks(source)),
                "suspect": suspects.contains(&source),
                "silent_s": received.get(&source).map(|at| at.elapsed().as_secs_f64()),
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
        let two = follower.subscriber().conflicting_epochs().map(|lives| {
            json!({
                "source": lives.source.to_string(),
                "epoch": lives.followed.0,
                "ignored_epoch": lives.ignored.0,
            })
        });
        let two: Vec<Value> = two.collect();
        let rose = self.ignored.lock().unwrap_or_else(PoisonError::into_inner).rose;
        let status = match rose {
            Some(at) if at.elapsed() < IGNORING => "ignoring",
            _ if suspects > 0 => "resyncing",
            _ => "ok",
        };
        json!({
            "status": status,
            "suspects": suspects,
            "sources": index.workers,
            "blocks": index.blocks,
            "refused_blocks": index.refused,
            "index_bytes": index.bytes,
            "events": subscriber.tracker.events,
            "gaps": subscriber.tracker.gaps,
            "missing": subscriber.tracker.missing,
            "duplicates": subscriber.tracker.duplicates,
            "stale_batches": subscriber.tracker.stale_batches,
            "untracked_batches": subscriber.tracker.untracked_batches,
            "two_lives": two,
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

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::events_plane::{EventBatch, InProcessTransport, StreamId, Tracker, wire};
    use kvbm::plan::Epoch;

    #[test]
    fn batches_that_are_ignored_are_reported_while_they_come() {
        let transport = Arc::new(InProcessTransport::default());
        let subscriber = Subscriber::with_tracker(transport.subscribe().unwrap(), Tracker::new(1));
        let index = Index::new(subscriber, transport.clone(), KvIndex::default(), Duration::ZERO);
        let health_after = |source, epoch| {
            let stream = StreamId { source: SourceId(source), epoch: Epoch(epoch), shard: 0 };
            let batch = wire::encode(&EventBatch::new(stream, 0, Vec::new())).unwrap();
            transport.publish(&batch.into(), Duration::from_secs(1)).unwrap();
            index.follow(Duration::from_millis(20)).unwrap();
            let health = index.health();
            (
                health["status"].as_str().unwrap().to_owned(),
                health["stale_batches"].clone(),
                health["untracked_batches"].clone(),
            )
        };
        assert_eq!(health_after(1, 9), ("ok".into(), json!(0), json!(0)));
        assert_eq!(health_after(1, 4), ("ignoring".into(), json!(1), json!(0)), "a life that is over");
        index.ignored.lock().unwrap().rose = Instant::now().checked_sub(IGNORING);
        assert_eq!(health_after(1, 9), ("ok".into(), json!(1), json!(0)), "nothing more came of it");
        assert_eq!(health_after(2, 1), ("ignoring".into(), json!(1), json!(1)), "one stream too many");
        assert_eq!(index.health()["two_lives"], json!([]));
    }
}
