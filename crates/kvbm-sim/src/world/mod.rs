//! The simulated world: ranks with their memory, disks and links, a blob store, and what happens
//! next.
//!
//! Everything that is not the leader is here, and nothing happens by itself: [`World::go_on`] does
//! the next thing that is due and moves the clock to it.

pub(crate) mod disk;
mod link;
mod rank;
pub(crate) mod store;
mod work;

use crate::random::Random;
use disk::{Disk, Record};
use kvbm::worker::{MessageSink, WorkerLink};
use kvbm_plan::{BlockId, Epoch, Message, NamespaceId, PlanId, Rank, Tier, clock, simulation, wire};
use parking_lot::Mutex;
use rank::RankModel;
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Landing, Store, Terms};

/// What lies in a slot of memory: the name of a block's bytes.
pub(crate) type Bytes = [u8; 16];

/// How often things go wrong: once in so many; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) read: usize,
    pub(crate) write: usize,
    pub(crate) flush: usize,
    /// Writes to the store that are reported as failed and land later.
    pub(crate) land: usize,
    pub(crate) slow: usize,
    pub(crate) refuse: usize,
    pub(crate) repeat: usize,
    /// Writes that find no room left on their disk, or in the store.
    pub(crate) full: usize,
}

/// What is going to happen.
enum Event {
    /// A command reaches the worker of a rank.
    Command {
        rank: usize,
        life: u64,
        command: Vec<u8>,
    },
    /// A worker begins, or ends, what a plan says.
    Work {
        rank: usize,
        life: u64,
        plan: PlanId,
    },
    /// A message reaches the leader.
    Message {
        rank: usize,
        epoch: Epoch,
        life: u64,
        message: Message,
    },
    /// A disk makes durable what it was sent.
    Sync {
        rank: usize,
    },
    /// A worker starts.
    Start {
        rank: usize,
    },
    /// Bytes land in the store although their write had failed.
    Land(Box<Landing>),
    /// The leader's threads look for work.
    Deadlines,
    Decisions,
}

/// What the leader's threads do.
pub(crate) trait Threads {
    fn deadlines(&self);
    fn decisions(&self);
}

pub(crate) struct WorldState {
    pub(crate) ranks: Vec<RankModel>,
    pub(crate) store: Store,
    random: Random,
    pub(crate) faults: Faults,
    events: BTreeMap<(Instant, u64), Event>,
    scheduled: u64,
    pub(crate) step: u64,
    /// Of everything that was said and done.
    digest: DefaultHasher,
    trace: bool,
    violation: Option<String>,
    /// Nothing fails any more.
    pub(crate) tame: bool,
    /// A disk has said that something is durable which is not.
    pub(crate) has_lied: bool,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct World(Arc<Mutex<WorldState>>);

/// How often the leader looks for late transfers.
const DEADLINES: Duration = Duration::from_millis(50);

impl WorldState {
    /// Has something happen in `delay`.
    fn schedule(&mut self, delay: Duration, event: Event) {
        self.schedule_at(clock::now() + delay, event);
    }

    fn schedule_at(&mut self, time: Instant, event: Event) {
        self.scheduled += 1;
        self.events.insert((time, self.scheduled), event);
    }

    /// Writes down what happens.
    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>6} {}", self.step, what());
        }
    }

    /// A rule is broken. The first one is reported.
    fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// True once in `times`.
    pub(crate) fn chance(&mut self, times: usize) -> bool {
        self.random.once_in(times)
    }

    /// Bits flip on a disk or in the store, or a disk begins to lie.
    pub(crate) fn rot(&mut self, rank: usize, lies: bool, at: usize) {
        if lies {
            self.note(|| format!("the disk of rank {rank} lies"));
            self.ranks[rank].disk.lie();
            self.has_lied = true;
        } else if at.is_multiple_of(3) {
            let WorldState { store, random, .. } = self;
            if let Some(what) = store.rot(random) {
                self.note(|| what);
            }
        } else {
            let WorldState { ranks, random, .. } = self;
            if let Some(what) = ranks[rank].disk.flip(random) {
                self.note(|| format!("{what} on rank {rank}"));
            }
        }
    }

    /// Whether every rank has in a slot of its disk what the leader knows.
    pub(crate) fn is_certain(&self, slot: BlockId) -> bool {
        self.ranks.iter().all(|rank| !rank.disk.is_doubtful(slot))
    }

    /// Whether some disk was sent a block for a slot after a step.
    pub(crate) fn is_written_since(&self, slot: BlockId, step: u64) -> bool {
        let is_later = |record: Record| record.asked > step;
        self.ranks.iter().any(|rank| rank.disk.get(slot).is_some_and(is_later))
    }

    /// Whether no bits have flipped in a slot on any disk.
    pub(crate) fn is_sound(&self, slot: BlockId) -> bool {
        !self.has_lied && self.ranks.iter().all(|rank| !rank.disk.is_rotten(slot))
    }

    /// No leader is reached any more.
    pub(crate) fn disconnect(&mut self) {
        self.ranks.iter_mut().for_each(|rank| rank.line = None);
    }

    fn fails(&mut self, once_in: usize) -> bool {
        !self.tame && self.random.once_in(once_in)
    }
}

