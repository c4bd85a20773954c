//! Random runs of kills, partitions, stalls and restarts: the index equals what the sources hold after each.
//!
//! `KVBM_NATS_SERVER` names a nats-server (without it only `ZeroMQ` is run), `KVBM_FAULT_ROUNDS` how many rounds,
//! `KVBM_FAULT_SEED` where they begin, `KVBM_FAULT_WITHIN_MS` how long snapshots over core NATS
//! may take to set the index right once nothing is wrong any more. `cargo xtask event-faults` sets them.

#![cfg(all(feature = "nats", feature = "zmq"))]
#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use kvbm_events::nats::{NatsConfig, NatsTransport};
use kvbm_events::zmq::{ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm_events::{
    Answering, EventManager, EventTransport, IndexFollower, KvIndex, PublisherConfig, RemoteSnapshots,
    Snapshot, SnapshotServer, SnapshotSource, SourceId, StreamId, Subscriber,
};
use kvbm_plan::{Epoch, SequenceHash};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{NatsServer, PATIENCE, Proxy, World};

/// Numbers by a seed: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    JetStream,
    ZmqReplay,
    /// Core NATS; what is lost is repaired by snapshots.
    Core,
}

/// A cache with its publisher, which may die and come back empty.
struct Source {
    id: SourceId,
    epoch: u64,
    world: World,
    proxy: Option<Proxy>,
    transport: Arc<dyn EventTransport>,
    manager: EventManager,
    answering: Option<Answering>,
}

impl Source {
    fn start(
        id: SourceId,
        epoch: u64,
        mode: Mode,
        transport: Arc<dyn EventTransport>,
        proxy: Option<Proxy>,
    ) -> Self {
        let world = World::new(100_000);
        let config = PublisherConfig {
            batch_events: 20,
            max_age: Duration::ZERO,
            heartbeat: Duration::from_millis(50),
            publish_timeout: Duration::from_millis(100),
            ..PublisherConfig::default()
        };
        let mut manager = EventManager::new(config, id, Epoch(epoch), Arc::clone(&transport)).unwrap();
        manager.add_shard(0, world.clone()).unwrap();
        let mut source = Self { id, epoch, world, proxy, transport, manager, answering: None };
        if mode == Mode::Core {
            source.answer();
        }
        source
    }

    fn answer(&mut self) {
        let (world, here) =
            (self.world.clone(), StreamId { source: self.id, epoch: Epoch(self.epoch), shard: 0 });
        let server = SnapshotServer::new(move |stream| (stream == here).then(|| world.snapshot()));
        let deadline = Instant::now() + PATIENCE;
        let server = Arc::new(server);
        self.answering = loop {
            let server = Arc::clone(&server);
            match self.transport.answer(self.id, Arc::new(move |question: &[u8]| server.answer(question))) {
                Ok(answering) => break Some(answering),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        };
    }

    fn work(&mut self, random: &mut Random) {
        for _ in 0..random.below(40) {
            self.world.toggle(random.below(200) as u32, random.below(4) as usize);
        }
        // A transport that is away is what this is about.
        let _ = self.manager.pump(Instant::now());
    }
}

/// No snapshots, or those of the sources.
enum Snapshots {
    None,
    Remote(RemoteSnapshots),
}

impl SnapshotSource for Snapshots {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        match self {
            Self::None => None,
            Self::Remote(remote) => remote.snapshot(stream, reach),
        }
    }
}

/// Everything of one run.
struct Run {
    mode: Mode,
    name: String,
    random: Random,
    sources: Vec<Source>,
    follower: IndexFollower<Snapshots>,
    /// The follower's; it closes its subscribers when it goes.
    _transport: Arc<dyn EventTransport>,
    /// Between the follower and the server, or each publisher.
    ways: Vec<Proxy>,
}

const SOURCES: u64 = 2;

fn proxied(server: &NatsServer) -> (Proxy, String) {
    let proxy = Proxy::start(&format!("127.0.0.1:{}", server.port()));
    let url = format!("nats://{}", proxy.address());
    (proxy, url)
}

