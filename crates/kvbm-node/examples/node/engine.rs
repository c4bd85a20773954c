//! An engine: it loads what is there, verifies every byte, computes the rest and saves it.

use crate::support::{blocks, sequence};
use crate::{BLOCKS, Options, RANKS, Random, SEQUENCES, support};
use kvbm::device::Event;
use kvbm::storage::{limit_free_heap, release_free_heap};
use kvbm_node::EngineTerms;
use std::io::Write;
use std::time::{Duration, Instant};

/// Blocks of the engine.
const G1_BLOCKS: u32 = 64;
/// No call, and no load, takes longer while daemon and engine run: a stopped daemon is given up
/// after three seconds of silence.
const DEADLINE: Duration = Duration::from_secs(20);
/// Requests between two calls that return free memory to the system.
const REQUESTS_BETWEEN_TRIMS: u64 = 256;

pub(crate) fn run(options: &Options) {
    // Samples of this process count memory in use, not what glibc keeps.
    limit_free_heap();
    let config = options.config();
    let sequences: Vec<_> = (0..SEQUENCES).map(|salt| sequence(&config, salt, BLOCKS)).collect();
    let engine = attach(options);
    engine.node.wait_ready(DEADLINE);
    let found: usize = sequences.iter().map(|tokens| engine.found("count", tokens)).sum();
    say(&format!("found {found}"));
    let mut random = Random(options.seed);
    for request in 0_u64.. {
        if request % REQUESTS_BETWEEN_TRIMS == 0 {
            release_free_heap();
        }
        let tokens = &sequences[random.below(u64::from(SEQUENCES)) as usize];
        let first = (random.below(u64::from(G1_BLOCKS) / BLOCKS as u64) * BLOCKS as u64) as u32;
        let ids: Vec<u32> = (first..first + BLOCKS as u32).collect();
        let begun = Instant::now();
        if engine.node.before_reuse(&blocks(&ids), begun + DEADLINE).is_err() {
            say("hang before_reuse");
            continue;
        }
        let arrived = match load(&engine, &format!("r{request}"), tokens, &ids) {
            Ok(arrived) => arrived,
            Err(why) => {
                say(&why);
                continue;
            }
        };
        let wrong = usize::from(!engine.holds(tokens, 0, &ids[..arrived]));
        if begun.elapsed() > DEADLINE {
            say("hang request");
        }
        // Whatever is wrong is computed again, as everything that was not there. The copies wait
        // for it.
        let point = request + 1;
        let _not_taken = engine.node.offload_after(&blocks(&ids), tokens, 0, Some(point));
        engine.compute(tokens, 0, &ids);
        std::thread::sleep(Duration::from_micros(random.below(2000)));
        engine.node.signal(point, &Event::complete());
        engine.node.step();
        say(&format!("done {arrived} {wrong}"));
        std::thread::sleep(options.pause);
    }
}

/// Loads what is there into the first of `ids`: how many blocks arrived.
fn load(
    engine: &support::TestEngine,
    request: &str,
    tokens: &kvbm::TokenSequence,
    ids: &[u32],
) -> Result<usize, String> {
    let Ok(found @ 1..) = engine.look_up(request, tokens) else { return Ok(0) };
    if engine.node.commit(request, &blocks(&ids[..found])).is_err() {
        return Ok(0);
    }
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(load) = engine.node.finished().into_iter().find(|load| load.request == request) {
            return Ok(load.arrived);
        }
        if Instant::now() > until {
            return Err("hang load".into());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn attach(options: &Options) -> support::TestEngine {
    let terms = EngineTerms { ranks: RANKS, ..EngineTerms::new(options.socket(), &options.name, G1_BLOCKS) };
    support::TestEngine::with(terms, options.model)
}

fn say(line: &str) {
    // Who started it is gone.
    if std::io::stdout().write_all(format!("{line}\n").as_bytes()).is_err() {
        std::process::exit(0);
    }
}
