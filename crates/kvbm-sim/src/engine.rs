//! An engine that serves a synthetic trace with a real manager.

use crate::plan::Setup;
use crate::random::Random;
use crate::world::{Threads, World};
use kvbm::config::{Blocks, Config, ModelConfig};
use kvbm::{
    BlockBatch, Cached, Complete, G1, KvBlockManager, Namespace, Onboarding, Owned, Parked, Rank, Tier,
    TokenSequence,
};
use kvbm_events::Subscriber;
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId, SequenceHash, clock};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Tokens of a block.
const PAGE: u32 = 16;

pub(crate) type Manager = KvBlockManager<Owned>;

/// The manager that lives, for the threads that the world plays.
#[derive(Clone, Default)]
pub(crate) struct Living(Rc<RefCell<Option<Rc<Manager>>>>);

impl Threads for Living {
    fn deadlines(&self) {
        let manager = self.0.borrow().clone();
        manager.inspect(|manager| manager.simulate_deadlines());
    }

    fn decisions(&self) {
        let manager = self.0.borrow().clone();
        manager.inspect(|manager| manager.simulate_decisions());
    }
}

impl Living {
    /// No manager lives any more.
    pub(crate) fn end(&self) {
        self.set(None);
    }

    fn set(&self, manager: Option<Rc<Manager>>) {
        let before = self.0.replace(manager);
        drop(before);
    }
}

/// Events as a follower in this process applies them.
pub(crate) struct Follower {
    pub(crate) subscriber: Subscriber,
    pub(crate) blocks: BTreeSet<(Tier, SequenceHash)>,
    /// Events below this number are in a snapshot already.
    pub(crate) covered: u64,
}

/// An onboard that is under way.
pub(crate) struct Arriving {
    pub(crate) onboarding: Onboarding,
    pub(crate) began: Instant,
}

/// See the module.
pub(crate) struct Engine {
    pub(crate) world: World,
    pub(crate) setup: Setup,
    pub(crate) random: Random,
    pub(crate) living: Living,
    manager: Option<Rc<Manager>>,
    namespaces: [Namespace; 2],
    /// The step in which each namespace was forgotten last.
    pub(crate) forgotten: BTreeMap<NamespaceId, u64>,
    pub(crate) chains: Vec<TokenSequence>,
    pub(crate) arriving: Vec<Arriving>,
    pub(crate) computed: Vec<BlockBatch<G1, Complete>>,
    pub(crate) cached: Vec<Cached<G1>>,
    parked: Vec<(Parked, [u8; 16])>,
    private: u128,
    pub(crate) follower: Follower,
    /// Blocks that a flush has made durable and that have not left G3 since.
    pub(crate) durable: BTreeMap<BlockId, BlockIdentity>,
}

fn model() -> ModelConfig {
    ModelConfig { num_layers: 2, num_kv_heads: 6, head_dim: 32, ..ModelConfig::default() }
}

fn namespace(weights: &str) -> Namespace {
    Namespace::new("simulated").weights(weights)
}

fn configure(config: &mut Config, setup: &Setup) {
    config.disk.drive_writes_per_day = 0.0;
    for edge in [&mut config.offload.g1_g2, &mut config.offload.g2_g3] {
        edge.queue_share = setup.queue_share;
        edge.watermark = setup.watermark;
        edge.idle_iterations = setup.idle_iterations;
    }
    config.offload.g2_g3.write_through = setup.writes_through;
    config.offload.g2_g3.ahead_share = 0.3;
    config.transfer.deadline = setup.deadline;
    config.transfer.rank_lost_after = setup.rank_lost_after;
    config.disk.read_deadline = setup.deadline;
    config.disk.flush_deadline = Duration::from_secs(2);
    config.events.ring_capacity = setup.ring_capacity;
    config.events.worker_id = 1;
}

fn build(world: &World, setup: &Setup) -> Rc<Manager> {
    let [g1, g2, g3] = setup.blocks;
    let mut builder = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace("1"))
        .device(Blocks(g1))
        .host(Blocks(g2))
        .tensor_parallel(setup.ranks as u32);
    if g3 > 0 {
        builder = builder.disk("simulated", Blocks(g3));
    }
    if setup.has_volume {
        builder = builder.volume("memory:");
    }
    let built = builder
        .configure(|config| configure(config, setup))
        .build_with_workers(|rank, epoch, sink| world.connect(rank, epoch, sink));
    Rc::new(built.unwrap_or_else(|error| panic!("no manager: {error}")))
}

