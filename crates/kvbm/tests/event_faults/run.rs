//! One run: managers that work, faults under their events, and an index that has to be right in the
//! end.

use crate::PATIENCE;
use crate::load::{Random, held, prompts};
use crate::nats_server::{NatsServer, STREAM_BYTES};
use crate::network::Namespace;
use crate::proxy::Proxy;
use crate::source::{Plan, Source, Way};
use kvbm::events_plane::nats::{NatsConfig, NatsTransport};
use kvbm::events_plane::zmq::{ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm::events_plane::{
    EventTransport, FollowStats, InProcessConfig, IndexFollower, KvIndex, RemoteSnapshots, Snapshot,
    SnapshotSource, StreamId, Subscriber, TrackerStats,
};
use kvbm::plan::GroupId;
use kvbm::{SequenceHash, Tier, TokenSequence};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    JetStream,
    ZmqReplay,
    /// Core NATS; what is lost is repaired by snapshots.
    Core,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::JetStream => "jetstream",
            Self::ZmqReplay => "zmq_replay",
            Self::Core => "nats_core",
        }
    }
}

/// What a run came to.
pub(crate) struct Outcome {
    pub(crate) mode: Mode,
    pub(crate) name: String,
    /// What is not right; `None` where the index equals the pools.
    pub(crate) wrong: Option<String>,
    /// Time from the end of the last fault until it was so.
    pub(crate) took: Duration,
    /// Blocks that were compared in the end, and those of them on a volume.
    pub(crate) blocks: u64,
    pub(crate) on_volumes: u64,
    pub(crate) follow: FollowStats,
    pub(crate) tracker: TrackerStats,
    pub(crate) faults: BTreeMap<&'static str, u64>,
}

/// No snapshots, or those of the managers.
pub(crate) enum Snapshots {
    None,
    Remote(RemoteSnapshots),
}

impl Snapshots {
    pub(crate) fn of(mode: Mode, transport: &Arc<dyn EventTransport>) -> Self {
        match mode {
            Mode::Core => {
                let timeout = Duration::from_millis(300);
                Self::Remote(RemoteSnapshots::with_timeout(Arc::clone(transport), timeout))
            }
            Mode::JetStream | Mode::ZmqReplay => Self::None,
        }
    }
}

impl SnapshotSource for Snapshots {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        match self {
            Self::None => None,
            Self::Remote(remote) => remote.snapshot(stream, reach),
        }
    }

    fn cancel(&mut self, stream: StreamId) {
        if let Self::Remote(remote) = self {
            remote.cancel(stream);
        }
    }
}

pub(crate) struct Run {
    mode: Mode,
    name: String,
    plan: Plan,
    random: Random,
    sources: Vec<Source>,
    follower: IndexFollower<Snapshots>,
    /// The follower's; it closes its subscribers when it goes.
    _transport: Arc<dyn EventTransport>,
    /// Between the follower and the server, or each bound publisher (events and replay).
    ways: Vec<Proxy>,
    server: Option<String>,
    faults: BTreeMap<&'static str, u64>,
}

const SOURCES: u64 = 2;

/// Who holds what.
type Holdings = BTreeSet<(u64, SequenceHash, Tier)>;

/// The stream of a run over `JetStream`. It is deleted after the run: the server has no room for
/// hundreds of them.
pub(crate) fn stream_of(run: &str) -> String {
    format!("faults-{run}")
}

