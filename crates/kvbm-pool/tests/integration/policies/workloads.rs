//! Requests from traces, and made up ones of agents: contexts that are long, grow, and are reused
//! nearly whole.

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

/// For each request whether its last two blocks occur in no later one, flipped where `random` says
/// so.
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
    /// One step in so many starts a sub-agent with the context so far, which does a few steps and
    /// is gone.
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

/// How sessions with pauses work: each step comes a pause after the one before, so what is used
/// next depends on time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sessions {
    pub(crate) open: usize,
    pub(crate) prompts: u64,
    pub(crate) prompt_blocks: u64,
    pub(crate) step: (u64, u64),
    /// Steps of a session, in the mean; the shorter the more frequent.
    pub(crate) steps: u64,
    pub(crate) pause: Pause,
    /// One pause in so many is fifty times as long; 0 for none.
    pub(crate) long_pause_one_in: u64,
    /// One step in so many starts this many sub-agents with the context so far, for a few steps
    /// each; 0 for none.
    pub(crate) fork_one_in: u64,
    pub(crate) fan_out: u64,
    /// A context longer than this is cut to its prompt and a summary; 0 for never.
    pub(crate) limit: usize,
    /// Of 100 requests so many come once, from nobody.
    pub(crate) single_percent: u64,
    /// Of 100 sessions that begin, so many go on where one ended.
    pub(crate) reopen_percent: u64,
    /// Whether sessions begin in bursts.
    pub(crate) bursts: bool,
}

/// How long a tool call takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pause {
    Fixed,
    Uniform,
    /// Most are short, some very long.
    HeavyTail,
}

pub(crate) const SESSIONS: Sessions = Sessions {
    open: 24,
    prompts: 3,
    prompt_blocks: 30,
    step: (1, 6),
    steps: 20,
    pause: Pause::HeavyTail,
    long_pause_one_in: 20,
    fork_one_in: 0,
    fan_out: 0,
    limit: 0,
    single_percent: 0,
    reopen_percent: 0,
    bursts: false,
};

struct Session {
    context: Vec<u64>,
    left: u64,
    is_child: bool,
}

impl Sessions {
    fn pause(self, random: &mut Random) -> u64 {
        let base = match self.pause {
            Pause::Fixed => 1000,
            Pause::Uniform => random.between(200, 1800),
            Pause::HeavyTail => (100_000 / random.between(1, 1000)) + random.between(1, 100),
        };
        let is_long = self.long_pause_one_in > 0 && random.one_in(self.long_pause_one_in);
        if is_long { 50 * base } else { base }
    }

    fn begin(self, random: &mut Random, over: &mut Vec<Vec<u64>>) -> Session {
        let reopens = !over.is_empty() && random.between(0, 99) < self.reopen_percent;
        let context = if reopens {
            over.swap_remove(random.between(0, over.len() as u64 - 1) as usize)
        } else {
            let prompt = random.between(0, self.prompts - 1) * self.prompt_blocks;
            (prompt..prompt + self.prompt_blocks).collect()
        };
        let steps = (0..4).map(|_| random.between(0, 2 * self.steps)).min().unwrap_or(0);
        Session { context, left: 1 + steps, is_child: false }
    }
}

pub(crate) fn with_pauses(kind: Sessions, requests: usize, seed: u64) -> Vec<Vec<u64>> {
    use std::cmp::Reverse;
    let mut random = Random(seed);
    let mut next_id = kind.prompts * kind.prompt_blocks;
    let mut fresh = |count: u64| {
        next_id += count;
        next_id - count..next_id
    };
    let mut due = std::collections::BinaryHeap::new();
    let (mut sessions, mut over, mut out) = (Vec::<Option<Session>>::new(), Vec::new(), Vec::new());
    let (mut now, mut open) = (0, 0);
    while out.len() < requests {
        while open < kind.open {
            let burst = random.between(0, 3) * 8000 + random.between(0, 50);
            let wait = if kind.bursts { burst } else { kind.pause(&mut random) };
            due.push(Reverse((now + wait, sessions.len())));
            sessions.push(Some(kind.begin(&mut random, &mut over)));
            open += 1;
        }
        if random.between(0, 99) < kind.single_percent {
            out.push(fresh(random.between(1, 30)).collect());
            continue;
        }
        let Some(Reverse((time, index))) = due.pop() else { break };
        let Some(mut session) = sessions[index].take() else { continue };
        now = time;
        session.context.extend(fresh(random.between(kind.step.0, kind.step.1)));
        out.push(session.context.clone());
        session.left -= 1;
        if kind.limit > 0 && session.context.len() > kind.limit {
            session.context.truncate(kind.prompt_blocks as usize);
            session.context.extend(fresh(4));
        }
        if kind.fork_one_in > 0 && !session.is_child && random.one_in(kind.fork_one_in) {
            for _ in 0..kind.fan_out {
                due.push(Reverse((now + kind.pause(&mut random) / 4, sessions.len())));
                let (context, left) = (session.context.clone(), random.between(1, 5));
                sessions.push(Some(Session { context, left, is_child: true }));
                open += 1;
            }
        }
        if session.left > 0 {
            due.push(Reverse((now + kind.pause(&mut random), index)));
            sessions[index] = Some(session);
        } else {
            open -= 1;
            over.push(session.context);
        }
    }
    out
}