impl Follower {
    fn new(manager: &Manager) -> Self {
        let subscriber = manager.events().subscribe();
        let subscriber = subscriber.unwrap_or_else(|error| panic!("no subscriber: {error}"));
        Self { subscriber, blocks: BTreeSet::new(), covered: 0 }
    }
}

impl Engine {
    pub(crate) fn new(world: World, setup: Setup, seed: u64, living: Living) -> Self {
        let mut random = Random::new(seed ^ 0x0065_6e67);
        let manager = build(&world, &setup);
        living.set(Some(Rc::clone(&manager)));
        let other = namespace("2").page_size(PAGE).dtype("bf16");
        let namespaces = [manager.namespace().clone(), other];
        let chains = (0..setup.chains as u32)
            .map(|chain| {
                // Some of them begin alike.
                let family = if random.below(2) == 0 { chain - chain % 3 } else { chain };
                let shared = PAGE * (1 + random.below(3) as u32);
                let token = |at: u32| if at < shared { at + 1000 * family } else { at + 1000 * chain };
                let prompt: Vec<u32> = (0..PAGE * (1 + random.below(6) as u32)).map(token).collect();
                let of = &namespaces[usize::from(family % 4 == 3)];
                let sequence = manager.sequence_in(of, &prompt, b"");
                sequence.unwrap_or_else(|error| panic!("no sequence: {error}"))
            })
            .collect();
        let follower = Follower::new(&manager);
        Self {
            world,
            setup,
            random,
            living,
            manager: Some(manager),
            namespaces,
            forgotten: BTreeMap::new(),
            chains,
            arriving: Vec::new(),
            computed: Vec::new(),
            cached: Vec::new(),
            parked: Vec::new(),
            private: 0,
            follower,
            durable: BTreeMap::new(),
        }
    }

    /// The manager that lives.
    pub(crate) fn manager(&self) -> Rc<Manager> {
        self.manager.clone().unwrap_or_else(|| panic!("no manager lives"))
    }

    /// The chain of the next request: few are asked for often, and which ones changes.
    fn chain(&mut self) -> usize {
        let (count, drift) = (self.chains.len(), self.world.with(|state| state.step) as usize / 200);
        let first = self.random.below(count);
        let at = self.random.below(first + 1);
        (at + drift) % count
    }

    /// One thing that an engine, an operator or an accident does.
    pub(crate) fn step(&mut self) {
        let rank = self.random.below(self.setup.ranks);
        match self.random.below(1000) {
            0..150 => self.compute(),
            150..260 => self.register(),
            260..380 => self.onboard(),
            380..460 => self.end_onboarding(),
            460..540 => drop(self.random.take(&mut self.cached)),
            540..560 => drop(self.random.take(&mut self.computed)),
            560..575 => self.offload(),
            575..640 => {
                self.manager().step();
            }
            640..655 => self.park(),
            655..675 => self.resume(),
            675..682 => self.forget(rank),
            682..690 => self.clear(),
            690..705 => self.flush(),
            705..750 => self.follow(),
            750..756 if self.setup.kills => self.kill(rank),
            756..760 if self.setup.kills => self.give_up(rank),
            760..766 if self.setup.cuts => self.cut(rank),
            766..772 => self.rot(rank),
            772..776 if self.setup.babbles => self.world.with(|state| state.babble(rank)),
            776..779 if self.setup.restarts => {
                let is_clean = self.random.once_in(3);
                self.restart(is_clean);
            }
            _ => self.pass(),
        }
        // Time goes on.
        let most = Duration::from_millis(3);
        let until = clock::now() + self.random.duration(most);
        self.pass_until(until, 8);
    }

    /// Lets the world go on for a while.
    fn pass(&mut self) {
        let until = clock::now() + self.random.duration(Duration::from_millis(20));
        self.pass_until(until, 40);
    }

