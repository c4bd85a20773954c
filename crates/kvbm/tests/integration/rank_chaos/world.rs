//! A model of ranks: what lies in their memory and on their disks, what they have taken, what they
//! say.

use crate::random::Random;
use crate::support::script::Ranks;
use kvbm::plan::{
    BlockOutcome, Command, Epoch, FlushOutcome, Message, RecoveredBlock, TransferPlan, TransferReport, wire,
};
use kvbm::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm::{BlockId, BlockIdentity, Failure, FailureKind, Rank, Tier};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

pub(super) const RANKS: usize = 2;
/// What lies in a slot of memory: the bytes of a block, by a name that tells them from all others.
pub(super) type Bytes = [u8; 16];

/// What lies in a slot of a disk.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Record {
    pub(super) identity: BlockIdentity,
    bytes: Option<Bytes>,
    /// The step in which it was asked for.
    pub(super) asked: usize,
}

struct Taken {
    plan: TransferPlan,
    asked: usize,
    started: bool,
}

#[derive(Default)]
pub(super) struct RankModel {
    pub(super) open: bool,
    line: Option<(Epoch, MessageSink)>,
    memory: [HashMap<BlockId, Bytes>; 2],
    disk: BTreeMap<BlockId, Record>,
    pub(super) synced: BTreeMap<BlockId, Record>,
    taken: Vec<Taken>,
    /// The last thing that it said of a plan.
    said: Option<TransferReport>,
}

pub(super) struct State {
    pub(super) ranks: [RankModel; RANKS],
    random: Random,
    pub(super) step: usize,
    /// Plans are carried out as soon as they come, and nothing fails.
    pub(super) tame: bool,
    /// Workers that died or started.
    changes: usize,
}

#[derive(Clone)]
pub(super) struct World(Arc<Mutex<State>>);

struct Link(World, usize);

impl RankModel {
    pub(super) fn bytes(&self, tier: Tier, block: BlockId) -> Option<Bytes> {
        self.memory[tier.index()].get(&block).copied()
    }

    pub(super) fn put(&mut self, tier: Tier, block: BlockId, bytes: Option<Bytes>) {
        match bytes {
            Some(bytes) => self.memory[tier.index()].insert(block, bytes),
            None => self.memory[tier.index()].remove(&block),
        };
    }

    /// What a worker finds where it is to read: it checks what comes from a disk, and nothing else.
    fn read(
        &self,
        tier: Tier,
        block: BlockId,
        identity: &BlockIdentity,
    ) -> Result<Option<Bytes>, FailureKind> {
        if tier != Tier::G3 {
            return Ok(self.bytes(tier, block));
        }
        let record = self.disk.get(&block).ok_or(FailureKind::Missing)?;
        let sound = record.identity == *identity && record.bytes == Some(*identity.hash.as_bytes());
        if sound { Ok(record.bytes) } else { Err(FailureKind::Corrupt) }
    }