impl World {
    /// A world of so many ranks. `disk` says how many slots their disks have, and how much slack
    /// their journals; `store`, how objects lie in their store.
    pub(crate) fn new(
        seed: u64,
        ranks: usize,
        disk: (u32, u64),
        store: Terms,
        faults: Faults,
        trace: bool,
    ) -> Self {
        let mut state = WorldState {
            ranks: (0..ranks).map(|_| RankModel::new(Disk::new(disk.0, disk.1))).collect(),
            store: Store::new(ranks, store),
            random: Random::new(seed ^ 0x6b76_626d),
            faults,
            events: BTreeMap::new(),
            scheduled: 0,
            step: 0,
            digest: DefaultHasher::new(),
            trace,
            violation: None,
            tame: false,
            has_lied: false,
        };
        state.schedule(DEADLINES, Event::Deadlines);
        state.schedule(Duration::from_millis(1), Event::Decisions);
        (0..ranks).for_each(|rank| state.schedule(Duration::from_millis(20), Event::Sync { rank }));
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn with<R>(&self, change: impl FnOnce(&mut WorldState) -> R) -> R {
        change(&mut self.0.lock())
    }

    pub(crate) fn note(&self, what: impl FnOnce() -> String) {
        self.with(|state| {
            if state.trace {
                state.note(what);
            }
        });
    }

    /// Mixes a number into the digest.
    pub(crate) fn digest(&self, number: impl Hash) {
        self.with(|state| number.hash(&mut state.digest));
    }

    /// Of everything so far: equal for equal runs.
    pub(crate) fn digest_value(&self) -> u64 {
        self.with(|state| state.digest.finish())
    }

    pub(crate) fn violate(&self, what: impl Into<String>) {
        self.with(|state| state.violate(what.into()));
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.with(|state| state.violation.clone())
    }

    /// Does the next thing that is due by `until`, else moves the clock there.
    pub(crate) fn go_on(&self, until: Instant, threads: Option<&dyn Threads>) {
        let next = self.with(|state| {
            let (&(time, number), _) = state.events.first_key_value()?;
            if time > until {
                return None;
            }
            state.events.remove(&(time, number)).map(|event| (time, event))
        });
        let Some((time, event)) = next else {
            simulation::advance_to(until);
            return;
        };
        simulation::advance_to(time);
        self.happen(event, threads);
        self.check_disks();
    }

    fn happen(&self, event: Event, threads: Option<&dyn Threads>) {
        match event {
            Event::Command { rank, life, command } => self.with(|state| state.command(rank, life, &command)),
            Event::Work { rank, life, plan } => self.with(|state| state.work(rank, life, plan)),
            Event::Message { rank, epoch, life, message } => self.deliver(rank, epoch, life, &message),
            Event::Sync { rank } => self.with(|state| {
                state.sync(rank);
                let WorldState { ranks, random, .. } = state;
                ranks[rank].disk.rehearse(random);
                let delay = state.random.duration(Duration::from_millis(100));
                state.schedule(delay, Event::Sync { rank });
            }),
            Event::Start { rank } => self.with(|state| state.start(rank)),
            Event::Land(landing) => self.with(|state| {
                let position = landing.identity().position;
                state.note(|| format!("late bytes of block {position} land in the store"));
                state.store.land(&landing);
            }),
            Event::Deadlines => {
                self.with(|state| state.schedule(DEADLINES, Event::Deadlines));
                threads.into_iter().for_each(Threads::deadlines);
            }
            Event::Decisions => {
                self.with(|state| {
                    let delay = state.random.duration(Duration::from_millis(5));
                    state.schedule(delay, Event::Decisions);
                });
                threads.into_iter().for_each(Threads::decisions);
            }
        }
    }

    /// A message reaches the leader, or one that has gone meanwhile.
    fn deliver(&self, rank: usize, epoch: Epoch, life: u64, message: &Message) {
        let sink = self.with(|state| {
            state.note(|| format!("rank {rank} says {message:?}"));
            let model = &mut state.ranks[rank];
            let (now, sink) = model.line.clone()?;
            if let Message::Transfer(report) = message
                && epoch == now
            {
                model.owed.remove(&report.plan_id);
            }
            if let Message::Ready { .. } = message {
                model.takes = model.is_up && model.life == life;
                model.is_given_up = false;
            }
            // What has no epoch is said on the line of that leader alone.
            (epoch == now || !matches!(message, Message::Recovered { .. })).then_some(sink)
        });
        let Some(sink) = sink else { return };
        match wire::encode_message(message) {
            Ok(bytes) => {
                self.digest(&bytes);
                sink(bytes);
            }
            Err(error) => self.violate(format!("a worker's message has no wire form: {error}")),
        }
        if let Message::Ready { .. } = message {
            self.with(|state| {
                let model = &mut state.ranks[rank];
                model.is_known = model.is_up && model.life == life;
            });
        }
    }

    /// A leader connects to a rank.
    pub(crate) fn connect(&self, rank: Rank, epoch: Epoch, sink: MessageSink) -> Box<dyn WorkerLink> {
        self.with(|state| {
            let model = &mut state.ranks[rank.index()];
            model.line = Some((epoch, sink));
            // Nothing of an earlier leader is carried out any more.
            model.end_session();
            (model.is_given_up, model.takes) = (false, true);
            let in_order = state.chance(2);
            state.ranks[rank.index()].disk.close(in_order);
            state.events.retain(|_, event| !matches!(event, Event::Land(_)));
            state.open(rank.index());
        });
        Box::new(link::Link::new(self.clone(), rank.index()))
    }

    /// Workers that have died or started so far.
    pub(crate) fn changes(&self) -> u64 {
        self.with(|state| state.ranks.iter().map(|rank| rank.changes).sum())
    }

    /// Rules that disks or the store broke.
    pub(crate) fn check_disks(&self) {
        self.with(|state| {
            state.store.check();
            if let Some(what) = state.store.take_broken() {
                state.violate(format!("store: {what}"));
            }
            for rank in 0..state.ranks.len() {
                if let Some(what) = state.ranks[rank].disk.take_broken() {
                    state.violate(format!("disk of rank {rank}: {what}"));
                }
            }
        });
    }

    /// What each rank that the leader knows has in a slot of memory.
    pub(crate) fn lacks(&self, tier: Tier, slot: BlockId, bytes: Bytes) -> Option<usize> {
        self.with(|state| {
            let known = state.ranks.iter().enumerate().filter(|(_, rank)| rank.is_known);
            let lacks = |(_, rank): &(usize, &RankModel)| rank.bytes(tier, slot) != Some(bytes);
            known.into_iter().find(lacks).map(|(rank, _)| rank)
        })
    }

    /// A rank whose disk has something else in a slot, although no fault touched it.
    pub(crate) fn disk_lacks(&self, slot: BlockId, identity: &kvbm_plan::BlockIdentity) -> Option<usize> {
        self.with(|state| {
            let is_wrong = |rank: &&RankModel| {
                let is_it = rank.disk.get(slot).is_some_and(|record| record.identity == *identity);
                !is_it && !rank.disk.is_doubtful(slot)
            };
            state.ranks.iter().position(|rank| rank.is_known && is_wrong(&rank))
        })
    }

    /// A rank on which a worker still has a slot to read or to write.
    pub(crate) fn in_use(&self, tier: Tier, slot: BlockId) -> Option<(usize, PlanId)> {
        self.with(|state| {
            let ranks = state.ranks.iter().enumerate().filter(|(_, rank)| !rank.is_given_up);
            ranks.into_iter().find_map(|(at, rank)| Some((at, rank.user_of(tier, slot)?)))
        })
    }

    /// What the engine computes is in the memory of every rank that is there.
    pub(crate) fn compute(&self, slots: &[BlockId], bytes: impl Fn(usize) -> Bytes) {
        self.with(|state| {
            for rank in state.ranks.iter_mut().filter(|rank| rank.is_up) {
                for (at, &slot) in slots.iter().enumerate() {
                    rank.put(Tier::G1, slot, Some(bytes(at)));
                }
            }
        });
    }

    /// What would survive that was asked for before a namespace was forgotten.
    pub(crate) fn remains(&self, namespace: NamespaceId, forgotten: u64) -> Option<String> {
        self.with(|state| {
            for (at, rank) in state.ranks.iter().enumerate() {
                if let Some((slot, asked)) = rank.disk.remains(namespace, forgotten) {
                    return Some(format!("rank {at} has it in slot {slot} since step {asked}"));
                }
            }
            let lands = state.events.values().find_map(|event| match event {
                Event::Land(landing)
                    if landing.identity().namespace == namespace && landing.asked() < forgotten =>
                {
                    Some(format!("a write of step {} may land in the store yet", landing.asked()))
                }
                _ => None,
            });
            if lands.is_some() {
                return lands;
            }
            state.store.audit();
            let old = state.store.of(namespace).find(|(.., object)| object.asked < forgotten);
            old.map(|(hash, rank, object)| {
                format!("the store has {hash} of rank {rank} since step {}", object.asked)
            })
        })
    }
}
