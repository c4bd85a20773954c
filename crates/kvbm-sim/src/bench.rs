//! What engines of both kinds share: requests, an operator, accidents.

use crate::plan::Setup;
use crate::prompts::{self, PAGE, Prompt};
use crate::random::Random;
use crate::world::store::{HEAD_DIM, HEADS, LAYERS};
use crate::world::{Threads, World};
use kvbm::config::{Blocks, Config, ModelConfig};
use kvbm::{Builder, KvBlockManager, Namespace, Owned, Rank, Tier, TokenSequence, simulation};
use kvbm_events::Subscriber;
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId, SequenceHash, clock};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

impl<G> Threads for KvBlockManager<G> {
    fn deadlines(&self) {
        simulation::expire(self);
    }

    fn decisions(&self) {
        simulation::decide(self);
    }
}

/// The manager that lives, for the threads that the world plays.
#[derive(Clone, Default)]
pub(crate) struct Living(Rc<RefCell<Option<Rc<dyn Threads>>>>);

impl Threads for Living {
    fn deadlines(&self) {
        let manager = self.0.borrow().clone();
        manager.inspect(|manager| manager.deadlines());
    }

    fn decisions(&self) {
        let manager = self.0.borrow().clone();
        manager.inspect(|manager| manager.decisions());
    }
}

impl Living {
    /// No manager lives any more.
    pub(crate) fn end(&self) {
        self.set(None);
    }

    fn set(&self, manager: Option<Rc<dyn Threads>>) {
        let before = self.0.replace(manager);
        drop(before);
    }
}

/// An engine: what it does in a step, and what must hold then.
pub(crate) trait Engine {
    fn step(&mut self);
    fn check(&mut self);
    /// Nothing fails any more: what must hold when all is over.
    fn check_end(&mut self);
    /// Lets go of everything; the manager ends.
    fn drop_all(&mut self);
}

/// How a leader ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By `shutdown`.
    Shutdown,
    /// Without a word.
    Crash,
}

/// Events as a follower in this process applies them.
pub(crate) struct Follower {
    pub(crate) subscriber: Subscriber,
    pub(crate) blocks: BTreeSet<(Tier, SequenceHash)>,
    /// Events below this number are in a snapshot already.
    pub(crate) covered: u64,
}

/// Builds a manager over the ranks of a world.
type Build<G> = fn(&World, &Setup) -> KvBlockManager<G>;

/// See the module.
pub(crate) struct Bench<G> {
    pub(crate) world: World,
    pub(crate) setup: Setup,
    pub(crate) random: Random,
    living: Living,
    build: Build<G>,
    manager: Option<Rc<KvBlockManager<G>>>,
    namespaces: [Namespace; 2],
    /// The step in which each namespace was forgotten last.
    pub(crate) forgotten: BTreeMap<NamespaceId, u64>,
    pub(crate) chains: Vec<TokenSequence>,
    /// Requests of the trace so far.
    requests: usize,
    pub(crate) follower: Follower,
    /// Blocks that a flush has made durable and that have not left G3 since.
    pub(crate) durable: BTreeMap<BlockId, BlockIdentity>,
    /// The step of that flush.
    pub(crate) flushed: u64,
}

fn model() -> ModelConfig {
    let [num_layers, num_kv_heads, head_dim] = [LAYERS, HEADS, HEAD_DIM];
    ModelConfig { num_layers, num_kv_heads, head_dim, ..ModelConfig::default() }
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
    for volume in config.volume.iter_mut().filter(|_| setup.volume.blocks > 0) {
        volume.capacity = Blocks(setup.volume.blocks).into();
    }
    if setup.has_volume && setup.volume.encrypts {
        config.volumes.encrypt = true;
        // Workers have the key.
        config.encryption.key_file = Some("simulated".into());
    }
    config.events.ring_capacity = setup.ring_capacity;
    config.events.worker_id = 1;
}

/// The builder of a manager of either kind.
pub(crate) fn builder() -> Builder<kvbm::builder::NeedsDevice> {
    KvBlockManager::<Owned>::builder().model(model()).namespace(namespace("1"))
}

/// The tiers below G1, and all settings.
pub(crate) fn below<State>(builder: Builder<State>, setup: &Setup) -> Builder<State> {
    let [_, g2, g3] = setup.blocks;
    let mut builder = builder.host(Blocks(g2)).tensor_parallel(setup.ranks as u32);
    if g3 > 0 {
        builder = builder.disk("simulated", Blocks(g3));
    }
    if setup.has_volume {
        builder = builder.volume("memory:");
    }
    builder.configure(|config| configure(config, setup))
}

impl Follower {
    fn new<G>(manager: &KvBlockManager<G>) -> Self {
        let subscriber = manager.events().subscribe();
        let subscriber = subscriber.unwrap_or_else(|error| panic!("no subscriber: {error}"));
        // It sees every event from now on, and none from before.
        let snapshot = manager.events().snapshot();
        let blocks = snapshot.blocks.iter().map(|block| (block.location.tier, block.identity.hash)).collect();
        Self { subscriber, blocks, covered: snapshot.next_sequence }
    }
}

