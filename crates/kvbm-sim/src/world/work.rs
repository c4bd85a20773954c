//! What workers do with what they are sent.

use super::disk::Record;
use super::rank::Task;
use super::store::Fault;
use super::{Bytes, Event, WorldState};
use kvbm_plan::{
    BlockOutcome, BlockTransfer, Command, Failure, FailureKind, FlushOutcome, Message, PlanId, Rank, Tier,
    TransferPlan, TransferReport, VolumeAnswer, VolumeId, VolumeRequest, clock, wire,
};
use std::time::Duration;

/// How long bytes may land after their write has failed, at most: the deadline of the volume.
const LANDING: Duration = Duration::from_secs(4);

/// How long a disk that fails to sync goes on failing, at most.
const STUCK: Duration = Duration::from_secs(5);

/// How long a disk or a store is full, at most.
const FULL: Duration = Duration::from_secs(8);

/// Bytes of room that a full disk still has, at most: for a few records, and no snapshot.
const SPARE: usize = 400;

fn failed(kind: FailureKind) -> BlockOutcome {
    BlockOutcome::Failed(Failure::new(kind, "simulated"))
}

impl WorldState {
    /// A command reaches the worker of a rank, if it lives.
    pub(super) fn command(&mut self, rank: usize, life: u64, command: &[u8]) {
        if self.ranks[rank].life != life {
            return;
        }
        let Ok(command) = wire::decode_command(command) else { return };
        let name = Rank(rank as u16);
        let Some((epoch, _)) = self.ranks[rank].line else { return };
        match command {
            Command::Transfer(plan) => self.take(rank, plan),
            Command::Cancel { plan_id } => self.cancel(rank, plan_id),
            Command::Release { blocks, .. } => self.ranks[rank].disk.release(&blocks),
            Command::Forget { namespace, .. } => self.ranks[rank].disk.forget(namespace),
            Command::Flush { token } => {
                if self.fails(self.faults.flush) {
                    let (pause, kind) = (self.random.duration(STUCK), self.random.next() as usize);
                    self.ranks[rank].disk.stick(clock::now() + pause, kind);
                }
                let outcome = match self.sync(rank) {
                    Some(blocks) => FlushOutcome::Durable { blocks },
                    None => FlushOutcome::Failed(Failure::new(FailureKind::Io, "simulated")),
                };
                self.say(rank, Message::Flushed { rank: name, epoch, token, outcome });
            }
            Command::Volume { token, volume, request } => {
                let answer = self.ask_store(rank, volume, &request);
                self.say(rank, Message::Volume { rank: name, epoch, token, answer });
            }
            Command::Advance { .. } => {}
        }
    }

    fn take(&mut self, rank: usize, plan: TransferPlan) {
        let (plan_id, asked) = (plan.plan_id, self.step);
        self.ranks[rank].tasks.insert(plan_id, Task { plan, asked, is_started: false });
        self.wait(rank, plan_id);
    }

    /// The next part of a plan begins later.
    fn wait(&mut self, rank: usize, plan: PlanId) {
        let most = if self.fails(self.faults.slow) { 4000 } else { 10 };
        let delay = self.random.duration(Duration::from_millis(most));
        let life = self.ranks[rank].life;
        self.schedule(delay, Event::Work { rank, life, plan });
    }

    /// A plan that has not started is taken back.
    fn cancel(&mut self, rank: usize, plan_id: PlanId) {
        let tasks = &mut self.ranks[rank].tasks;
        if tasks.get(&plan_id).is_some_and(|task| !task.is_started)
            && let Some(task) = tasks.remove(&plan_id)
        {
            let outcomes = vec![failed(FailureKind::Cancelled); task.plan.blocks.len()];
            self.report(rank, &task.plan, outcomes);
        }
    }

