//! A rank: its memory, its disk, the plans that it was sent, its life.

use super::disk::Disk;
use super::{Bytes, Event, WorldState};
use kvbm::worker::MessageSink;
use kvbm_plan::{BlockId, Epoch, Failure, FailureKind, Message, PlanId, Rank, Tier, TransferPlan, clock};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A plan in the hands of a worker.
pub(super) struct Task {
    pub(super) plan: TransferPlan,
    /// The step in which it was sent.
    pub(super) asked: u64,
    pub(super) is_started: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "worker, link and leader each see a rank their way")]
pub(crate) struct RankModel {
    /// Its worker lives.
    pub(crate) is_up: bool,
    /// Its worker lives, and the leader has handled its start.
    pub(crate) is_known: bool,
    /// Its link takes commands: before the leader knows a worker that took another one's place,
    /// nothing may reach that one.
    pub(crate) takes: bool,
    /// The leader was told to give it up.
    pub(crate) is_given_up: bool,
    /// Counts its workers and its sessions.
    pub(super) life: u64,
    /// Counts its deaths and starts.
    pub(super) changes: u64,
    pub(super) line: Option<(Epoch, MessageSink)>,
    memory: [BTreeMap<BlockId, Bytes>; 2],
    pub(crate) disk: Disk,
    pub(super) tasks: BTreeMap<PlanId, Task>,
    /// Plans whose report has not reached the leader.
    pub(super) owed: BTreeMap<PlanId, TransferPlan>,
    /// Its link keeps order: when the last command, and the last message, arrives.
    pub(super) commands_until: Option<Instant>,
    pub(super) messages_until: Option<Instant>,
    /// Until then nothing passes its link.
    pub(super) cut_until: Option<Instant>,
}

impl RankModel {
    pub(super) fn new(disk: Disk) -> Self {
        Self {
            is_up: false,
            is_known: false,
            takes: false,
            is_given_up: false,
            life: 0,
            changes: 0,
            line: None,
            memory: Default::default(),
            disk,
            tasks: BTreeMap::new(),
            owed: BTreeMap::new(),
            commands_until: None,
            messages_until: None,
            cut_until: None,
        }
    }

    pub(crate) fn bytes(&self, tier: Tier, slot: BlockId) -> Option<Bytes> {
        self.memory.get(tier.index())?.get(&slot).copied()
    }

    pub(crate) fn put(&mut self, tier: Tier, slot: BlockId, bytes: Option<Bytes>) {
        let Some(memory) = self.memory.get_mut(tier.index()) else { return };
        match bytes {
            Some(bytes) => memory.insert(slot, bytes),
            None => memory.remove(&slot),
        };
    }

    /// A plan that reads or writes a slot.
    pub(super) fn user_of(&self, tier: Tier, slot: BlockId) -> Option<PlanId> {
        let uses = |plan: &&TransferPlan| {
            let path = plan.path();
            plan.blocks
                .iter()
                .any(|block| (path.src, block.src) == (tier, slot) || (path.dst, block.dst) == (tier, slot))
        };
        self.owed.values().find(uses).map(|plan| plan.plan_id)
    }

    /// What the worker was sent is not carried out any more.
    pub(super) fn end_session(&mut self) {
        self.life += 1;
        self.changes += 1;
        self.tasks.clear();
        self.owed.clear();
        (self.is_known, self.takes) = (false, false);
    }

    /// When something that passes the link after `delay` arrives, behind what passed before.
    pub(super) fn arrival(&self, delay: Duration, behind: Option<Instant>) -> Instant {
        let open = self.cut_until.unwrap_or_else(clock::now).max(clock::now());
        (open + delay).max(behind.unwrap_or(open))
    }
}

impl WorldState {
    /// A worker says something. It arrives later, in order.
    pub(super) fn say(&mut self, rank: usize, message: Message) {
        let delay = self.random.duration(Duration::from_millis(2));
        let model = &mut self.ranks[rank];
        let Some((epoch, _)) = model.line else { return };
        let (time, life) = (model.arrival(delay, model.messages_until), model.life);
        model.messages_until = Some(time);
        self.schedule_at(time, Event::Message { rank, epoch, life, message });
    }

