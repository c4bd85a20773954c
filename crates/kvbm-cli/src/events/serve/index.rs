//! An index that is followed and asked at the same time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kvbm::events_plane::{
    EventTransport, FollowStats, IndexFollower, IndexStats, KvIndex, PrefixMatch, SourceId, Subscriber,
    SubscriberStats,
};
use kvbm::plan::GroupId;
use kvbm::{SequenceHash, Tier};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::fetch::Fetcher;

/// See the module.
pub(super) struct Index {
    follower: Mutex<IndexFollower<Fetcher>>,
    /// A source that was not heard of for so long is forgotten; zero for never.
    silence: Duration,
    forgotten: Mutex<u64>,
}

/// A source as it is known.
pub(super) struct Known {
    pub(super) source: SourceId,
    pub(super) blocks: [u64; Tier::ALL.len()],
    /// Whether what the index says of it may be wrong until a snapshot came.
    pub(super) suspect: bool,
    /// Time since it was heard of last.
    pub(super) silent: Option<Duration>,
}

/// How the index is doing.
pub(super) struct Health {
    pub(super) index: IndexStats,
    pub(super) follow: FollowStats,
    pub(super) subscriber: SubscriberStats,
    pub(super) suspects: usize,
    pub(super) waiting: usize,
    pub(super) forgotten: u64,
}

/// Most of the time that the index is kept from those who ask while there is much to take in.
const TURN: Duration = Duration::from_micros(500);

impl Index {
    pub(super) fn new(
        subscriber: Subscriber,
        transport: Arc<dyn EventTransport>,
        index: KvIndex,
        silence: Duration,
    ) -> Result<Self> {
        let follower = IndexFollower::new(subscriber, Fetcher::start(transport)?, index);
        Ok(Self { follower: Mutex::new(follower), silence, forgotten: Mutex::new(0) })
    }

    /// Takes in what comes for about `time`.
    pub(super) fn follow(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let any = self.lock().poll(Duration::ZERO)?;
            // Whoever asks gets his turn.
            std::thread::sleep(if any { Duration::from_micros(50) } else { TURN });
        }
        self.forget_silent();
        Ok(())
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
            eprintln!("source {source} was not heard of for {:?}: forgotten", self.silence);
        }
    }

    /// For each source that has the first block of `chain`, how much of it it has.
    pub(super) fn find(&self, group: GroupId, chain: &[SequenceHash]) -> Vec<PrefixMatch> {
        let mut found = Vec::new();
        self.lock().index().find(group, chain, &mut found);
        found
    }

    pub(super) fn sources(&self) -> Vec<Known> {
        let follower = self.lock();
        let heard: BTreeMap<_, _> = follower.subscriber().heard().collect();
        let suspects: Vec<_> = follower.suspects().map(|stream| stream.source).collect();
        let mut sources: Vec<_> = heard.keys().copied().chain(follower.index().sources()).collect();
        sources.sort_unstable();
        sources.dedup();
        let known = |source| Known {
            source,
            blocks: follower.index().blocks(source),
            suspect: suspects.contains(&source),
            silent: heard.get(&source).map(Instant::elapsed),
        };
        sources.into_iter().map(known).collect()
    }

    pub(super) fn health(&self) -> Health {
        let follower = self.lock();
        Health {
            index: follower.index().stats(),
            follow: follower.stats(),
            subscriber: follower.subscriber().stats(),
            suspects: follower.suspects().count(),
            waiting: follower.subscriber().waiting(),
            forgotten: *self.forgotten.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn lock(&self) -> MutexGuard<'_, IndexFollower<Fetcher>> {
        // A panic while it was held is reported by its thread; the index itself is whole between two calls.
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