    /// A worker starts a plan, or ends it.
    pub(super) fn work(&mut self, rank: usize, life: u64, plan_id: PlanId) {
        let model = &mut self.ranks[rank];
        if model.life != life {
            return;
        }
        let Some(task) = model.tasks.get_mut(&plan_id) else { return };
        if !task.is_started {
            task.is_started = true;
            self.wait(rank, plan_id);
            return;
        }
        let Some(task) = self.ranks[rank].tasks.remove(&plan_id) else { return };
        let outcomes = task.plan.blocks.iter().map(|block| self.copy(rank, &task, block)).collect();
        self.report(rank, &task.plan, outcomes);
    }

    /// Copies one block.
    fn copy(&mut self, rank: usize, task: &Task, block: &BlockTransfer) -> BlockOutcome {
        let path = task.plan.path();
        if self.fails(self.faults.read) {
            return failed(FailureKind::Io);
        }
        let bytes = match self.read(rank, path.src, block) {
            Ok(bytes) => bytes,
            Err(kind) => return failed(kind),
        };
        let is_full = self.is_full(rank, path.dst);
        match path.dst {
            Tier::G3 => return self.write_to_disk(rank, block, bytes, task.asked),
            Tier::G4 => return self.write_to_store(rank, path.src, block, bytes, task.asked, is_full),
            Tier::G1 | Tier::G2 => {}
        }
        if !self.fails(self.faults.write) {
            self.ranks[rank].put(path.dst, block.dst, bytes);
            return BlockOutcome::Done { checksum: 1 };
        }
        // What fails may have been written all the same.
        let written = if self.random.once_in(2) { bytes } else { None };
        self.ranks[rank].put(path.dst, block.dst, written);
        failed(FailureKind::Io)
    }

    /// Copies one block to the disk. A write that fails may have moved some bytes, or all.
    fn write_to_disk(
        &mut self,
        rank: usize,
        block: &BlockTransfer,
        bytes: Option<Bytes>,
        asked: u64,
    ) -> BlockOutcome {
        let record = Record { identity: block.identity, bytes, asked };
        let fails = self.fails(self.faults.write);
        let is_told_wrong = fails && self.random.once_in(2);
        let cuts_short = fails && !is_told_wrong || self.ranks[rank].disk.is_full() && self.random.once_in(2);
        let fails_after = cuts_short.then(|| self.random.below(512));
        match self.ranks[rank].disk.write(block.dst, record, fails_after) {
            Ok(()) if is_told_wrong => failed(FailureKind::Io),
            Ok(()) => BlockOutcome::Done { checksum: 1 },
            Err(kind) => failed(kind),
        }
    }

    /// Copies one block to the store. A write that fails may have written the object, or land
    /// later.
    fn write_to_store(
        &mut self,
        rank: usize,
        src: Tier,
        block: &BlockTransfer,
        bytes: Option<Bytes>,
        asked: u64,
        is_full: bool,
    ) -> BlockOutcome {
        let identity = &block.identity;
        let bytes = if src == Tier::G1 {
            // A worker does not know what should be in G1: it stores what is there.
            bytes.unwrap_or_default()
        } else {
            // Host memory that changed since it was filled never leaves a machine.
            match bytes.filter(|bytes| bytes == identity.hash.as_bytes()) {
                Some(bytes) => bytes,
                None => return failed(FailureKind::Corrupt),
            }
        };
        let fault = if is_full {
            Some(Fault::NoRoom)
        } else if self.fails(self.faults.land) {
            Some(Fault::Lands)
        } else if self.fails(self.faults.write) {
            Some(if self.random.once_in(2) { Fault::FailsLater } else { Fault::Fails })
        } else {
            None
        };
        match self.store.put(rank, identity, bytes, asked, fault) {
            Ok(()) => BlockOutcome::Done { checksum: 1 },
            Err((kind, landing)) => {
                if let Some(landing) = landing {
                    let delay = self.random.duration(LANDING);
                    self.schedule(delay, Event::Land(Box::new(landing)));
                }
                failed(kind)
            }
        }
    }

