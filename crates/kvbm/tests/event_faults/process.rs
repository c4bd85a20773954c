//! Publishers in processes of their own, killed as the system kills: by SIGKILL, in the middle of
//! anything.

use crate::load::{Engine, Random, held, prompts};
use crate::nats_server::STREAM_BYTES;
use crate::network::Namespace;
use crate::ports::Port;
use crate::run::{Mode, Outcome, Snapshots, connect, stream_of};
use crate::source;
use crate::support::soon;
use crate::{PATIENCE, PUBLISHER};
use kvbm::Tier;
use kvbm::events_plane::zmq::{ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm::events_plane::{EventTransport, IndexFollower, KvIndex, Subscriber};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Who holds what: source, hash, tier.
type Holdings = BTreeSet<(u64, String, Tier)>;

/// The side of the publisher: `setup` is number, seed and URL. Ends with its standard input; how
/// much it was told to do.
pub(crate) fn serve(setup: &str) -> usize {
    let mut words = setup.splitn(3, ' ');
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (id, seed) = (number(), number());
    let manager = source::manager(id, words.next().unwrap(), 1 << 16);
    let prompts = prompts(&manager);
    let (mut engine, mut random) = (Engine::default(), Random(seed));
    let mut orders = 0;
    // Where tests run one after the other, the line with this one's name has begun and has no end
    // yet.
    println!();
    for line in std::io::stdin().lines() {
        orders += 1;
        if let Some(times) = line.unwrap().strip_prefix("work ") {
            for _ in 0..times.parse().unwrap() {
                engine.work(&manager, &mut random);
            }
            println!("worked");
            continue;
        }
        assert!(manager.wait_offloads(soon()));
        for (hash, tiers) in held(&manager, &prompts) {
            for tier in tiers {
                println!("held {hash} {}", tier.index());
            }
        }
        println!("told");
    }
    orders
}

/// A publisher, as who starts it sees it.
struct Process {
    id: u64,
    url: String,
    /// What starts programs where it lives.
    behind: Vec<String>,
    child: Child,
    output: Receiver<String>,
    /// Where it binds, in every life.
    ports: Option<[Port; 2]>,
}

/// The process, and the lines that it says.
fn spawn(id: u64, seed: u64, url: &str, behind: &[String]) -> (Child, Receiver<String>) {
    let line = behind.iter().map(Into::into).chain([std::env::current_exe().unwrap().into_os_string()]);
    let line: Vec<_> = line.collect();
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).args(["--exact", "a_publisher_in_a_process_of_its_own", "--nocapture"]);
    command.env(PUBLISHER, format!("{id} {seed} {url}")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (said, output) = mpsc::channel();
    // Ends with the process, or when nobody listens any more.
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| said.send(line)));
    (child, output)
}

