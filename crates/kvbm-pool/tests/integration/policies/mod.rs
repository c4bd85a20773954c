//! Eviction policies: what they keep, on traces and on made-up workloads.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod lru_leaf;
mod replay;
mod workloads;

use kvbm_plan::Tier;
use kvbm_pool::PolicyKind;
use replay::{hit_ratio, registry};
use workloads::{AGENTS, Agents, Pause, Random, SESSIONS, Sessions, agentic, endings, trace, with_pauses};

const NO_HINTS: replay::EndHint<'static> = &|_| false;

fn median_of_seeds(requests: &[Vec<u64>], policy: PolicyKind, capacity: u32) -> f64 {
    let mut ratios: Vec<f64> =
        (1..=5).map(|seed| hit_ratio(requests, &registry(policy, capacity, seed), NO_HINTS)).collect();
    ratios.sort_by(f64::total_cmp);
    ratios[2]
}

const CONVERSATION: &str = "conversation_trace.jsonl";
const SYNTHETIC: &str = "synthetic_trace.jsonl";

fn requests_of(name: &str) -> Option<Vec<Vec<u64>>> {
    let requests = trace(name);
    if requests.is_none() {
        eprintln!("skipped: {name} is not there; KVBM_TRACES names its folder");
    }
    requests
}

fn lru(requests: &[Vec<u64>], capacity: u32) -> f64 {
    hit_ratio(requests, &registry(PolicyKind::LruLeaf, capacity, 0), NO_HINTS)
}

/// No constant of the policy is fitted to these traces; what it must reach is what a simulation
/// with unlimited history reached, less a few per cent.
#[test]
fn hazard_keeps_what_the_traces_use_again() {
    for (name, wanted) in [
        (CONVERSATION, &[(1000, 0.068), (5000, 0.160), (10_000, 0.227), (20_000, 0.296)][..]),
        (SYNTHETIC, &[(5000, 0.284), (10_000, 0.445)][..]),
    ] {
        let Some(requests) = requests_of(name) else { continue };
        for &(capacity, least) in wanted {
            let ratio = median_of_seeds(&requests, PolicyKind::Hazard, capacity);
            eprintln!("{name}, {capacity} blocks: {ratio:.4} (lru-leaf {:.4})", lru(&requests, capacity));
            assert!(ratio >= least, "{name}, {capacity} blocks: {ratio} is below {least}");
        }
    }
}

/// Which victims the policy chose is counted: none under recency, and nearly all once `hazard` has
/// shown what blocks are worth that come again behind more others than there is room for.
#[test]
fn it_is_counted_which_victims_the_policy_chose() {
    let mut random = Random(5);
    let requests: Vec<Vec<u64>> = (0..40_000_u64)
        .map(|number| if number % 4 == 0 { vec![random.between(0, 59)] } else { vec![1000 + number] })
        .collect();
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        let registry = registry(policy, 100, 1);
        let victims = |requests: &[Vec<u64>]| {
            let before = registry.counters(Tier::G1);
            hit_ratio(requests, &registry, NO_HINTS);
            let now = registry.counters(Tier::G1);
            (now.evicted - before.evicted, now.evicted_by_choice - before.evicted_by_choice)
        };
        let (first, rest) = (victims(&requests[..20_000]), victims(&requests[20_000..]));
        match policy {
            PolicyKind::LruLeaf => assert_eq!((first.1, rest.1), (0, 0)),
            _ => assert!(first.1 < first.0 && 10 * rest.1 > 9 * rest.0, "{first:?}, {rest:?}"),
        }
    }
}

/// Hints that are right nine times of ten are worth much; those that are wrong half of the time
/// cost next to nothing.
#[test]
fn hints_are_worth_what_they_prove_to_be() {
    let Some(requests) = requests_of(CONVERSATION) else { return };
    let with_hints = |capacity, accuracy| {
        let ends = endings(&requests, accuracy, Random(7));
        hit_ratio(&requests, &registry(PolicyKind::Hazard, capacity, 1), &|request| ends[request])
    };
    for (capacity, least) in [(5000, 0.205), (10_000, 0.280)] {
        let ratio = with_hints(capacity, 0.9);
        eprintln!("{CONVERSATION}, {capacity} blocks, hints right in 90 %: {ratio:.4}");
        assert!(ratio >= least, "{capacity} blocks: {ratio} is below {least}");
    }
    let (useless, none) = (with_hints(5000, 0.5), median_of_seeds(&requests, PolicyKind::Hazard, 5000));
    assert!(useless > none - 0.01, "hints that mean nothing: {useless}, none: {none}");
}