    /// Whether a store is full, or becomes so. A disk that becomes so finds out by itself.
    fn is_full(&mut self, rank: usize, tier: Tier) -> bool {
        let fills = tier >= Tier::G3 && self.fails(self.faults.full);
        let until = if fills { Some(clock::now() + self.random.duration(FULL)) } else { None };
        match tier {
            Tier::G1 | Tier::G2 => false,
            // There it is the journal that finds no room, and some of the blocks.
            Tier::G3 => {
                if let Some(until) = until {
                    let spare = self.random.below(SPARE) as u64;
                    self.ranks[rank].disk.fill(until, spare);
                }
                false
            }
            Tier::G4 => {
                self.store.full_until = until.or(self.store.full_until);
                self.store.full_until.is_some_and(|until| clock::now() < until)
            }
        }
    }

    /// A worker verifies what comes from a disk or a store, and nothing else.
    fn read(&mut self, rank: usize, tier: Tier, block: &BlockTransfer) -> Result<Option<Bytes>, FailureKind> {
        let model = &mut self.ranks[rank];
        match tier {
            Tier::G1 | Tier::G2 => Ok(model.bytes(tier, block.src)),
            Tier::G3 => model.disk.read(block.src, &block.identity).map(Some),
            Tier::G4 => self.store.get(rank, &block.identity).map(Some),
        }
    }

    fn report(&mut self, rank: usize, plan: &TransferPlan, blocks: Vec<BlockOutcome>) {
        let report = TransferReport {
            plan_id: plan.plan_id,
            epoch: plan.epoch,
            rank: Rank(rank as u16),
            path: plan.path(),
            blocks,
            bytes: 1,
            queued_us: 0,
            busy_us: 0,
        };
        if self.fails(self.faults.repeat) {
            self.say(rank, Message::Transfer(report.clone()));
        }
        self.say(rank, Message::Transfer(report));
    }

    /// What a worker answers about the store. The store fails on the way, or at once.
    fn ask_store(&mut self, rank: usize, volume: VolumeId, request: &VolumeRequest) -> VolumeAnswer {
        let fails = self.fails(self.faults.read);
        if fails && self.random.once_in(2) {
            return VolumeAnswer::Failed(Failure::new(FailureKind::Io, "simulated"));
        }
        let fails_after = fails.then(|| self.random.below(4));
        let (answer, keys) = self.store.ask(rank, volume, request, fails_after);
        if let (false, Some((epoch, _))) = (keys.is_empty(), &self.ranks[rank].line) {
            let (epoch, rank_name, volume) = (*epoch, Rank(rank as u16), Some(volume));
            self.say(rank, Message::Keys { rank: rank_name, epoch, volume, keys });
        }
        answer
    }

    /// A worker says something out of turn: of a life before, or of a plan that nobody has.
    pub(crate) fn babble(&mut self, rank: usize) {
        let Some((epoch, _)) = self.ranks[rank].line else { return };
        let Some(plan) = self.ranks[rank].owed.values().next().cloned() else { return };
        // The same number had been given by the leader before.
        let stale = TransferPlan { epoch: kvbm_plan::Epoch(epoch.0.saturating_sub(1)), ..plan };
        self.note(|| format!("rank {rank} repeats a report of an earlier leader"));
        let report = TransferReport {
            plan_id: stale.plan_id,
            epoch: stale.epoch,
            rank: Rank(rank as u16),
            path: stale.path(),
            blocks: vec![BlockOutcome::Done { checksum: 1 }; stale.blocks.len()],
            bytes: 1,
            queued_us: 0,
            busy_us: 0,
        };
        // Not on the line of that leader any more: it owes this one nothing by it.
        let delay = self.random.duration(Duration::from_millis(2));
        let time = clock::now() + delay;
        let message = Message::Transfer(report);
        let life = self.ranks[rank].life;
        self.schedule_at(time, Event::Message { rank, epoch: stale.epoch, life, message });
    }
}