impl Process {
    fn start(id: u64, seed: u64, url: String, behind: Vec<String>, ports: Option<[Port; 2]>) -> Self {
        let (child, output) = spawn(id, seed, &url, &behind);
        Self { id, url, behind, child, output, ports }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Lines until `last`; those of the test program around them are skipped.
    fn read_until(&mut self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let received = self.output.recv_timeout(PATIENCE);
            let line = received
                .unwrap_or_else(|error| panic!("publisher {} never printed {last}: {error}", self.id));
            if line == last {
                return lines;
            }
            lines.push(line);
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The next life, in the place of the last one.
    fn restart(&mut self, seed: u64) {
        (self.child, self.output) = spawn(self.id, seed, &self.url, &self.behind);
    }

    fn held(&mut self) -> Holdings {
        self.send("tell");
        let lines = self.read_until("told").into_iter();
        let blocks = lines.filter_map(|line| {
            let (hash, tier) = line.strip_prefix("held ")?.split_once(' ')?;
            Some((self.id, hash.to_owned(), Tier::ALL[tier.parse::<usize>().unwrap()]))
        });
        blocks.collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const PUBLISHERS: u64 = 2;

/// Where the publishers live and how their events get here.
pub(crate) struct Place<'a> {
    /// Of the server, where there is one.
    pub(crate) server: Option<String>,
    /// Where bound publishers listen, and what is put down on the way there.
    pub(crate) host: &'static str,
    pub(crate) network: Option<&'a mut Namespace>,
}

fn publishers(mode: Mode, name: &str, seed: u64, place: &Place<'_>) -> Vec<Process> {
    let behind = place.network.as_ref().map_or_else(Vec::new, |network| network.enter());
    let publisher = |id| match (&place.server, mode) {
        (Some(server), Mode::JetStream) => {
            let stream = format!("stream={}&max_bytes={STREAM_BYTES}", stream_of(name));
            let url = format!("jetstream+nats://{server}?subject=kvbm.faults.{name}&{stream}");
            Process::start(id, seed, url, Vec::new(), None)
        }
        (Some(server), _) => {
            let url = format!("nats://{server}?subject=kvbm.faults.{name}");
            Process::start(id, seed, url, Vec::new(), None)
        }
        (None, _) => {
            let ports = [Port::claim(), Port::claim()];
            let [events, replay] = ports.each_ref().map(Port::number);
            let url = format!("zmq+tcp://{}:{events}?replay={replay}&insecure=true", place.host);
            Process::start(id, seed, url, behind.clone(), Some(ports))
        }
    };
    (1..=PUBLISHERS).map(publisher).collect()
}

fn follower(mode: Mode, name: &str, place: &Place<'_>, publishers: &[Process]) -> Following {
    let transport: Arc<dyn EventTransport> = if let Some(server) = &place.server {
        connect(mode, server, name, 1)
    } else {
        let addresses = publishers.iter().map(|publisher| {
            let [events, replay] = publisher.ports.as_ref().unwrap().each_ref().map(Port::number);
            let at = |port| format!("tcp://{}:{port}", place.host);
            ZmqAddress::new(at(events)).with_replay(at(replay))
        });
        let (from_start, insecure, connect_timeout) = (true, true, PATIENCE);
        let config = ZmqConfig { from_start, insecure, connect_timeout, ..ZmqConfig::default() };
        Arc::new(ZmqTransport::connect(config, &addresses.collect::<Vec<_>>()).unwrap())
    };
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    let snapshots = Snapshots::of(mode, &transport);
    (IndexFollower::new(subscriber, snapshots, KvIndex::default()), transport)
}

/// The transport closes its subscribers when it goes.
type Following = (IndexFollower<Snapshots>, Arc<dyn EventTransport>);

/// One run: publishers work, and one or the other is killed while it does.
pub(crate) fn run(mode: Mode, seed: u64, mut place: Place<'_>) -> Outcome {
    let name = format!("{}-killed-{seed}", mode.name());
    let mut random = Random(seed);
    let mut processes = publishers(mode, &name, seed, &place);
    let (mut follower, _transport) = follower(mode, &name, &place, &processes);
    let mut faults: BTreeMap<&'static str, u64> = BTreeMap::new();
    for step in 0..12 {
        if let Some(network) = place.network.as_deref_mut().filter(|_| random.below(3) == 0) {
            let up = !network.is_up();
            network.set_up(up, random.below(2) == 0);
            *faults.entry(if up { "link_up" } else { "link_down" }).or_default() += 1;
        }
        let victim = (random.below(3) == 0).then(|| random.below(PUBLISHERS) as usize);
        for process in &mut processes {
            process.send(&format!("work {}", 1 + random.below(60)));
        }
        if let Some(victim) = victim {
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
            processes[victim].kill();
            if let Some(network) = place.network.as_deref_mut() {
                // Else the address is not there to be bound.
                network.set_up(true, true);
            }
            processes[victim].restart(seed * 100 + step);
            *faults.entry("publisher_sigkilled").or_default() += 1;
        }
        for (at, process) in processes.iter_mut().enumerate() {
            if victim != Some(at) {
                process.read_until("worked");
            }
        }
        follower.poll(Duration::ZERO).unwrap();
    }
    if let Some(network) = place.network {
        network.set_up(true, true);
    }
    let mut pools: Holdings = processes.iter_mut().flat_map(Process::held).collect();
    let healed = Instant::now();
    let mut wrong = compare(&follower, &pools);
    while wrong.is_some() && healed.elapsed() < PATIENCE {
        follower.poll(Duration::from_millis(10)).unwrap();
        // Books of a volume may change when nobody works any more.
        pools = processes.iter_mut().flat_map(Process::held).collect();
        wrong = compare(&follower, &pools);
    }
    let took = healed.elapsed();
    let follow = follower.stats();
    Outcome {
        mode,
        name,
        wrong: wrong.map(|wrong| format!("{wrong}; {follow:?}")),
        took,
        blocks: pools.len() as u64,
        on_volumes: pools.iter().filter(|(_, _, tier)| *tier == Tier::G4).count() as u64,
        follow,
        tracker: follower.subscriber().stats().tracker,
        faults,
    }
}

/// What is not as it should be.
fn compare(follower: &IndexFollower<Snapshots>, pools: &Holdings) -> Option<String> {
    let holdings = follower.index().holdings();
    let indexed: Holdings =
        holdings.map(|(place, _, hash)| (place.source.0, hash.to_string(), place.location.tier)).collect();
    let (missing, extra) = (pools.difference(&indexed).count(), indexed.difference(pools).count());
    let suspects = follower.suspects().count();
    (missing + extra + suspects > 0).then(|| {
        format!("{missing} blocks are missing, {extra} are not there, {suspects} streams are suspect")
    })
}
