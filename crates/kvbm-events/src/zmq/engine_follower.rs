//! Following engines that publish for themselves: vLLM, SGLang and whoever speaks as they do.

use super::{MessageReceiver, ZmqMessage};
use crate::deadline;
use crate::vllm::{Adapter, Continuity, EngineHash, EngineSource, Follower, FollowerStats, token_keys};
use crate::{EventReceiver, KvIndex, PrefixMatch, TransportError};
use kvbm_plan::{GroupId, SequenceHash};
use std::collections::BTreeSet;
use std::time::Duration;

/// Keeps an index from the messages of engines, one publisher each.
///
/// What an engine could not repeat is lost, and engines give no snapshots: then all that is known
/// of it is forgotten, and learnt again from what it says next. So the index may know too little of
/// an engine for a while, and never too much.
pub struct EngineFollower {
    receiver: MessageReceiver,
    engines: Vec<Engine>,
    index: KvIndex,
}

struct Engine {
    worker: EngineSource,
    follower: Follower,
    /// Its life, as its messages say.
    life: u64,
    forgotten: u64,
}

impl EngineFollower {
    /// Follows `receiver`, whose publishers are `workers` in the order of the addresses. Messages
    /// of a publisher without a worker are ignored.
    pub fn new(receiver: MessageReceiver, workers: &[EngineSource], index: KvIndex) -> Self {
        let engine = |worker: &EngineSource| Engine {
            worker: *worker,
            follower: Follower::new(*worker),
            life: 0,
            forgotten: 0,
        };
        Self { receiver, engines: workers.iter().map(engine).collect(), index }
    }

    /// Keeps the blocks of all engines by their tokens; see [`Follower::by_tokens`]. `max_blocks`
    /// of each engine.
    #[must_use]
    pub fn by_tokens(mut self, max_blocks: usize) -> Self {
        for engine in &mut self.engines {
            engine.follower = Follower::new(engine.worker).by_tokens(max_blocks);
        }
        self
    }

    /// How much each engine has of the chain that it calls so, the longest first. Engines of one
    /// kind with one seed have the same hashes; an engine that has none of these is left out.
    pub fn find_hashes(&self, group: GroupId, hashes: &[EngineHash]) -> Vec<PrefixMatch> {
        let (mut matches, mut found) = (Vec::new(), Vec::new());
        for engine in &self.engines {
            let known = hashes.iter().map_while(|hash| engine.follower.key_of(group, hash));
            self.index.find(group, &known.collect::<Vec<SequenceHash>>(), &mut found);
            matches.extend(found.iter().filter(|found| found.source == engine.worker.source));
        }
        longest_first(matches)
    }

    /// How much each engine has of a prompt, the longest first; only [by tokens](Self::by_tokens).
    /// `extra_keys` as in [`token_keys`].
    pub fn find_tokens(
        &self,
        group: GroupId,
        adapter: &Adapter,
        extra_keys: &[Option<String>],
        tokens: &[u32],
    ) -> Vec<PrefixMatch> {
        let sizes: BTreeSet<u32> = self
            .engines
            .iter()
            .filter_map(|engine| engine.follower.block_sizes())
            .flatten()
            .copied()
            .collect();
        let (mut matches, mut found) = (Vec::new(), Vec::new());
        for size in sizes {
            self.index.find(group, &token_keys(size, adapter, extra_keys, tokens), &mut found);
            matches.append(&mut found);
        }
        longest_first(matches)
    }

    /// Messages that wait to be read.
    pub fn waiting(&self) -> usize {
        self.receiver.waiting()
    }

    /// Messages that were dropped because they were read too slowly.
    pub fn dropped(&self) -> u64 {
        self.receiver.dropped()
    }

    /// The index.
    pub const fn index(&self) -> &KvIndex {
        &self.index
    }

    /// Counters of a publisher.
    pub fn stats(&self, publisher: usize) -> FollowerStats {
        self.engines.get(publisher).map_or_else(FollowerStats::default, |engine| engine.follower.stats())
    }

    /// Tokens in a block, of all blocks of a publisher so far, ascending; known [by
    /// tokens](Self::by_tokens) only.
    pub fn block_sizes(&self, publisher: usize) -> Vec<u32> {
        let sizes = self.engines.get(publisher).and_then(|engine| engine.follower.block_sizes());
        sizes.into_iter().flatten().copied().collect()
    }

    /// How often all that was known of a publisher was forgotten because of a loss.
    pub fn forgotten(&self, publisher: usize) -> u64 {
        self.engines.get(publisher).map_or(0, |engine| engine.forgotten)
    }

    /// Messages in one poll.
    const MAX_MESSAGES: usize = 64;

    /// Takes in what has come, waiting at most `timeout` for the first message; whether there was
    /// one.
    pub fn poll(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        let deadline = deadline::after(timeout);
        let mut any = false;
        for _ in 0..Self::MAX_MESSAGES {
            let left = if any { Duration::ZERO } else { deadline::remaining(deadline) };
            let Some(message) = self.receiver.next(left)? else { break };
            any = true;
            if let Some(engine) = self.engines.get_mut(message.publisher as usize) {
                engine.take(&mut self.index, &message);
            }
        }
        Ok(any)
    }
}

fn longest_first(mut matches: Vec<PrefixMatch>) -> Vec<PrefixMatch> {
    matches.sort_by_key(|found| (std::cmp::Reverse(found.blocks), found.source));
    matches
}

impl Engine {
    fn take(&mut self, index: &mut KvIndex, ZmqMessage { life, sequence, payload, .. }: &ZmqMessage) {
        if std::mem::replace(&mut self.life, *life) != *life {
            self.follower.expect_restart();
        } else if *sequence > self.follower.next_sequence() {
            // What is missing may have been removals: nothing from before it can be trusted.
            self.forget(index);
        }
        match self.follower.receive(index, *sequence, payload) {
            Ok(Continuity::Next | Continuity::Gap { .. } | Continuity::Restarted { .. }) => {}
            Err(_) => {
                self.forget(index);
                self.follower.skip(*sequence);
            }
        }
    }

    fn forget(&mut self, index: &mut KvIndex) {
        self.follower.forget(index);
        self.forgotten += 1;
    }
}
