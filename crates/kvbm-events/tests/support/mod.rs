//! What the tests of this crate share: blocks, a scripted source, transports that misbehave.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use kvbm_events::{
    Answering, EventBlock, EventKind, EventReceiver, EventSource, EventTransport, InProcessConfig,
    InProcessTransport, KvEvent, Payload, Responder, SourceId, TransportError,
};
use kvbm_plan::{BlockIdentity, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier, VolumeId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Long enough for any machine; a correct run never waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn hash(n: u64) -> SequenceHash {
    SequenceHash::from_bytes(
        (u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)).to_le_bytes(),
    )
}

pub(crate) fn block(n: u32) -> EventBlock {
    EventBlock {
        identity: BlockIdentity {
            namespace: NamespaceId(0xABCD_EF01),
            group: GroupId(0),
            hash: hash(u64::from(n) + 1),
            parent: (n > 0).then(|| hash(u64::from(n))),
            position: n,
        },
        prefix_hash: hash(1),
        local_hash: None,
        block_bytes: 2 << 20,
        block_tokens: 16,
        location: Location::on(NodeId(3), Tier::G2),
    }
}

pub(crate) fn event(sequence: u64) -> KvEvent {
    let mut block = block(sequence as u32);
    if sequence % 5 == 4 {
        block.location = Location { tier: Tier::G4, node: NodeId(3), volume: Some(VolumeId(9)) };
    }
    let kind = match sequence % 3 {
        0 | 1 => EventKind::Store(block),
        _ => EventKind::Remove(block),
    };
    KvEvent::new(sequence, kind)
}

/// A ring as a pool has one: bounded, numbers every event, loses the newest when it is full.
#[derive(Clone)]
pub(crate) struct Ring(Arc<Mutex<RingState>>);

struct RingState {
    events: VecDeque<KvEvent>,
    capacity: usize,
    next: u64,
    lost: Vec<u64>,
}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Arc::new(Mutex::new(RingState { events: VecDeque::new(), capacity, next: 0, lost: Vec::new() })))
    }

    pub(crate) fn push(&self, count: u64) {
        let mut ring = self.0.lock().unwrap();
        for _ in 0..count {
            let sequence = ring.next;
            ring.next += 1;
            if ring.events.len() < ring.capacity {
                ring.events.push_back(event(sequence));
            } else {
                ring.lost.push(sequence);
            }
        }
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.lock().unwrap().next
    }

    pub(crate) fn lost(&self) -> Vec<u64> {
        self.0.lock().unwrap().lost.clone()
    }
}

impl EventSource for Ring {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        let mut ring = self.0.lock().unwrap();
        let count = ring.events.len().min(max);
        out.extend(ring.events.drain(..count));
        ring.events.front().map_or(ring.next, |front| front.sequence)
    }
}

/// What a faulty transport does with the next payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Deliver,
    Lose,
    Repeat,
    Corrupt,
    Unavailable,
    /// Delivered, but the publisher is told that it was not.
    DeliveredButUnavailable,
}

/// Carries payloads as a script says, then perfectly.
pub(crate) struct Faulty {
    inner: InProcessTransport,
    script: Vec<Fate>,
    at: AtomicUsize,
}

impl Faulty {
    pub(crate) fn new(script: Vec<Fate>) -> Self {
        let config = InProcessConfig { queue_batches: 1 << 16, queue_bytes: 1 << 30 };
        Self { inner: InProcessTransport::new(config), script, at: AtomicUsize::new(0) }
    }

    pub(crate) fn is_perfect_now(&self) -> bool {
        self.at.load(Ordering::SeqCst) >= self.script.len()
    }
}

impl EventTransport for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        let unavailable =
            || TransportError::Unavailable { transport: "faulty", reason: "as the script says".to_owned() };
        let at = self.at.fetch_add(1, Ordering::SeqCst);
        match self.script.get(at).copied().unwrap_or(Fate::Deliver) {
            Fate::Deliver => self.inner.publish(payload, timeout),
            Fate::Lose => Ok(()),
            Fate::Repeat => {
                self.inner.publish(payload, timeout)?;
                self.inner.publish(payload, timeout)
            }
            Fate::Corrupt => self.inner.publish(&payload[..payload.len() - 1].into(), timeout),
            Fate::Unavailable => Err(unavailable()),
            Fate::DeliveredButUnavailable => {
                self.inner.publish(payload, timeout)?;
                Err(unavailable())
            }
        }
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        self.inner.subscribe()
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        self.inner.answer(source, responder)
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        self.inner.ask(source, question, timeout)
    }
}

/// A cache of chains that tells its events through a bounded ring: what it holds, and what it told.
#[derive(Clone)]
pub(crate) struct World(Arc<Mutex<WorldState>>);

struct WorldState {
    held: std::collections::BTreeSet<(u32, usize)>,
    events: VecDeque<KvEvent>,
    capacity: usize,
    next: u64,
}

impl World {
    /// Blocks of each chain: a number names chain and position.
    pub(crate) const CHAIN: u32 = 20;

    pub(crate) fn new(capacity: usize) -> Self {
        let (held, events) = (std::collections::BTreeSet::new(), VecDeque::new());
        Self(Arc::new(Mutex::new(WorldState { held, events, capacity, next: 0 })))
    }

