//! Requests from traces, and made up ones of agents: contexts that are long, grow, and are reused nearly whole.

use std::path::PathBuf;

pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

/// `KVBM_TRACES`, or `shared/traces` beside the repository.
pub(crate) fn trace(name: &str) -> Option<Vec<Vec<u64>>> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("KVBM_TRACES").map_or_else(beside, PathBuf::from);
    let text = std::fs::read_to_string(folder.join(name)).ok()?;
    let ids = |line: &str| {
        let request: serde_json::Value = serde_json::from_str(line).unwrap();
        let ids = request["hash_ids"].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap()).collect()
    };
    Some(text.lines().map(ids).collect())
}

/// For each request whether its last two blocks occur in no later one, flipped where `random` says so.
pub(crate) fn endings(requests: &[Vec<u64>], accuracy: f64, mut random: Random) -> Vec<bool> {
    let mut later = std::collections::HashSet::<u64>::new();
    let mut ends: Vec<bool> = Vec::with_capacity(requests.len());
    for request in requests.iter().rev() {
        ends.push(request.iter().rev().take(2).all(|block| !later.contains(block)));
        later.extend(request);
    }
    ends.reverse();
    ends.into_iter()
        .map(|end| end ^ ((random.next() >> 11) as f64 / (1_u64 << 53) as f64 >= accuracy))
        .collect()
}

/// How agents work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agents {
    /// Working at a time.
    pub(crate) open: usize,
    /// Shared prompts (tools, instructions) and their length.
    pub(crate) prompts: u64,
    pub(crate) prompt_blocks: u64,
    /// Blocks that a step adds.
    pub(crate) step: (u64, u64),
    /// Steps of a task, in the mean.
    pub(crate) steps: u64,
    /// One step in so many starts a sub-agent with the context so far, which does a few steps and is gone.
    pub(crate) fork_one_in: u64,
    /// One step in so many is thrown away and tried again from the step before.
    pub(crate) retry_one_in: u64,
    /// Whether agents take turns strictly instead of at random.
    pub(crate) in_turn: bool,
}

pub(crate) const AGENTS: Agents = Agents {
    open: 24,
    prompts: 3,
    prompt_blocks: 30,
    step: (1, 6),
    steps: 40,
    fork_one_in: 12,
    retry_one_in: 10,
    in_turn: false,
};

pub(crate) fn agentic(kind: Agents, requests: usize, seed: u64) -> Vec<Vec<u64>> {
    let mut random = Random(seed);
    let mut next_id = kind.prompts * kind.prompt_blocks;
    let mut open: Vec<(Vec<u64>, u64)> = Vec::new();
    let mut out = Vec::with_capacity(requests);
    let mut turn = 0;
    while out.len() < requests {
        while open.len() < kind.open {
            let prompt = random.between(0, kind.prompts - 1) * kind.prompt_blocks;
            let steps = 1 + random.between(0, 2 * kind.steps);
            open.push(((prompt..prompt + kind.prompt_blocks).collect(), steps));
        }
        turn += 1;
        let count = open.len();
        let index = if kind.in_turn { turn % count } else { random.between(0, count as u64 - 1) as usize };
        let (context, left) = &mut open[index];
        let before = context.len();
        for _ in 0..random.between(kind.step.0, kind.step.1) {
            context.push(next_id);
            next_id += 1;
        }
        out.push(context.clone());
        *left -= 1;
        let over = *left == 0;
        if random.one_in(kind.retry_one_in) {
            context.truncate(before);
        }
        let child = random.one_in(kind.fork_one_in).then(|| context.clone());
        if over {
            open.swap_remove(index);
        }
        if let Some(child) = child {
            open.push((child, random.between(1, 4)));
        }
    }
    out
}