impl<G: 'static> Bench<G> {
    pub(crate) fn new(world: World, setup: Setup, seed: u64, living: Living, build: Build<G>) -> Self {
        let mut random = Random::new(seed ^ 0x0065_6e67);
        let manager = Rc::new(build(&world, &setup));
        living.set(Some(Rc::clone(&manager) as Rc<dyn Threads>));
        let other = namespace("2").page_size(PAGE).dtype("bf16");
        let namespaces = [manager.namespace().clone(), other];
        let prompts = if setup.follows_trace {
            prompts::of_trace(&mut random)
        } else {
            prompts::at_random(&mut random, setup.chains as u32)
        };
        let sequence = |prompt: Prompt| {
            let of = &namespaces[usize::from(prompt.is_of_other_namespace)];
            let sequence = manager.sequence_in(of, &prompt.tokens, b"");
            sequence.unwrap_or_else(|error| panic!("no sequence: {error}"))
        };
        let chains = prompts.into_iter().map(sequence).collect();
        let follower = Follower::new(&manager);
        let (manager, forgotten, durable) = (Some(manager), BTreeMap::new(), BTreeMap::new());
        Self {
            world,
            setup,
            random,
            living,
            build,
            manager,
            namespaces,
            forgotten,
            chains,
            requests: 0,
            follower,
            durable,
            flushed: 0,
        }
    }

    /// The manager that lives.
    pub(crate) fn manager(&self) -> Rc<KvBlockManager<G>> {
        self.manager.clone().unwrap_or_else(|| panic!("no manager lives"))
    }

    /// The chain of the next request: that of the trace, over and over; without one few are asked
    /// for often, and which ones changes.
    pub(crate) fn chain(&mut self) -> TokenSequence {
        if self.setup.follows_trace {
            self.requests += 1;
            return self.chains[self.requests % self.chains.len()].clone();
        }
        let (count, drift) = (self.chains.len(), self.world.with(|state| state.step) as usize / 200);
        let first = self.random.below(count);
        let at = self.random.below(first + 1);
        self.chains[(at + drift) % count].clone()
    }

    /// One thing that an operator or an accident does. How the leader ends, where it does.
    pub(crate) fn step(&mut self) -> Option<End> {
        let rank = self.random.below(self.setup.ranks);
        match self.random.below(345) {
            0..65 => {
                self.manager().step();
            }
            65..72 => return self.forget(rank),
            72..80 => self.clear(),
            80..95 => return self.flush(rank),
            95..140 => self.follow(),
            140..146 if self.setup.kills => self.kill(rank),
            146..150 if self.setup.kills => self.give_up(rank),
            150..156 if self.setup.cuts => self.cut(rank),
            156..162 => self.rot(rank),
            162..166 if self.setup.babbles => self.world.with(|state| state.babble(rank)),
            166..169 if self.setup.restarts => {
                return Some(if self.random.once_in(3) { End::Shutdown } else { End::Crash });
            }
            _ => self.pass(),
        }
        None
    }

    /// Time goes on.
    pub(crate) fn tick(&mut self) {
        let until = clock::now() + self.random.duration(Duration::from_millis(3));
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

    /// Accidents like to come when something is half done.
    fn forget(&mut self, rank: usize) -> Option<End> {
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
        } else if self.setup.restarts && self.random.once_in(2) {
            return Some(End::Shutdown);
        }
        None
    }

    fn clear(&mut self) {
        let tier = Tier::ALL[self.random.below(4)];
        // Refused where the tier is not there.
        let _refused = self.manager().clear_in_background(tier);
    }

    /// Some disk has failed to sync, and more comes before it does again.
    fn strike(&mut self, rank: usize) -> Option<End> {
        match self.random.below(6) {
            0 => return self.forget(rank),
            1 | 2 => {
                let _refused = self.manager().clear_in_background(Tier::G3);
            }
            3 if self.setup.kills => self.kill(rank),
            _ => {}
        }
        None
    }

    fn flush(&mut self, rank: usize) -> Option<End> {
        let before: BTreeMap<_, _> = simulation::snapshot(&self.manager(), Tier::G3).into_iter().collect();
        let flushed = self.manager().flush(Duration::from_secs(2));
        self.world.note(|| format!("flush: {flushed:?}"));
        if flushed.is_err() {
            return self.strike(rank);
        }
        if self.world.with(|state| state.has_lied) {
            return None;
        }
        let is_certain = |slot: &BlockId| self.world.with(|state| state.is_certain(*slot));
        self.durable = before.into_iter().filter(|(slot, _)| is_certain(slot)).collect();
        self.flushed = self.world.with(|state| state.step);
        self.keep_durable();
        (self.setup.restarts && self.random.once_in(8)).then_some(End::Crash)
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

    /// The leader ends and another one takes its place. The engine has let go of everything.
    pub(crate) fn restart(&mut self, end: End) {
        self.world.note(|| format!("the leader ends: {end:?}"));
        if end == End::Shutdown {
            let report = self.manager().shutdown(Duration::from_secs(5));
            self.world.note(|| format!("shutdown: {report:?}"));
            self.check_removed(report.removals_unconfirmed);
        }
        // What was not confirmed may be found by the next leader.
        self.forgotten.clear();
        self.keep_durable();
        let durable = std::mem::take(&mut self.durable);
        self.end();
        let ranks = self.setup.ranks;
        self.world.with(|state| {
            let power = state.chance(2);
            for rank in (0..ranks).filter(|_| power) {
                state.kill(rank, true, Duration::from_millis(1));
            }
        });
        let manager = Rc::new((self.build)(&self.world, &self.setup));
        self.follower = Follower::new(&manager);
        self.living.set(Some(Rc::clone(&manager) as Rc<dyn Threads>));
        self.manager = Some(manager);
        self.check_recovered(&durable);
    }

    /// The manager ends.
    pub(crate) fn end(&mut self) {
        self.living.end();
        self.manager = None;
    }

    /// Nothing fails any more and everybody is there.
    pub(crate) fn tame(&mut self) {
        self.world.with(|state| {
            state.tame = true;
            (0..state.ranks.len()).for_each(|rank| {
                state.ranks[rank].disk.mend();
                state.start(rank);
            });
            state.store.full_until = None;
        });
        let until = clock::now() + Duration::from_secs(20);
        self.pass_until(until, 100_000);
    }
}