    /// Lets at most so many things happen by a time.
    fn pass_until(&mut self, until: Instant, things: usize) {
        for _ in 0..things {
            if clock::now() >= until {
                return;
            }
            self.world.go_on(until, Some(&self.living));
        }
    }

    fn compute(&mut self) {
        let at = self.chain();
        let chain = self.chains[at].clone();
        let prefix = self.manager().match_prefix(&chain);
        let there = prefix.blocks().iter().take_while(|block| block.tier == Tier::G1).count();
        drop(prefix);
        let missing = chain.num_blocks() - there;
        if missing == 0 {
            return;
        }
        let Ok(fresh) = self.manager().allocate(missing) else { return };
        self.check_fresh(fresh.block_ids());
        self.world.compute(fresh.block_ids(), |at| *chain.hashes()[there + at].as_bytes());
        self.world.note(|| format!("computes {:?}", fresh.block_ids()));
        match self.manager().commit(fresh, &chain, there) {
            Ok((done, _)) => self.computed.push(done),
            Err(error) => {
                self.world.violate(format!("blocks that were just allocated do not commit: {error}"));
            }
        }
    }

    fn register(&mut self) {
        if let Some(done) = self.random.take(&mut self.computed) {
            // Refused where a worker has lost them, or their parent has gone.
            let registered = self.manager().register(done);
            self.cached.extend(registered);
        }
    }

    fn onboard(&mut self) {
        let chain = self.chain();
        let prefix = self.manager().match_prefix(&self.chains[chain]);
        self.world.digest(prefix.len());
        let onboarding = self.manager().onboard(prefix);
        self.arriving.push(Arriving { onboarding, began: clock::now() });
    }

    fn end_onboarding(&mut self) {
        let Some(Arriving { onboarding, .. }) = self.random.take(&mut self.arriving) else { return };
        if self.random.once_in(4) {
            return;
        }
        let until = if self.random.once_in(3) { clock::now() } else { clock::now() + self.setup.deadline };
        let arrived = onboarding.wait_until(until).unwrap_or_else(|error| error.arrived);
        self.world.digest(arrived.len());
        self.cached.push(arrived);
    }

    fn offload(&mut self) {
        let chain = self.chain();
        let parts = self.manager().match_prefix(&self.chains[chain]).into_parts();
        let to = if self.setup.has_volume && self.random.once_in(2) { Tier::G4 } else { Tier::G3 };
        // Refused where the tier is not there, or has lost them.
        let _refused = self.manager().offload(&parts.g2, to);
        let _refused = self.manager().offload(&parts.g1, Tier::G2);
    }

    /// A preempted sequence: a full block that is given up, and a private one that moves to G2.
    fn park(&mut self) {
        let Ok(fresh) = self.manager().allocate(2) else { return };
        self.check_fresh(fresh.block_ids());
        self.private += 1;
        let bytes = self.private.to_le_bytes();
        self.world.compute(fresh.block_ids(), |_| bytes);
        let Ok(sequence) = self.manager().sequence(&[1; PAGE as usize + 1], b"") else { return };
        if let Ok((_, partial)) = self.manager().commit(fresh, &sequence, 0) {
            let parked = self.manager().park(partial);
            self.parked.extend(parked.map(|parked| (parked, bytes)));
        }
    }

    fn resume(&mut self) {
        let Some((parked, bytes)) = self.random.take(&mut self.parked) else { return };
        match self.manager().resume(parked) {
            Ok(blocks) if !blocks.is_lost() => {
                for &slot in blocks.block_ids() {
                    if let Some(rank) = self.world.lacks(Tier::G1, slot, bytes) {
                        self.world.violate(format!(
                            "a private block in slot {slot} of G1 came back with other bytes on rank {rank}"
                        ));
                    }
                }
            }
            Ok(_) => {}
            Err(rejected) => self.parked.extend(rejected.blocks.map(|parked| (parked, bytes))),
        }
    }

