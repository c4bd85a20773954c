//! A made-up multi-turn workload: sessions that share system prompts, come back after a while, and
//! grow with each turn.

use super::Trace;
use crate::rng::Rng;

/// System prompts; the first ones are the popular ones.
const PROMPTS: u64 = 12;
/// Blocks of a system prompt.
const PROMPT_BLOCKS: (u64, u64) = (4, 24);
/// Blocks that a turn adds: the last answer and the next question.
const TURN_BLOCKS: (u64, u64) = (1, 10);
/// Longest context.
const MAX_BLOCKS: usize = 256;
/// Sessions open at a time.
const OPEN: usize = 48;
/// A session ends after one in so many turns.
const TURNS: u64 = 8;
/// Longest time between requests, in milliseconds.
const GAP_MS: u64 = 200;
/// Tokens of a block, as in Mooncake's traces.
const BLOCK_TOKENS: u64 = 512;

/// `requests` requests of sessions that `seed` decides; the same for the same seed, everywhere.
pub fn generate(requests: u32, seed: u64) -> Trace {
    let mut workload = Workload { rng: Rng::new(seed), next_id: 0, prompts: Vec::new() };
    for _ in 0..PROMPTS {
        let blocks = workload.rng.between(PROMPT_BLOCKS.0, PROMPT_BLOCKS.1);
        let prompt = workload.fresh(blocks);
        workload.prompts.push(prompt);
    }
    let mut trace = Trace::default();
    let mut sessions: Vec<Vec<u64>> = Vec::new();
    let mut now_ms = 0;
    for _ in 0..requests {
        now_ms += workload.rng.below(GAP_MS);
        let index = workload.next_session(&mut sessions);
        let turn = workload.rng.between(TURN_BLOCKS.0, TURN_BLOCKS.1);
        let turn = workload.fresh(turn);
        let session = &mut sessions[index];
        session.extend(turn);
        trace.push(now_ms, session.len() as u64 * BLOCK_TOKENS, session);
        if session.len() >= MAX_BLOCKS || workload.rng.one_in(TURNS) {
            sessions.swap_remove(index);
        }
    }
    trace
}

struct Workload {
    rng: Rng,
    next_id: u64,
    prompts: Vec<Vec<u64>>,
}

impl Workload {
    fn fresh(&mut self, blocks: u64) -> Vec<u64> {
        let first = self.next_id;
        self.next_id += blocks;
        (first..self.next_id).collect()
    }

    /// The session that speaks next: a new one while there is room, now and then; else one of the
    /// open ones.
    fn next_session(&mut self, sessions: &mut Vec<Vec<u64>>) -> usize {
        if sessions.is_empty() || (sessions.len() < OPEN && self.rng.one_in(3)) {
            // The smaller of two draws: the first prompts are chosen most.
            let (a, b) = (self.rng.below(PROMPTS), self.rng.below(PROMPTS));
            sessions.push(self.prompts[a.min(b) as usize].clone());
            return sessions.len() - 1;
        }
        self.rng.below(sessions.len() as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        assert_eq!(generate(200, 1), generate(200, 1));
        assert_ne!(generate(200, 1), generate(200, 2));
        assert_eq!(generate(0, 1).num_blocks(), 0);
        // A shorter workload is the beginning of a longer one.
        assert_eq!(generate(50, 3).requests(), &generate(200, 3).requests()[..50]);
    }

    #[test]
    fn sessions_share_prompts_and_grow() {
        let trace = generate(3000, 42);
        assert_eq!(trace.requests().len(), 3000);
        let (mut seen, mut parents, mut reused) = (HashSet::new(), HashMap::new(), 0_u64);
        let mut last_ms = 0;
        for request in trace.requests() {
            let blocks = trace.blocks(request);
            assert!((1..MAX_BLOCKS + 10).contains(&blocks.len()));
            assert!(request.timestamp_ms >= last_ms);
            last_ms = request.timestamp_ms;
            let mut parent = None;
            for block in blocks {
                assert_eq!(*parents.entry(*block).or_insert(parent), parent, "an id names its whole prefix");
                parent = Some(*block);
            }
            reused += blocks.iter().filter(|block| !seen.insert(**block)).count() as u64;
        }
        let ratio = reused as f64 / trace.num_blocks() as f64;
        assert!((0.6..0.95).contains(&ratio), "share of blocks seen before: {ratio}");
    }
}