/// The follower's transport. In every second run over core NATS it is slow to read and its queue is
/// short.
pub(crate) fn connect(mode: Mode, place: &str, name: &str, seed: u64) -> Arc<dyn EventTransport> {
    let mut config = NatsConfig::new(format!("nats://{place}"), format!("kvbm.faults.{name}"));
    if mode == Mode::JetStream {
        config = config.with_stream(stream_of(name));
    } else if seed.is_multiple_of(2) {
        config.queue = InProcessConfig { queue_batches: 4, ..config.queue };
    }
    if let Some(stream) = &mut config.stream {
        stream.max_bytes = STREAM_BYTES;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match NatsTransport::connect(config.clone()) {
            Ok(transport) => return Arc::new(transport),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

impl Run {
    /// The follower and every manager reach the server through a proxy each.
    pub(crate) fn over_nats(mode: Mode, seed: u64, server: &NatsServer) -> Self {
        let way = Proxy::start(&server.address());
        let place = way.address().to_string();
        let to_server = || Way::Proxied(Proxy::start(&server.address()));
        Self::over_server(mode, seed, server, &place, to_server, vec![way])
    }

    /// The server is in a network namespace: all reach it over the one link.
    pub(crate) fn in_namespace(mode: Mode, seed: u64, server: &NatsServer) -> Self {
        let to_server = || Way::Direct(server.address());
        Self::over_server(mode, seed, server, &server.address(), to_server, Vec::new())
    }

    fn over_server(
        mode: Mode,
        seed: u64,
        server: &NatsServer,
        place: &str,
        to_server: impl Fn() -> Way,
        ways: Vec<Proxy>,
    ) -> Self {
        let name = format!("{}-{seed}", mode.name());
        let scheme = if mode == Mode::JetStream { "jetstream+nats://" } else { "nats://" };
        let stream = format!("&stream={}&max_bytes={STREAM_BYTES}", stream_of(&name));
        let stream = if mode == Mode::JetStream { stream.as_str() } else { "" };
        let plan = Plan {
            url: [scheme.into(), format!("?subject=kvbm.faults.{name}{stream}")],
            // Every third run over core NATS loses events before they leave the pool, too.
            ring: if mode == Mode::Core && seed.is_multiple_of(3) { 64 } else { 1 << 16 },
        };
        let transport = connect(mode, place, &name, seed);
        let snapshots = Snapshots::of(mode, &transport);
        let sources = (0..SOURCES).map(|id| Source::start(1 + id, &plan, to_server()));
        let sources = sources.collect();
        let server = Some(server.address());
        Self::new(mode, seed, plan, sources, snapshots, transport, ways, server)
    }

    /// Every manager binds sockets of its own; the follower reaches each of them through a proxy.
    pub(crate) fn over_zmq(seed: u64) -> Self {
        let plan = Plan { url: [String::new(), String::new()], ring: 1 << 16 };
        let sources: Vec<Source> = (0..SOURCES).map(|id| Source::start(1 + id, &plan, Way::Bound)).collect();
        let (mut ways, mut addresses) = (Vec::new(), Vec::new());
        for source in &sources {
            let ports = source.ports.as_ref().unwrap();
            let [events, replay] =
                ports.each_ref().map(|port| Proxy::start(&format!("127.0.0.1:{}", port.number())));
            let through = |proxy: &Proxy| format!("tcp://{}", proxy.address());
            addresses.push(ZmqAddress::new(through(&events)).with_replay(through(&replay)));
            ways.extend([events, replay]);
        }
        // The managers have begun: what they said before is asked for.
        let config = ZmqConfig { from_start: true, ..ZmqConfig::default() };
        let transport = Arc::new(ZmqTransport::connect(config, &addresses).unwrap());
        Self::new(Mode::ZmqReplay, seed, plan, sources, Snapshots::None, transport, ways, None)
    }

    #[allow(clippy::too_many_arguments)] // The two ways to begin differ in all of them.
    fn new(
        mode: Mode,
        seed: u64,
        plan: Plan,
        sources: Vec<Source>,
        snapshots: Snapshots,
        transport: Arc<dyn EventTransport>,
        ways: Vec<Proxy>,
        server: Option<String>,
    ) -> Self {
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let follower = IndexFollower::new(subscriber, snapshots, KvIndex::default());
        Self {
            mode,
            name: format!("{}-{seed}", mode.name()),
            plan,
            random: Random(seed),
            sources,
            follower,
            _transport: transport,
            ways,
            server,
            faults: BTreeMap::new(),
        }
    }

    fn did(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    /// One fault, often several at a time.
    fn disturb(&mut self, server: Option<&mut NatsServer>, network: Option<&mut Namespace>) {
        let source = self.random.below(SOURCES) as usize;
        match (self.random.below(10), server, network) {
            (0, Some(server), network) => {
                // Else nobody could say when it is back.
                if let Some(network) = network {
                    network.set_up(true, true);
                }
                server.restart();
                self.did("server_killed");
            }
            (1, Some(server), _) => {
                server.stall(Duration::from_millis(self.random.below(150)));
                self.did("server_stalled");
            }
            (2..=6, _, Some(network)) => {
                let (up, silently) = (!network.is_up(), self.random.below(2) == 0);
                network.set_up(up, silently);
                self.did(if up { "link_up" } else { "link_down" });
            }
            (2..=4, _, None) => self.disturb_follower(),
            (5 | 6, _, None) => self.disturb_publisher(source),
            (7, _, network) => self.restart(source, network),
            (8, ..) => {
                (0..10).for_each(|_| self.work());
                self.did("follower_stalled");
            }
            _ => {
                self.restart_orderly(source);
            }
        }
    }

    fn disturb_follower(&mut self) {
        let way = self.random.below(self.ways.len() as u64) as usize;
        match self.random.below(3) {
            0 => {
                self.ways[way].cut();
                self.did("follower_cut");
            }
            held => {
                self.ways[way].hold(held == 1);
                self.did("follower_partitioned");
            }
        }
    }

    fn disturb_publisher(&mut self, source: usize) {
        let Way::Proxied(proxy) = &self.sources[source].way else { return self.disturb_follower() };
        proxy.hold(self.random.below(2) == 0);
        if self.random.below(2) == 0 {
            proxy.cut();
        }
        self.did("publisher_partitioned");
    }

    /// A manager dies with all that it has not sent and comes back empty.
    fn restart(&mut self, at: usize, network: Option<&mut Namespace>) {
        let mut downed = None;
        match (&self.sources[at].way, network) {
            (Way::Proxied(proxy), _) => {
                proxy.hold(true);
                proxy.cut();
            }
            (Way::Bound, _) => self.ways[2 * at..2 * at + 2].iter().for_each(|way| {
                way.hold(true);
                way.cut();
            }),
            (Way::Direct(_), Some(network)) if network.is_up() => {
                network.set_up(false, true);
                downed = Some(network);
            }
            (Way::Direct(_), _) => {}
        }
        self.begin_anew(at);
        if let Some(network) = downed {
            network.set_up(true, true);
        }
        self.did("publisher_killed");
    }

    /// A manager ends as it should, as far as it may, and comes back empty.
    fn restart_orderly(&mut self, at: usize) {
        self.begin_anew(at);
        self.did("publisher_restarted");
    }

    fn begin_anew(&mut self, at: usize) {
        let before = self.sources.remove(at);
        let (id, is_bound, ports) = (before.id, matches!(before.way, Way::Bound), before.ports);
        let way = match &self.server {
            Some(server) if matches!(before.way, Way::Proxied(_)) => Way::Proxied(Proxy::start(server)),
            Some(server) => Way::Direct(server.clone()),
            None => Way::Bound,
        };
        // First the old one, with its proxy: two of a kind at a time do not happen.
        drop((before.manager, before.way));
        let source = Source::start_at(id, &self.plan, way, ports);
        if is_bound {
            for way in &self.ways[2 * at..2 * at + 2] {
                way.cut();
                way.hold(false);
            }
        }
        self.sources.insert(at, source);
    }

    fn work(&mut self) {
        for source in &mut self.sources {
            source.work(&mut self.random);
        }
    }

    /// What the pools hold.
    fn pools(&self, prompts: &[TokenSequence]) -> Holdings {
        let of = |source: &Source| {
            let blocks = held(&source.manager, prompts).into_iter();
            let id = source.id;
            blocks.flat_map(move |(hash, tiers)| tiers.into_iter().map(move |tier| (id, hash, tier)))
        };
        self.sources.iter().flat_map(of).collect()
    }

    /// What the index says.
    fn indexed(&self) -> Holdings {
        let holdings = self.follower.index().holdings();
        holdings.map(|(place, _, hash)| (place.source.0, hash, place.location.tier)).collect()
    }

    /// What is not as it should be.
    fn wrong(&self, pools: &Holdings) -> Option<String> {
        let indexed = self.indexed();
        let (missing, extra) = (pools.difference(&indexed).count(), indexed.difference(pools).count());
        let suspects = self.follower.suspects().count();
        (missing + extra + suspects > 0).then(|| {
            format!("{missing} blocks are missing, {extra} are not there, {suspects} streams are suspect")
        })
    }

    /// Whether the index finds as much of each prompt as each pool does.
    fn misfound(&self, prompts: &[TokenSequence]) -> Option<String> {
        let mut found = Vec::new();
        for prompt in prompts {
            self.follower.index().find(GroupId(0), prompt.hashes(), &mut found);
            for source in &self.sources {
                let wanted = source.manager.look_up(prompt).len();
                let told = found.iter().find(|found| found.source.0 == source.id);
                let told = told.map_or(0, |found| found.blocks as usize);
                if told != wanted {
                    return Some(format!("{told} blocks of a prompt are found, {wanted} are there"));
                }
            }
        }
        None
    }

    pub(crate) fn run(
        mut self,
        mut server: Option<&mut NatsServer>,
        mut network: Option<&mut Namespace>,
    ) -> Outcome {
        let prompts = prompts(&self.sources[0].manager);
        for _ in 0..40 {
            self.work();
            if self.random.below(100) < 30 {
                self.disturb(server.as_deref_mut(), network.as_deref_mut());
            }
            self.follower.poll(Duration::ZERO).unwrap();
        }
        if let Some(network) = network {
            network.set_up(true, true);
        }
        self.ways.iter().for_each(|way| way.hold(false));
        for source in &self.sources {
            source.rest();
            if let Way::Proxied(proxy) = &source.way {
                proxy.hold(false);
            }
        }
        let healed = Instant::now();
        // Volumes are told to remove blocks and answer when they have: their books may change when
        // nobody works any more.
        let (pools, mut wrong) = loop {
            let pools = self.pools(&prompts);
            let wrong = self.wrong(&pools).or_else(|| self.misfound(&prompts));
            if wrong.is_none() || healed.elapsed() >= PATIENCE {
                break (pools, wrong);
            }
            self.follower.poll(Duration::from_millis(10)).unwrap();
        };
        let took = healed.elapsed();
        let follow = self.follower.stats();
        if self.mode != Mode::Core && follow.resyncs > 0 {
            wrong = Some("there are no snapshots here".into());
        }
        Outcome {
            mode: self.mode,
            name: self.name,
            wrong: wrong.map(|wrong| format!("{wrong}; {follow:?}")),
            took,
            blocks: pools.len() as u64,
            on_volumes: pools.iter().filter(|(_, _, tier)| *tier == Tier::G4).count() as u64,
            follow,
            tracker: self.follower.subscriber().stats().tracker,
            faults: self.faults,
        }
    }
}
