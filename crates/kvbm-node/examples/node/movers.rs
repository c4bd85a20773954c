//! An engine whose movers are processes of their own, as an engine's workers are. They map the
//! memory of their rank, which the engine's process computes in.

use crate::support::{Model, blocks};
use crate::{G1_BLOCKS, Options, RANKS, say};
use kvbm::Rank;
use kvbm::device::Event;
use kvbm::layout::{BlockLayout, RegionSpec};
use kvbm::storage::{
    BoundLayout, HugePages, RegionBinding, SharedStorage, Storage, limit_free_heap, release_free_heap,
};
use kvbm_node::{EngineTerms, MoverMemory, NodeEngine};
use rustix::process::Signal;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// No copy into or out of blocks lasts longer.
const DEADLINE: Duration = Duration::from_secs(20);
/// Bytes of a rank's memory: more than any model needs.
const BYTES: u64 = 4 << 20;
/// Calls between two that return free memory to the system.
const CALLS_BETWEEN_TRIMS: usize = 1024;

/// The movers of an engine.
pub(crate) struct MoverProcesses {
    options: Options,
    /// The memory of each rank, as its mover inherits it.
    memory: Vec<OwnedFd>,
    movers: Vec<MoverProcess>,
    /// The last point that the engine has passed.
    passed: u64,
}

struct MoverProcess {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl MoverProcesses {
    /// Starts a mover for each rank. The engine's view of their memory, by rank and cache group.
    pub(crate) fn start(options: &Options) -> (Self, Vec<Vec<BoundLayout>>) {
        let memory = |_| SharedStorage::create(BYTES, HugePages::No, None).unwrap();
        let shared: Vec<_> = (0..RANKS).map(memory).collect();
        // Unlike the first descriptor, this one stays open in a process that is started.
        let inherited = |memory: &SharedStorage| rustix::io::dup(memory.file()).unwrap();
        let memory: Vec<OwnedFd> = shared.iter().map(inherited).collect();
        let views = shared.into_iter().map(|memory| view(options.model, memory)).collect();
        let movers = memory.iter().enumerate();
        let movers = movers.map(|(rank, file)| MoverProcess::start(options, rank, file)).collect();
        let movers = Self { options: options.clone(), memory, movers, passed: 0 };
        movers.say_pids();
        (movers, views)
    }

    /// Starts those that are gone again. One that the test did not kill is reported.
    pub(crate) fn restart(&mut self) {
        let mut has_changed = false;
        for (rank, mover) in self.movers.iter_mut().enumerate() {
            if let Some(status) = mover.child.try_wait().unwrap() {
                if status.signal() != Some(Signal::KILL.as_raw()) {
                    say(&format!("hang mover {rank} ended by itself: {status}"));
                }
                *mover = MoverProcess::start(&self.options, rank, &self.memory[rank]);
                // It has not seen the points before.
                let _gone_again = mover.tell(&format!("point {}", self.passed));
                has_changed = true;
            }
        }
        if has_changed {
            self.say_pids();
        }
    }

    /// Waits until no mover touches these blocks. Whether that is so: one that is gone touches
    /// nothing.
    pub(crate) fn wait_idle(&mut self, ids: &[u32]) -> bool {
        let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
        let line = format!("idle {}", ids.join(" "));
        // All wait at the same time.
        let told: Vec<_> = self.movers.iter_mut().map(|mover| mover.tell(&line)).collect();
        let is_idle = |(mover, was_told): (&mut MoverProcess, bool)| {
            let mut answer = String::new();
            let has_answered = was_told && matches!(mover.answers.read_line(&mut answer), Ok(1..));
            if has_answered {
                return answer.trim() == "idle";
            }
            mover.child.wait().unwrap();
            true
        };
        // Each answer is read: the next question must not get it.
        let idle: Vec<bool> = self.movers.iter_mut().zip(told).map(is_idle).collect();
        idle.into_iter().all(|is_idle| is_idle)
    }

    /// The engine has passed a point of its work.
    pub(crate) fn passed(&mut self, point: u64) {
        self.passed = point;
        for mover in &mut self.movers {
            // One that is gone begins with the last point.
            let _gone = mover.tell(&format!("point {point}"));
        }
    }

    fn say_pids(&self) {
        let pids: Vec<_> = self.movers.iter().map(|mover| mover.child.id().to_string()).collect();
        say(&format!("movers {}", pids.join(" ")));
    }
}

impl MoverProcess {
    fn start(options: &Options, rank: usize, memory: &OwnedFd) -> Self {
        let mut command = options.process("mover", &options.name, options.seed);
        command.args(["--rank", &rank.to_string(), "--memory", &memory.as_raw_fd().to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    /// Whether the line was taken.
    fn tell(&mut self, line: &str) -> bool {
        // None of a process that was waited for.
        let Some(stdin) = self.child.stdin.as_mut() else { return false };
        stdin.write_all(format!("{line}\n").as_bytes()).is_ok()
    }
}

/// A mover: it copies for a rank until the engine's process is gone.
pub(crate) fn run(options: &Options) {
    limit_free_heap();
    let inherited = format!("/proc/self/fd/{}", options.memory);
    let file = File::options().read(true).write(true).open(inherited).unwrap();
    let memory = SharedStorage::map(file.into(), BYTES).unwrap();
    let memory = MoverMemory { rank: Rank(options.rank), device: None, g1: view(options.model, memory) };
    let node = NodeEngine::attach(terms(options), false, vec![memory]).unwrap();
    for (number, line) in std::io::stdin().lines().map_while(Result::ok).enumerate() {
        if number % CALLS_BETWEEN_TRIMS == 0 {
            release_free_heap();
        }
        let (call, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match call {
            "point" => node.signal(rest.parse().expect("a number"), &Event::complete()),
            "idle" => {
                let ids = rest.split(' ').map(|id| id.parse().expect("a number")).collect::<Vec<u32>>();
                let is_idle = node.wait_idle(&blocks(&ids), Instant::now() + DEADLINE).is_ok();
                say(if is_idle { "idle" } else { "busy" });
            }
            other => panic!("unknown call {other}"),
        }
    }
}

/// What the engine's processes agree on.
pub(crate) fn terms(options: &Options) -> EngineTerms {
    EngineTerms {
        ranks: RANKS,
        groups: options.model.kinds(),
        ..EngineTerms::new(options.socket(), &options.name, G1_BLOCKS)
    }
}

/// The memory of a rank: its layouts, one behind the other.
fn view(model: Model, memory: SharedStorage) -> Vec<BoundLayout> {
    let (memory, mut end): (Arc<dyn Storage>, _) = (Arc::new(memory), 0_u64);
    let bound = |layout: Arc<dyn BlockLayout>| {
        let place = |region: &RegionSpec| {
            let offset = end.next_multiple_of(region.alignment);
            end = offset + region.bytes;
            RegionBinding { storage: Arc::clone(&memory), offset }
        };
        let places = layout.regions().iter().map(place).collect();
        BoundLayout::bind(layout, places).unwrap()
    };
    model.layouts(G1_BLOCKS, RANKS).into_iter().map(bound).collect()
}
