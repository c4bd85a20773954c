//! Ranks whose every answer the test decides.

use super::{model, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config, ModelConfig};
use kvbm::plan::{
    BlockOutcome, Command, Epoch, FlushOutcome, Message, RecoveredBlock, TransferPlan, TransferReport, wire,
};
use kvbm::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm::{Engine, Failure, FailureKind, KvBlockManager, Owned, Rank, Tier};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A deadline that passes during a test, yet not before a plan was sent and answered on a busy
/// machine: an offload of the set-up that is late leaves nothing below G1.
pub const IN_TIME: Duration = Duration::from_secs(2);

/// What a rank does with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reports success from inside `send`.
    Answer,
    /// Keeps it until the test answers.
    Hold,
    /// Starts no plan, and says so of those that are taken back.
    Shut,
    /// Takes everything and answers nothing, no flush either.
    Silent,
    /// Its line is down.
    Dead,
    /// Has no time for anything.
    Busy,
    /// Its worker ends with a plan that it has just been sent, and another one starts at once.
    Restart,
}

/// Handles to all ranks of a manager.
#[derive(Clone)]
pub struct Ranks(Arc<Shared>);

struct Shared {
    state: Mutex<Vec<RankState>>,
    changed: Condvar,
}

#[derive(Default)]
struct RankState {
    mode: Option<Mode>,
    line: Option<(Epoch, MessageSink)>,
    held: VecDeque<TransferPlan>,
    commands: Vec<Command>,
}

struct Link {
    ranks: Ranks,
    rank: usize,
}

impl Ranks {
    pub fn new(count: usize) -> Self {
        let state = (0..count).map(|_| RankState::default()).collect();
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// A manager over these ranks, with tiers of these sizes. Nothing offloads by itself.
    pub fn manager(
        &self,
        [g1, g2, g3]: [u32; 3],
        configure: impl FnOnce(&mut Config),
    ) -> KvBlockManager<Owned> {
        let mut builder = KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace())
            .device(Blocks(g1))
            .host(Blocks(g2))
            .tensor_parallel(self.lock().len() as u32);
        if g3 > 0 {
            builder = builder.disk("never-opened", Blocks(g3));
        }
        builder
            .configure(|config| {
                unlimited(config);
                config.offload.g1_g2.write_through = false;
                configure(config);
            })
            .build_with_workers(|rank, epoch, sink| self.connect(rank, epoch, sink))
            .unwrap()
    }

    /// A manager over these ranks whose G1 is `g1` blocks of an engine.
    pub fn engine_manager(&self, g1: u32, g2: u32) -> KvBlockManager<Engine> {
        self.engine_manager_of(model(), g1, g2)
    }

    /// The same for another model.
    pub fn engine_manager_of(&self, model: ModelConfig, g1: u32, g2: u32) -> KvBlockManager<Engine> {
        let count = self.lock().len() as u32;
        KvBlockManager::<Owned>::builder()
            .model(model)
            .namespace(namespace())
            .engine_blocks(g1)
            .host(Blocks(g2))
            .tensor_parallel(count)
            .build_with_workers(|rank, epoch, sink| self.connect(rank, epoch, sink))
            .unwrap()
    }