/// Where recency is right, the policy must find that out: never more than 0.3 points below
/// lru-leaf.
#[test]
fn hazard_is_not_below_recency_where_contexts_grow_and_are_used_again() {
    let kinds = [
        AGENTS,
        Agents { in_turn: true, ..AGENTS },
        Agents { fork_one_in: 4, retry_one_in: 1000, ..AGENTS },
        Agents { open: 60, steps: 100, step: (1, 2), ..AGENTS },
        Agents { prompts: 40, steps: 8, ..AGENTS },
        Agents { prompts: 1, prompt_blocks: 4, steps: 200, step: (1, 1), open: 12, ..AGENTS },
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let requests = agentic(kind, 1500, 9 + number as u64);
        for capacity in [600, 1200, 2500] {
            is_not_below_recency(&format!("{kind:?}"), &requests, capacity);
        }
    }
}

/// The same where tool calls take their time, contexts are compacted, sub-agents fan out, sessions
/// come back, and others pass by; from capacities that are a few contexts to those that hold all
/// that is alive.
#[test]
fn hazard_is_not_below_recency_where_sessions_pause() {
    let kinds = [
        SESSIONS,
        Sessions { pause: Pause::Fixed, long_pause_one_in: 0, ..SESSIONS },
        Sessions { pause: Pause::Uniform, limit: 80, open: 4, prompt_blocks: 8, ..SESSIONS },
        Sessions { open: 64, steps: 100, step: (1, 2), long_pause_one_in: 5, ..SESSIONS },
        Sessions { fork_one_in: 8, fan_out: 8, pause: Pause::Uniform, ..SESSIONS },
        Sessions { limit: 120, fork_one_in: 20, fan_out: 3, ..SESSIONS },
        Sessions { single_percent: 30, open: 40, steps: 60, ..SESSIONS },
        Sessions { bursts: true, open: 100, steps: 10, pause: Pause::Uniform, ..SESSIONS },
        Sessions { open: 1, steps: 400, step: (1, 1), reopen_percent: 30, ..SESSIONS },
        Sessions { reopen_percent: 60, steps: 8, prompts: 10, ..SESSIONS },
    ];
    for (kind, seed) in kinds.into_iter().zip([90, 91, 92, 93, 94, 95, 96, 97, 98, 97]) {
        let requests = with_pauses(kind, 1500, seed);
        let longest = requests.iter().map(Vec::len).max().unwrap() as u32;
        for contexts in [2, 6, 20] {
            is_not_below_recency(&format!("{kind:?}"), &requests, contexts * longest);
        }
    }
}

/// By 0.3 points at most.
fn is_not_below_recency(name: &str, requests: &[Vec<u64>], capacity: u32) {
    let recency = lru(requests, capacity);
    let mut ratios: Vec<f64> = (1..=3)
        .map(|seed| hit_ratio(requests, &registry(PolicyKind::Hazard, capacity, seed), NO_HINTS))
        .collect();
    ratios.sort_by(f64::total_cmp);
    eprintln!("{:+.2} points, {capacity} blocks, {:.4}: {name}", 100.0 * (ratios[1] - recency), ratios[1]);
    assert!(ratios[1] > recency - 0.003, "{name}, {capacity} blocks: {ratios:?}, lru-leaf {recency}");
}

/// The default policy keeps what is used again through a scan that flushes recency.
#[test]
fn hazard_survives_a_scan() {
    let mut requests = Vec::new();
    let hot: Vec<Vec<u64>> = (0..20).map(|n| vec![n]).collect();
    for round in 0..60_u64 {
        requests.extend(hot.iter().cloned());
        requests.extend(hot.iter().cloned());
        requests.extend((0..120).map(|n| vec![1000 + round * 120 + n]));
    }
    let ratio = |policy| hit_ratio(&requests, &registry(policy, 100, 0), NO_HINTS);
    let (lru, hazard) = (ratio(PolicyKind::LruLeaf), ratio(PolicyKind::Hazard));
    assert!(hazard > lru + 0.05, "hazard {hazard}, lru-leaf {lru}");
}

#[test]
fn a_seed_decides_the_victims() {
    let requests = agentic(AGENTS, 400, 3);
    let contents = |seed| {
        let registry = registry(PolicyKind::Hazard, 500, seed);
        let ratio = hit_ratio(&requests, &registry, NO_HINTS);
        (ratio.to_bits(), registry.snapshot(kvbm_plan::Tier::G1).0)
    };
    assert_eq!(contents(1), contents(1));
    assert_ne!(contents(1), contents(2));
}