    /// Carries a plan out, block by block.
    fn carry_out(&mut self, taken: &Taken, random: &mut Random, tame: bool) -> Vec<BlockOutcome> {
        let path = taken.plan.path();
        let mut outcomes = Vec::new();
        for step in &taken.plan.blocks {
            let fails = !tame && random.below(25) == 0;
            let read = self.read(path.src, step.src, &step.identity);
            let outcome = match read {
                Err(kind) => BlockOutcome::Failed(Failure::new(kind, "found so")),
                Ok(_) if fails => BlockOutcome::Failed(Failure::new(FailureKind::Io, "planted")),
                Ok(_) => BlockOutcome::Done { checksum: 1 },
            };
            // What fails may have been written all the same, or in part.
            let written = read.ok().filter(|_| !fails || random.below(2) == 0);
            if path.dst == Tier::G3 {
                if let Some(bytes) = written {
                    let record = Record { identity: step.identity, bytes, asked: taken.asked };
                    self.disk.insert(step.dst, record);
                }
            } else {
                self.put(path.dst, step.dst, written.flatten());
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    fn report(&mut self, rank: usize, plan: &TransferPlan, blocks: Vec<BlockOutcome>) -> Message {
        let report = Ranks::report(rank, plan, blocks);
        self.said = Some(report.clone());
        Message::Transfer(report)
    }
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let ranks = Default::default();
        Self(Arc::new(Mutex::new(State { ranks, random: Random(seed), step: 0, tame: false, changes: 0 })))
    }

    pub(super) fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        change(&mut self.0.lock().unwrap())
    }

    pub(super) fn below(&self, n: usize) -> usize {
        self.with(|state| state.random.below(n))
    }

    fn say(&self, rank: usize, messages: &[Message]) {
        let (_, sink) = self.with(|state| state.ranks[rank].line.clone()).unwrap();
        for message in messages {
            sink(wire::encode_message(message).unwrap());
        }
    }

    /// Begins the next step.
    pub(super) fn next_step(&self) -> usize {
        self.with(|state| {
            state.step += 1;
            state.step
        })
    }

    /// Workers that have died or started so far.
    pub(super) fn changes(&self) -> usize {
        self.with(|state| state.changes)
    }

    pub(super) fn is_open(&self, rank: usize) -> bool {
        self.with(|state| state.ranks[rank].open)
    }

    /// Does something while ranks carry out at once what they are told.
    pub(super) fn tamed(&self, during: impl FnOnce()) {
        let before = self.with(|state| std::mem::replace(&mut state.tame, true));
        during();
        self.with(|state| state.tame = before);
    }

    /// Which of these bytes is not where it should be on a rank that is there.
    pub(super) fn lacks(&self, held: &[(Tier, BlockId, Bytes)]) -> Option<String> {
        self.with(|state| {
            let ranks = state.ranks.iter().enumerate().filter(|(_, rank)| rank.open);
            let lacks = |(number, rank): (usize, &RankModel)| {
                let (tier, block, _) =
                    held.iter().find(|(tier, block, bytes)| rank.bytes(*tier, *block) != Some(*bytes))?;
                Some(format!("step {}: slot {block} of {tier} on rank {number}", state.step))
            };
            ranks.into_iter().find_map(lacks)
        })
    }

    /// What the disks have for good: rank, slot and record.
    pub(super) fn synced(&self) -> Vec<(usize, BlockId, Record)> {
        self.with(|state| {
            let ranks = state.ranks.iter().enumerate();
            ranks
                .flat_map(|(rank, model)| {
                    model.synced.iter().map(move |(&slot, &record)| (rank, slot, record))
                })
                .collect()
        })
    }

    pub(super) fn connect(&self, rank: Rank, epoch: Epoch, sink: MessageSink) -> Box<dyn WorkerLink> {
        let at = rank.index();
        self.with(|state| state.ranks[at].line = Some((epoch, sink)));
        self.start(at);
        Box::new(Link(self.clone(), at))
    }

    /// A worker of the rank starts.
    pub(super) fn start(&self, rank: usize) {
        let (epoch, disk) = self.with(|state| {
            let model = &mut state.ranks[rank];
            model.synced.clone_from(&model.disk);
            (model.line.as_ref().unwrap().0, model.disk.clone())
        });
        let blocks: Vec<_> =
            disk.iter().map(|(&block, record)| RecoveredBlock { block, identity: record.identity }).collect();
        let name = Rank(rank as u16);
        let (tier, unusable) = (Tier::G3, Vec::new());
        let half = blocks.len() / 2;
        for (part, last) in [(&blocks[..half], false), (&blocks[half..], true)] {
            let (blocks, unusable) = (part.to_vec(), Vec::clone(&unusable));
            self.say(rank, &[Message::Recovered { rank: name, tier, blocks, unusable, last }]);
        }
        self.with(|state| {
            state.ranks[rank].open = true;
            state.changes += 1;
        });
        self.say(rank, &[Message::Ready { rank: name, epoch, volumes: false }]);
    }

    /// The worker of the rank dies: its memory is gone, and of what its disk had not synced some.
    pub(super) fn kill(&self, rank: usize) {
        self.with(|state| {
            state.changes += 1;
            let State { ranks, random, .. } = state;
            let model = &mut ranks[rank];
            model.open = false;
            model.taken.clear();
            model.memory.iter_mut().for_each(HashMap::clear);
            let slots: Vec<_> = model.disk.keys().chain(model.synced.keys()).copied().collect();
            for slot in slots {
                if random.below(2) == 0 {
                    match model.synced.get(&slot) {
                        Some(&record) => model.disk.insert(slot, record),
                        None => model.disk.remove(&slot),
                    };
                }
            }
        });
    }

    /// The rank carries out a plan that it has taken, any of them, or only begins.
    pub(super) fn work(&self, rank: usize) -> bool {
        let message = self.with(|state| {
            let State { ranks, random, tame, .. } = state;
            let model = &mut ranks[rank];
            if model.taken.is_empty() {
                return None;
            }
            let at = random.below(model.taken.len());
            if !*tame && random.below(3) == 0 {
                model.taken[at].started = true;
                return Some(None);
            }
            let taken = model.taken.swap_remove(at);
            let outcomes = model.carry_out(&taken, random, *tame);
            Some(Some(model.report(rank, &taken.plan, outcomes)))
        });
        if let Some(Some(message)) = &message {
            self.say(rank, std::slice::from_ref(message));
        }
        message.is_some()
    }

    /// The rank says something again, or what makes no sense.
    pub(super) fn babble(&self, rank: usize) {
        let kind = self.below(4);
        let said = self.with(|state| state.ranks[rank].said.clone());
        match (kind, said) {
            (0, Some(report)) => self.say(rank, &[Message::Transfer(report)]),
            (1, Some(mut report)) => {
                report.epoch = Epoch(report.epoch.0 - 1);
                self.say(rank, &[Message::Transfer(report)]);
            }
            (2, Some(mut report)) => {
                report.rank = Rank(1 - report.rank.0);
                self.say(rank, &[Message::Transfer(report)]);
            }
            _ => {
                let (_, sink) = self.with(|state| state.ranks[rank].line.clone()).unwrap();
                sink(vec![0xC1; 9]);
            }
        }
    }
}

impl WorkerLink for Link {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let command = wire::decode_command(command).unwrap();
        let Self(world, rank) = self;
        let answer = world.with(|state| {
            let State { ranks, random, step, tame, .. } = state;
            let model = &mut ranks[*rank];
            if !model.open {
                return Err(LinkError::Closed);
            }
            let name = Rank(*rank as u16);
            Ok(match command {
                Command::Transfer(plan) => {
                    let taken = Taken { plan, asked: *step, started: false };
                    if *tame {
                        let outcomes = model.carry_out(&taken, random, true);
                        Some(model.report(*rank, &taken.plan, outcomes))
                    } else if random.below(40) == 0 {
                        return Err(LinkError::Refused("busy".into()));
                    } else {
                        model.taken.push(taken);
                        None
                    }
                }
                Command::Cancel { plan_id } => {
                    let at =
                        model.taken.iter().position(|taken| taken.plan.plan_id == plan_id && !taken.started);
                    at.map(|at| {
                        let plan = model.taken.swap_remove(at).plan;
                        let cancelled = Failure::new(FailureKind::Cancelled, "taken back");
                        let outcomes = vec![BlockOutcome::Failed(cancelled); plan.blocks.len()];
                        model.report(*rank, &plan, outcomes)
                    })
                }
                Command::Release { blocks, .. } => {
                    model.disk.retain(|slot, _| !blocks.contains(slot));
                    None
                }
                Command::Forget { namespace, .. } => {
                    model.disk.retain(|_, record| record.identity.namespace != namespace);
                    None
                }
                Command::Flush { token } => {
                    model.synced.clone_from(&model.disk);
                    let outcome = FlushOutcome::Durable { blocks: model.disk.len() as u64 };
                    let epoch = model.line.as_ref().unwrap().0;
                    Some(Message::Flushed { rank: name, epoch, token, outcome })
                }
                Command::Advance { .. } | Command::Volume { .. } => None,
            })
        })?;
        world.say(*rank, answer.as_slice());
        Ok(())
    }
}