    fn block(number: u32, tier: usize) -> EventBlock {
        let (chain, at) = (number / Self::CHAIN, number % Self::CHAIN);
        let name = |at: u32| hash(u64::from(chain * Self::CHAIN + at) + 1);
        let mut block = block(at);
        block.identity.hash = name(at);
        block.identity.parent = at.checked_sub(1).map(name);
        block.prefix_hash = name(0);
        block.location = Location::on(NodeId(0), Tier::ALL[tier]);
        block
    }

    /// Stores a block on a tier, or removes it if it is there.
    pub(crate) fn toggle(&self, number: u32, tier: usize) {
        let mut world = self.0.lock().unwrap();
        let block = Self::block(number, tier);
        let kind = if world.held.insert((number, tier)) {
            EventKind::Store(block)
        } else {
            world.held.remove(&(number, tier));
            EventKind::Remove(block)
        };
        let sequence = world.next;
        world.next += 1;
        if world.events.len() == world.capacity {
            // The oldest goes, as in the pool: what remains ends with the truth.
            world.events.pop_front();
        }
        world.events.push_back(KvEvent::new(sequence, kind));
    }

    pub(crate) fn snapshot(&self) -> kvbm_events::Snapshot {
        let world = self.0.lock().unwrap();
        let blocks = world.held.iter().map(|&(number, tier)| Self::block(number, tier)).collect();
        kvbm_events::Snapshot { next_sequence: world.next, blocks }
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.lock().unwrap().next
    }

    /// Whether an index that follows only this holds exactly the same.
    pub(crate) fn is_mirrored_by(&self, index: &kvbm_events::KvIndex) -> bool {
        let world = self.0.lock().unwrap();
        let of_world =
            world.held.iter().map(|&(number, tier)| (Self::block(number, tier).identity.hash, tier));
        let of_index = index.holdings().map(|(place, _, hash)| (hash, place.location.tier.index()));
        let set = of_world.collect::<std::collections::BTreeSet<_>>();
        set == of_index.collect()
    }
}

impl EventSource for World {
    fn drain(&mut self, max: usize, out: &mut Vec<KvEvent>) -> u64 {
        let mut world = self.0.lock().unwrap();
        let count = world.events.len().min(max);
        out.extend(world.events.drain(..count));
        world.events.front().map_or(world.next, |front| front.sequence)
    }
}

/// A proxy in front of a TCP address whose connections can be cut, or held.
pub(crate) struct Proxy {
    address: std::net::SocketAddr,
    shared: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    upstream: Mutex<String>,
    streams: Mutex<Vec<std::net::TcpStream>>,
    /// Nothing passes: neither bytes nor new connections.
    held: std::sync::atomic::AtomicBool,
    ended: std::sync::atomic::AtomicBool,
}

impl Proxy {
    pub(crate) fn start(upstream: &str) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(ProxyState::default());
        let state = Arc::clone(&shared);
        upstream.clone_into(&mut shared.upstream.lock().unwrap());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if state.ended.load(Ordering::SeqCst) {
                    return;
                }
                let upstream = state.upstream.lock().unwrap().clone();
                let (Ok(client), Ok(server)) = (client, std::net::TcpStream::connect(upstream)) else {
                    continue;
                };
                let mut streams = state.streams.lock().unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || pass(from, to, &state));
                }
                streams.extend([client, server]);
            }
        });
        Self { address, shared }
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// New connections go there.
    pub(crate) fn lead_to(&self, upstream: &str) {
        upstream.clone_into(&mut self.shared.upstream.lock().unwrap());
    }

    /// Cuts every connection; new ones are welcome.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            // It may have ended by itself.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Holds everything, as a network that lets nothing through, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        self.shared.held.store(held, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the thread that accepts.
        let _ = std::net::TcpStream::connect(self.address);
    }
}

/// Moves bytes until one side ends or the proxy does.
fn pass(mut from: std::net::TcpStream, mut to: std::net::TcpStream, state: &ProxyState) {
    use std::io::{Read, Write};
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        while state.held.load(Ordering::SeqCst) && !state.ended.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if to.write_all(&bytes[..len]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A server of our own, with its files in a folder of its own.
pub(crate) struct NatsServer {
    program: std::path::PathBuf,
    port: u16,
    folder: std::path::PathBuf,
    arguments: Vec<String>,
    child: Option<std::process::Child>,
}

impl NatsServer {
    /// `None` where there is no server to run.
    pub(crate) fn start(arguments: &[&str]) -> Option<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let Some(program) = std::env::var_os("KVBM_NATS_SERVER") else {
            println!("skipped: KVBM_NATS_SERVER names no nats-server");
            return None;
        };
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("kvbm-nats-{}-{number}", std::process::id()));
        let (program, arguments) =
            (program.into(), arguments.iter().map(|text| (*text).to_owned()).collect());
        let mut server = Self { program, port, folder, arguments, child: None };
        server.restart();
        Some(server)
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        let mut command = std::process::Command::new(&self.program);
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string(), "-js", "-sd"]).arg(&self.folder);
        command.args(&self.arguments).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        self.child = Some(command.spawn().unwrap());
        let deadline = std::time::Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(std::time::Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// As a power cut does it to the process: without a goodbye.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Stops the process for a while, as an overloaded machine does.
    pub(crate) fn stall(&self, pause: Duration) {
        let Some(child) = &self.child else { return };
        for signal in ["-STOP", "-CONT"] {
            let status = std::process::Command::new("kill").arg(signal).arg(child.id().to_string()).status();
            assert!(status.unwrap().success());
            std::thread::sleep(pause);
        }
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
