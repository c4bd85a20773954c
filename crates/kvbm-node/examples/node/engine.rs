//! An engine: it loads what is there, verifies every byte, computes the rest and saves it.

use crate::movers::{MoverProcesses, terms};
use crate::support::{EngineMemory, EngineRank, OTHERS, TestEngine, blocks, sequence};
use crate::{BLOCKS, G1_BLOCKS, MOVERS_APART, ON_DEVICES, Options, Random, SEQUENCES, say};
use kvbm::device::Event;
use kvbm::storage::{limit_free_heap, release_free_heap};
use kvbm::{BlockId, LookUp, TokenSequence};
use std::time::{Duration, Instant};

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
    let (engine, mut movers) = attach(options);
    engine.node.wait_ready(DEADLINE);
    // All blocks that the prefixes need: of several cache groups they are more than the prefix has.
    let found: usize = sequences.iter().map(|tokens| engine.needed(engine.found("count", tokens))).sum();
    say(&format!("found {found}"));
    let places = if options.model.full() == 0 { G1_BLOCKS } else { OTHERS };
    let mut random = Random(options.seed);
    for request in 0_u64.. {
        if request % REQUESTS_BETWEEN_TRIMS == 0 {
            release_free_heap();
        }
        let tokens = &sequences[random.below(u64::from(SEQUENCES)) as usize];
        let first = (random.below(u64::from(places) / BLOCKS as u64) * BLOCKS as u64) as u32;
        let ids: Vec<u32> = (first..first + BLOCKS as u32).collect();
        let all = options.model.places(&ids, &options.model.needed(BLOCKS)).concat();
        let begun = Instant::now();
        if let Some(movers) = &mut movers {
            movers.restart();
        }
        if engine.node.before_reuse(&blocks(&all), begun + DEADLINE).is_err() {
            say("hang before_reuse");
            continue;
        }
        // Movers of other processes answer for themselves.
        if movers.as_mut().is_some_and(|movers| !movers.wait_idle(&all)) {
            say("hang wait_idle of a mover");
            continue;
        }
        let Loaded { promised, arrived, is_right } = match load(&engine, options, request, tokens, &ids) {
            Ok(loaded) => loaded,
            Err(why) => {
                say(&why);
                continue;
            }
        };
        if begun.elapsed() > DEADLINE {
            say("hang request");
        }
        // Whatever is wrong is computed again, as everything that was not there. The copies wait
        // for it.
        let point = request + 1;
        let _not_taken = engine.offer(tokens, &ids, Some(point));
        engine.compute_all(tokens, &ids);
        std::thread::sleep(Duration::from_micros(random.below(2000)));
        engine.node.signal(point, &Event::complete());
        if let Some(movers) = &mut movers {
            movers.passed(point);
        }
        engine.node.step();
        let (wrong, missing) = (u8::from(!is_right), u8::from(arrived < promised));
        say(&format!("done {arrived} {wrong} {missing}"));
        std::thread::sleep(options.pause);
    }
}

/// What came of a request's load.
#[derive(Default)]
struct Loaded {
    promised: usize,
    arrived: usize,
    is_right: bool,
}

/// Loads what is there into the places of `ids`, and looks at every byte of it.
fn load(
    engine: &TestEngine,
    options: &Options,
    request: u64,
    tokens: &TokenSequence,
    ids: &[u32],
) -> Result<Loaded, String> {
    let (name, nothing) = (format!("r{request}"), Loaded { is_right: true, ..Loaded::default() });
    let Ok(1..) = engine.look_up(&name, tokens) else { return Ok(nothing) };
    // Volumes have answered. Where another daemon came meanwhile, this is its promise.
    let Ok(promise) = engine.node.look_up_groups(&name, tokens, 0) else { return Ok(nothing) };
    let LookUp::Ready { blocks: promised @ 1.., .. } = promise.found else { return Ok(nothing) };
    let places = options.model.places(ids, &promise.groups);
    let lists: Vec<_> = places.iter().map(|ids| blocks(ids)).collect();
    let lists: Vec<&[BlockId]> = lists.iter().map(Vec::as_slice).collect();
    if engine.node.commit_groups(&name, &lists, None, None).is_err() {
        return Ok(Loaded { promised, ..nothing });
    }
    let until = Instant::now() + DEADLINE;
    let arrived = loop {
        if let Some(load) = engine.node.finished().into_iter().find(|load| load.request == name) {
            break load.arrived;
        }
        if Instant::now() > until {
            let (status, counts) = (engine.node.status(), engine.node.counts());
            return Err(format!("hang load of {}, {promised} blocks: {status:?}, {counts:?}", options.name));
        }
        std::thread::sleep(Duration::from_micros(200));
    };
    // Of several cache groups all blocks arrive or none.
    let mut groups = promise.groups.iter().zip(&places).enumerate();
    let is_right = groups.all(|(group, (range, ids))| {
        let count = if arrived < promised { arrived.min(ids.len()) } else { ids.len() };
        engine.holds_in(group, tokens, range.start, &ids[..count])
    });
    Ok(Loaded { promised, arrived, is_right })
}

fn attach(options: &Options) -> (TestEngine, Option<MoverProcesses>) {
    let terms = terms(options);
    let memory = match options.name.as_str() {
        ON_DEVICES => EngineMemory::EmulatedDevice,
        MOVERS_APART => {
            let (movers, memory) = MoverProcesses::start(options);
            let ranks = memory.into_iter().map(EngineRank::in_host_memory).collect();
            return (TestEngine::over(terms, options.model, Vec::new(), ranks), Some(movers));
        }
        _ => EngineMemory::Host,
    };
    (TestEngine::with_memory(terms, options.model, memory), None)
}