    /// The worker of a rank starts, unless it has.
    pub(crate) fn start(&mut self, rank: usize) {
        if !self.ranks[rank].is_up {
            self.open(rank);
        }
    }

    /// A worker opens its disk and says that it is ready.
    pub(super) fn open(&mut self, rank: usize) {
        let name = Rank(rank as u16);
        let model = &mut self.ranks[rank];
        let Some((epoch, _)) = model.line else { return };
        model.is_up = true;
        model.changes += 1;
        let (blocks, unusable) = model.disk.open();
        self.store.start(rank);
        self.note(|| {
            let count = blocks.len();
            format!("the worker of rank {rank} starts with {count} blocks on its disk, without {unusable:?}")
        });
        let (tier, half, bad) = (Tier::G3, blocks.len() / 2, unusable.len() / 2);
        let parts = [(&blocks[..half], &unusable[..bad], false), (&blocks[half..], &unusable[bad..], true)];
        for (blocks, unusable, last) in parts {
            let (blocks, unusable) = (blocks.to_vec(), unusable.to_vec());
            self.say(rank, Message::Recovered { rank: name, tier, blocks, unusable, last });
        }
        self.say(rank, Message::Ready { rank: name, epoch, volumes: true });
    }

    /// The worker of a rank dies: its memory is gone, and with its machine's power also what was
    /// not durable. It starts again after `pause`.
    pub(crate) fn kill(&mut self, rank: usize, power: bool, pause: Duration) {
        self.note(|| format!("rank {rank} dies, power lost: {power}, back in {pause:?}"));
        self.cut_writes_short(rank);
        let WorldState { ranks, store, random, .. } = self;
        let model = &mut ranks[rank];
        model.end_session();
        model.is_up = false;
        model.memory.iter_mut().for_each(BTreeMap::clear);
        model.disk.doubt();
        model.disk.close(false);
        store.stop(rank);
        if power {
            model.disk.lose_power(random);
        }
        self.schedule(pause, Event::Start { rank });
    }

    /// A worker that is going to end is in the middle of some writes to its disk. A commit may come
    /// meanwhile.
    fn cut_writes_short(&mut self, rank: usize) {
        let WorldState { ranks, random, .. } = self;
        let RankModel { tasks, memory, disk, .. } = &mut ranks[rank];
        for plan in tasks.values().filter(|task| task.is_started).map(|task| &task.plan) {
            let path = plan.path();
            for block in plan.blocks.iter().filter(|_| path.dst == Tier::G3) {
                if random.once_in(2) {
                    let bytes = memory.get(path.src.index()).and_then(|memory| memory.get(&block.src));
                    disk.begin_write(block.dst, bytes.copied(), random.next() as usize);
                }
            }
        }
        if random.once_in(3) {
            disk.sync();
        }
    }

    /// The disk of a rank makes durable what it was sent. How many blocks are; `None` where it
    /// fails. The leader hears of blocks that are given up for it.
    pub(super) fn sync(&mut self, rank: usize) -> Option<u64> {
        let durable = self.ranks[rank].disk.sync();
        let given_up = self.ranks[rank].disk.take_given_up();
        let (name, tier) = (Rank(rank as u16), Tier::G3);
        if let Some((epoch, _)) = self.ranks[rank].line {
            for (block, identity) in given_up {
                let failure = Failure::new(FailureKind::Missing, "simulated");
                self.say(rank, Message::Damaged { rank: name, epoch, tier, block, identity, failure });
            }
        }
        durable
    }

    /// Nothing passes the link of a rank for a while.
    pub(crate) fn cut(&mut self, rank: usize, pause: Duration) {
        self.note(|| format!("rank {rank} is cut off for {pause:?}"));
        self.ranks[rank].cut_until = Some(clock::now() + pause);
    }
}