fn connect(mode: Mode, url: &str, name: &str) -> Arc<dyn EventTransport> {
    let config = NatsConfig::new(url, format!("kvbm.faults.{name}"));
    let mut config =
        if mode == Mode::JetStream { config.with_stream(format!("faults-{name}")) } else { config };
    if let Some(stream) = &mut config.stream {
        // The server reserves that for each of hundreds of runs.
        stream.max_bytes = 16 << 20;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match NatsTransport::connect(config.clone()) {
            Ok(transport) => return Arc::new(transport),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
}

fn bind() -> Arc<ZmqTransport> {
    let anywhere = ZmqAddress::new("tcp://127.0.0.1:*").with_replay("tcp://127.0.0.1:*");
    Arc::new(ZmqTransport::bind(ZmqConfig::default(), &anywhere).unwrap())
}

impl Run {
    fn over_nats(mode: Mode, seed: u64, server: &NatsServer) -> Self {
        let name = format!("{mode:?}-{seed}");
        let (way, url) = proxied(server);
        let transport = connect(mode, &url, &name);
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let snapshots = match mode {
            Mode::Core => {
                let timeout = Duration::from_millis(300);
                Snapshots::Remote(RemoteSnapshots::with_timeout(Arc::clone(&transport), timeout))
            }
            Mode::JetStream | Mode::ZmqReplay => Snapshots::None,
        };
        let follower = IndexFollower::new(subscriber, snapshots, KvIndex::default());
        let sources = (0..SOURCES).map(|id| {
            let (proxy, url) = proxied(server);
            Source::start(SourceId(id), 1, mode, connect(mode, &url, &name), Some(proxy))
        });
        let sources = sources.collect();
        Self { mode, name, random: Random(seed), sources, follower, _transport: transport, ways: vec![way] }
    }

    fn over_zmq(seed: u64) -> Self {
        let mode = Mode::ZmqReplay;
        let (mut sources, mut ways, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        for id in 0..SOURCES {
            let transport = bind();
            let [address] = transport.addresses().try_into().unwrap();
            let way = |to: &str| Proxy::start(to.strip_prefix("tcp://").unwrap());
            let (events, replay) = (way(&address.events), way(&address.replay.unwrap()));
            let through = |proxy: &Proxy| format!("tcp://{}", proxy.address());
            addresses.push(ZmqAddress::new(through(&events)).with_replay(through(&replay)));
            ways.extend([events, replay]);
            sources.push(Source::start(SourceId(id), 1, mode, transport, None));
        }
        let transport = ZmqTransport::connect(ZmqConfig::default(), &addresses).unwrap();
        let subscriber = Subscriber::new(transport.subscribe().unwrap());
        let follower = IndexFollower::new(subscriber, Snapshots::None, KvIndex::default());
        let (name, transport) = (format!("{mode:?}-{seed}"), Arc::new(transport));
        Self { mode, name, random: Random(seed), sources, follower, _transport: transport, ways }
    }

    /// One fault, often several at a time.
    fn disturb(&mut self, server: Option<&mut NatsServer>) {
        let way = self.random.below(self.ways.len() as u64) as usize;
        let source = self.random.below(SOURCES) as usize;
        match (self.random.below(9), server) {
            (0, Some(server)) => server.restart(),
            (1, Some(server)) => server.stall(Duration::from_millis(self.random.below(150))),
            (0..=2, _) => self.ways[way].cut(),
            (3, _) => self.ways[way].hold(true),
            (4, _) => self.ways[way].hold(false),
            (5 | 6, _) => {
                if let Some(proxy) = &self.sources[source].proxy {
                    proxy.hold(self.random.below(2) == 0);
                    if self.random.below(2) == 0 {
                        proxy.cut();
                    }
                }
            }
            (7, _) => self.restart(source),
            // The follower stalls.
            _ => (0..self.random.below(10)).for_each(|_| self.work()),
        }
    }

    /// A publisher dies with its cache and comes back with an empty one.
    fn restart(&mut self, at: usize) {
        let source = self.sources.remove(at);
        let (id, epoch, mode) = (source.id, source.epoch + 1, self.mode);
        let again = if mode == Mode::ZmqReplay {
            let upstream = &self.ways[2 * at..2 * at + 2];
            drop(source);
            let transport = bind();
            let [address] = transport.addresses().try_into().unwrap();
            upstream[0].lead_to(address.events.strip_prefix("tcp://").unwrap());
            upstream[1].lead_to(address.replay.unwrap().strip_prefix("tcp://").unwrap());
            Source::start(id, epoch, mode, transport, None)
        } else {
            let Source { proxy, .. } = source;
            let proxy = proxy.unwrap();
            proxy.hold(false);
            let transport = connect(mode, &format!("nats://{}", proxy.address()), &self.name);
            Source::start(id, epoch, mode, transport, Some(proxy))
        };
        self.sources.insert(at, again);
    }

    fn work(&mut self) {
        for source in &mut self.sources {
            source.work(&mut self.random);
        }
    }

    fn poll(&mut self, timeout: Duration) {
        self.follower.poll(timeout).unwrap();
    }

    /// Whether the index holds for each source exactly what it holds.
    fn is_right(&self) -> bool {
        let wanted: BTreeSet<(SourceId, SequenceHash, usize)> = self
            .sources
            .iter()
            .flat_map(|source| {
                let blocks = source.world.snapshot().blocks.into_iter();
                blocks.map(|block| (source.id, block.identity.hash, block.location.tier.index()))
            })
            .collect();
        let found = self.follower.index().holdings();
        let found: BTreeSet<_> =
            found.map(|(place, _, hash)| (place.source, hash, place.location.tier.index())).collect();
        found == wanted && self.follower.suspects().count() == 0
    }

    /// Runs; how long the index took to be right after the last fault.
    fn run(mut self, mut server: Option<&mut NatsServer>) -> Duration {
        for _ in 0..40 {
            self.work();
            if self.random.below(100) < 30 {
                self.disturb(server.as_deref_mut());
            }
            self.poll(Duration::ZERO);
        }
        let proxies = self.ways.iter().chain(self.sources.iter().filter_map(|source| source.proxy.as_ref()));
        proxies.for_each(|proxy| proxy.hold(false));
        let healed = Instant::now();
        while !self.is_right() {
            assert!(
                healed.elapsed() < PATIENCE,
                "{}: the index stays wrong: {:?}",
                self.name,
                self.follower.stats()
            );
            for source in &mut self.sources {
                let _ = source.manager.pump(Instant::now());
            }
            self.poll(Duration::from_millis(10));
        }
        let took = healed.elapsed();
        if self.mode == Mode::Core {
            return took;
        }
        assert_eq!(self.follower.stats().resyncs, 0, "{}: there are no snapshots", self.name);
        took
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Mutations that make it fail: `Follower::take` of the `ZeroMQ` subscriber without `fetch`; `IndexFollower::take` that
/// ignores gaps; `follow` of the `JetStream` subscriber that starts at the end.
#[test]
fn the_index_equals_the_sources_after_any_faults() {
    let rounds = number("KVBM_FAULT_ROUNDS", 4);
    let first = number("KVBM_FAULT_SEED", 1);
    let within = Duration::from_millis(number("KVBM_FAULT_WITHIN_MS", PATIENCE.as_millis() as u64));
    let mut server = NatsServer::start(&[]);
    let (mut runs, mut slowest) = ([0; 3], [Duration::ZERO; 3]);
    for seed in first..first + rounds {
        let mut note = |mode: Mode, took: Duration| {
            runs[mode as usize] += 1;
            slowest[mode as usize] = slowest[mode as usize].max(took);
            assert!(mode != Mode::Core || took <= within, "{mode:?}-{seed}: right only after {took:?}");
        };
        match &mut server {
            Some(server) if seed % 2 == 0 => {
                note(Mode::JetStream, Run::over_nats(Mode::JetStream, seed, server).run(Some(server)));
            }
            _ => note(Mode::ZmqReplay, Run::over_zmq(seed).run(None)),
        }
        if let Some(server) = &mut server {
            note(Mode::Core, Run::over_nats(Mode::Core, seed, server).run(Some(server)));
        }
        if (seed - first) % 20 == 19 {
            println!("{} of {rounds} rounds", seed - first + 1);
        }
    }
    println!(
        "equal after every run: JetStream {} (right within {:?}), ZeroMQ with replay {} ({:?}), core with snapshots {} ({:?})",
        runs[0], slowest[0], runs[1], slowest[1], runs[2], slowest[2]
    );
    assert_eq!(runs[0] + runs[1], rounds);
}