    /// Accidents like to come when something is half done.
    fn forget(&mut self, rank: usize) {
        let at = self.random.below(2);
        let namespace = self.namespaces[at].clone();
        let step = self.world.with(|state| state.step);
        self.world.note(|| format!("forgets namespace {namespace:?}"));
        if self.random.once_in(2) {
            self.manager().forget(&namespace);
        } else {
            self.manager().forget_in_background(&namespace);
        }
        self.forgotten.insert(NamespaceId::from(namespace.tag()), step);
        if self.setup.kills && self.random.once_in(3) {
            self.kill(rank);
        } else if self.setup.restarts && self.random.once_in(4) {
            self.restart(true);
        }
    }

    fn clear(&mut self) {
        let tier = Tier::ALL[self.random.below(4)];
        // Refused where the tier is not there.
        let _refused = self.manager().clear_in_background(tier);
    }

    fn flush(&mut self) {
        let before: BTreeMap<_, _> = self.manager().simulate_snapshot(Tier::G3).into_iter().collect();
        let flushed = self.manager().flush(Duration::from_secs(2));
        self.world.note(|| format!("flush: {flushed:?}"));
        if flushed.is_ok() && !self.world.with(|state| state.has_lied) {
            let is_certain = |slot: &BlockId| self.world.with(|state| state.is_certain(*slot));
            self.durable = before.into_iter().filter(|(slot, _)| is_certain(slot)).collect();
            self.keep_durable();
            if self.setup.restarts && self.random.once_in(8) {
                self.restart(false);
            }
        }
    }

    fn kill(&mut self, rank: usize) {
        let power = self.random.once_in(2);
        let pause = self.random.duration(Duration::from_secs(3));
        self.world.with(|state| {
            if state.ranks[rank].is_up {
                state.kill(rank, power, pause);
            }
        });
    }

    /// An operator has the leader give up a rank that has died.
    fn give_up(&mut self, rank: usize) {
        if !self.world.with(|state| state.ranks[rank].is_up) {
            self.world.note(|| format!("rank {rank} is given up"));
            // There is such a rank.
            let _owed = self.manager().rank_lost(Rank(rank as u16));
            self.world.with(|state| state.ranks[rank].is_given_up = true);
        }
    }

    fn cut(&mut self, rank: usize) {
        let pause = self.random.duration(Duration::from_secs(2));
        self.world.with(|state| state.cut(rank, pause));
    }

    /// Bits flip, or a disk begins to lie.
    fn rot(&mut self, rank: usize) {
        let (lies, at) = (self.setup.lies && self.random.once_in(3), self.random.next() as usize);
        self.world.with(|state| state.rot(rank, lies, at));
    }

    /// The leader dies, with or without a word, and another one takes its place.
    fn restart(&mut self, is_clean: bool) {
        if is_clean {
            let report = self.manager().shutdown(Duration::from_secs(5));
            self.world.note(|| format!("shutdown: {report:?}"));
            self.check_removed(report.removals_unconfirmed);
        }
        // What was not confirmed may be found by the next leader.
        self.forgotten.clear();
        self.keep_durable();
        let durable = std::mem::take(&mut self.durable);
        self.drop_all();
        let ranks = self.setup.ranks;
        self.world.with(|state| {
            let power = state.chance(2);
            for rank in (0..ranks).filter(|_| power) {
                state.kill(rank, true, Duration::from_millis(1));
            }
        });
        let manager = build(&self.world, &self.setup);
        self.follower = Follower::new(&manager);
        self.living.set(Some(Rc::clone(&manager)));
        self.manager = Some(manager);
        self.check_recovered(&durable);
    }

    /// The engine lets go of everything, and the manager ends.
    pub(crate) fn drop_all(&mut self) {
        self.arriving.clear();
        self.computed.clear();
        self.cached.clear();
        self.parked.clear();
        self.living.set(None);
        self.manager = None;
    }

    /// Nothing fails any more and everybody is there.
    pub(crate) fn tame(&mut self) {
        self.arriving.clear();
        self.computed.clear();
        self.cached.clear();
        self.parked.clear();
        self.world.with(|state| {
            state.tame = true;
            (0..state.ranks.len()).for_each(|rank| {
                let disk = &mut state.ranks[rank].disk;
                (disk.lies, disk.stuck_until) = (false, None);
                state.start(rank);
            });
        });
        let until = clock::now() + Duration::from_secs(20);
        self.pass_until(until, 100_000);
    }
}