    pub fn connect(&self, rank: Rank, epoch: Epoch, sink: MessageSink) -> Box<dyn WorkerLink> {
        let rank = rank.index();
        self.lock()[rank].line = Some((epoch, sink));
        self.recovered(rank, Vec::new());
        Box::new(Link { ranks: self.clone(), rank })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RankState>> {
        self.0.state.lock().unwrap()
    }

    pub fn set(&self, rank: usize, mode: Mode) {
        self.lock()[rank].mode = Some(mode);
    }

    pub fn set_all(&self, mode: Mode) {
        self.lock().iter_mut().for_each(|rank| rank.mode = Some(mode));
    }

    /// The next plan that `rank` holds.
    #[track_caller]
    pub fn next_plan(&self, rank: usize) -> TransferPlan {
        let mut state = self.lock();
        loop {
            if let Some(plan) = state[rank].held.pop_front() {
                return plan;
            }
            let left = soon().saturating_duration_since(Instant::now());
            let (back, timeout) = self.0.changed.wait_timeout(state, left).unwrap();
            assert!(!timeout.timed_out(), "rank {rank} got no plan");
            state = back;
        }
    }

    /// Plans that `rank` holds.
    pub fn held(&self, rank: usize) -> usize {
        self.lock()[rank].held.len()
    }

    /// Waits until `rank` holds so many plans.
    pub fn wait_held(&self, rank: usize, plans: usize) {
        let until = soon();
        while self.held(rank) < plans {
            assert!(Instant::now() < until, "rank {rank} got {} plans, not {plans}", self.held(rank));
            std::thread::yield_now();
        }
    }

    /// Whatever `rank` was told that is no plan.
    pub fn commands(&self, rank: usize) -> Vec<Command> {
        self.lock()[rank].commands.clone()
    }

    /// A worker of the rank says that these blocks are on its disk, and no others.
    pub fn recovered(&self, rank: usize, blocks: Vec<RecoveredBlock>) {
        let (tier, unusable) = (Tier::G3, Vec::new());
        self.send(rank, &Message::Recovered { rank: Rank(rank as u16), tier, blocks, unusable, last: true });
    }

    /// A worker of the rank starts, or starts again.
    pub fn start(&self, rank: usize) {
        let (epoch, _) = self.lock()[rank].line.clone().unwrap();
        self.send(rank, &Message::Ready { rank: Rank(rank as u16), epoch, volumes: true });
    }

    /// A worker of the rank says that a flush is durable.
    pub fn flushed(&self, rank: usize, token: u64) {
        let (epoch, _) = self.lock()[rank].line.clone().unwrap();
        let outcome = FlushOutcome::Durable { blocks: 0 };
        self.send(rank, &Message::Flushed { rank: Rank(rank as u16), epoch, token, outcome });
    }

    pub fn send(&self, rank: usize, message: &Message) {
        self.send_bytes(rank, wire::encode_message(message).unwrap());
    }

    pub fn send_bytes(&self, rank: usize, bytes: Vec<u8>) {
        let (_, sink) = self.lock()[rank].line.clone().unwrap();
        sink(bytes);
    }

    pub fn report(rank: usize, plan: &TransferPlan, blocks: Vec<BlockOutcome>) -> TransferReport {
        TransferReport {
            plan_id: plan.plan_id,
            epoch: plan.epoch,
            rank: Rank(rank as u16),
            path: plan.path(),
            blocks,
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
        }
    }

    pub fn done(&self, rank: usize, plan: &TransferPlan) {
        let blocks = vec![BlockOutcome::Done { checksum: 1 }; plan.blocks.len()];
        self.send(rank, &Message::Transfer(Self::report(rank, plan, blocks)));
    }

    /// `rank` executes the next plan that it holds.
    #[track_caller]
    pub fn execute(&self, rank: usize) -> TransferPlan {
        let plan = self.next_plan(rank);
        self.done(rank, &plan);
        plan
    }

    /// Reports that every block failed.
    pub fn fail_all(&self, rank: usize, plan: &TransferPlan, kind: FailureKind) {
        let blocks = vec![BlockOutcome::Failed(Failure::new(kind, "planted")); plan.blocks.len()];
        self.send(rank, &Message::Transfer(Self::report(rank, plan, blocks)));
    }

    /// Reports that block `bad` failed and the others arrived.
    pub fn fail(&self, rank: usize, plan: &TransferPlan, bad: usize, kind: FailureKind) {
        let outcome = |at| {
            if at == bad {
                BlockOutcome::Failed(Failure::new(kind, "planted"))
            } else {
                BlockOutcome::Done { checksum: 1 }
            }
        };
        let blocks = (0..plan.blocks.len()).map(outcome).collect();
        self.send(rank, &Message::Transfer(Self::report(rank, plan, blocks)));
    }
}

impl WorkerLink for Link {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let command = wire::decode_command(command).unwrap();
        let mode = self.ranks.lock()[self.rank].mode.unwrap_or(Mode::Answer);
        match (mode, command) {
            (Mode::Dead, _) => return Err(LinkError::Closed),
            (Mode::Busy, _) => return Err(LinkError::Refused("busy".into())),
            (Mode::Restart, Command::Transfer(_)) => self.ranks.start(self.rank),
            (Mode::Answer, Command::Transfer(plan)) => self.ranks.done(self.rank, &plan),
            (Mode::Hold | Mode::Shut | Mode::Silent, Command::Transfer(plan)) => {
                self.ranks.lock()[self.rank].held.push_back(plan);
            }
            (Mode::Shut, Command::Cancel { plan_id }) => {
                let back: Vec<_> = {
                    let held = &mut self.ranks.lock()[self.rank].held;
                    let (back, rest) = held.drain(..).partition(|plan| plan.plan_id == plan_id);
                    *held = rest;
                    Vec::from(back)
                };
                for plan in &back {
                    self.ranks.fail_all(self.rank, plan, FailureKind::Cancelled);
                }
            }
            (_, command) => {
                self.ranks.lock()[self.rank].commands.push(command.clone());
                if let (true, Command::Flush { token }) = (mode != Mode::Silent, command) {
                    self.ranks.flushed(self.rank, token);
                }
            }
        }
        self.ranks.0.changed.notify_all();
        Ok(())
    }
}
