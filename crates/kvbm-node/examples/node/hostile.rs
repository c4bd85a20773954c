//! Strangers that send random bytes to every socket that listens, while honest clients are served.
//!
//! Three programs listen: `kvbm serve` (engines, administration over its socket and over TLS,
//! metrics, events over `ZeroMQ`), `kvbm worker` (its leader), and `kvbm events serve-index`
//! (HTTP).
//! One thread for each socket connects so many times a second. An honest client of each socket asks
//! all the time.
//!
//! The last line is JSON: `seconds, hangs, verified, wrong_bytes`, `sockets` (name, streams,
//! refused, `longest_wait_s` of its honest client) and `processes` (name, resident memory before,
//! at most and behind the attack, descriptors before and behind).

use crate::process::TestProcess;
use crate::sampling::Usage;
use crate::served::{Served, free_address, get};
use crate::{Options, Random, support};
use kvbm::config::Config;
use kvbm::{KvBlockManager, Owned, Tier, TokenSequence};
use rcgen::CertifiedKey;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{Result as IoResult, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Connections that a stranger holds open and silent, at most.
const HELD: usize = 64;
/// Time that a stranger waits for room to write.
const WRITE: Duration = Duration::from_millis(50);
/// Longest stream.
const LONGEST: u64 = 4096;
/// An honest client asks so often.
const ASK: Duration = Duration::from_millis(250);
/// Time of the honest clients before the attack, and behind it: longer than any server waits for a
/// client.
const START: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(12);
const SAMPLE: Duration = Duration::from_millis(200);
/// Blocks that the honest leader loads.
const BLOCKS: usize = 8;
/// Time for a process to listen.
const PATIENCE: Duration = Duration::from_secs(60);
/// An index that has heard nothing for so long has lost its publisher: heartbeats come each second.
const SILENT: f64 = 10.0;
const TOKEN: &str = "token-of-the-honest-client";

/// Where a socket listens, and how an honest stream begins there.
struct Socket {
    name: &'static str,
    address: Address,
    prefix: &'static [u8],
    streams: AtomicU64,
    refused: AtomicU64,
    /// Longest time between two answers to the honest client, in milliseconds.
    longest_wait: AtomicU64,
}

enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// One of the programs; it ends with this.
struct Program(&'static str, Child);

impl Drop for Program {
    fn drop(&mut self) {
        // One that has ended is gone.
        let _ = self.1.kill();
        let _ = self.1.wait();
    }
}

/// An honest client: whether it was served.
type Ask<'a> = Box<dyn FnMut() -> Result<(), String> + Send + 'a>;

/// What listens, and who is served.
struct World {
    served: Served,
    worker: Program,
    index: Program,
    engine: TestProcess,
    leader: HonestLeader,
    dir: PathBuf,
    http: SocketAddr,
    index_address: SocketAddr,
    sockets: [Socket; 8],
}

/// What a program uses: before the attack, at most, and behind it.
struct Usages {
    name: &'static str,
    id: u32,
    before: Usage,
    most: Usage,
    after: Usage,
}

pub(crate) fn run(options: &Options) -> ExitCode {
    let world = World::start(options);
    let mut usages = Vec::new();
    let (over, attack_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (socket, ask) in world.sockets.iter().zip(world.asks()) {
            let over = &over;
            scope.spawn(move || be_served(socket, ask, over));
        }
        // The honest clients are at work before the first stranger comes.
        std::thread::sleep(START);
        for socket in &world.sockets {
            socket.longest_wait.store(0, Ordering::Relaxed);
        }
        usages = world.usages();
        for (at, socket) in world.sockets.iter().enumerate() {
            let attack_over = &attack_over;
            let random = Random(options.seed + at as u64);
            scope.spawn(move || attack(socket, options.rate, random, attack_over));
        }
        let end = Instant::now() + Duration::from_secs(options.seconds);
        while Instant::now() < end {
            std::thread::sleep(SAMPLE);
            for usage in &mut usages {
                usage.most = usage.most.max(Usage::of(usage.id));
            }
        }
        attack_over.store(true, Ordering::Relaxed);
        std::thread::sleep(AFTER);
        for usage in &mut usages {
            usage.after = Usage::of(usage.id);
        }
        over.store(true, Ordering::Relaxed);
    });
    world.report(options, &usages)
}

impl World {
    fn start(options: &Options) -> Self {
        std::fs::create_dir_all(&options.dir).unwrap();
        let [http, events, replay, index_address] = [(); 4].map(|()| free_address());
        private(&options.dir.join("token"), TOKEN);
        certify(&options.dir);
        let at = options.dir.display();
        let url = format!("zmq+tcp://{events}?replay={}", replay.port());
        let settings = format!(
            "[host]\ncapacity = \"512 blocks\"\n[admin]\nhttp = \"{http}\"\ntoken_file = \"{at}/token\"\n\
             tls_cert = \"{at}/cert.pem\"\ntls_key = \"{at}/key.pem\"\n\
             [events]\nurl = \"{url}\"\nworker_id = 7\n"
        );
        let served = Served::start(options, &settings);
        let worker = worker(options);
        let index = index_of(options, &url, index_address);
        let post = b"POST /v1/clear HTTP/1.1\r\ncontent-length: 900\r\n";
        let find = b"POST /find HTTP/1.1\r\ncontent-length: 900\r\n\r\n";
        let sockets = [
            Socket::new("daemon", Address::Unix(options.socket()), FRAME),
            Socket::new("admin", Address::Unix(served.admin.clone()), post),
            Socket::new("admin_tls", Address::Tcp(http), CLIENT_HELLO),
            Socket::new("metrics", Address::Tcp(served.metrics), b"GET /metrics HTTP/1.1\r\nhost: "),
            Socket::new("events", Address::Tcp(events), GREETING),
            Socket::new("replay", Address::Tcp(replay), GREETING),
            Socket::new("worker", Address::Unix(worker_socket(options)), FRAME),
            Socket::new("index", Address::Tcp(index_address), find),
        ];
        let engine = TestProcess::start("engine", options, "honest", options.seed);
        let leader = HonestLeader::start(options);
        let dir = options.dir.clone();
        Self { served, worker, index, engine, leader, dir, http, index_address, sockets }
    }

    /// The honest client of each socket. Whoever follows the events is that of `events` and
    /// `replay`.
    fn asks(&self) -> [Ask<'_>; 8] {
        let mut last = 0;
        let engine = move || {
            let now = self.engine.heard.lock().unwrap().verified;
            let goes_on = now > std::mem::replace(&mut last, now);
            goes_on.then_some(()).ok_or_else(|| "the engine loads nothing".to_owned())
        };
        let over_tls = || {
            let [token, cert] = ["token", "cert.pem"].map(|name| self.dir.join(name).display().to_string());
            let url = format!("https://{}", self.http);
            let to = ["--http", &url, "--ca", &cert, "--token-file", &token];
            self.served.ctl_to(&to, &["status"]).map(drop)
        };
        [
            Box::new(engine),
            Box::new(|| self.served.ctl(&["status"]).map(drop)),
            Box::new(over_tls),
            Box::new(|| self.served.scrape()),
            Box::new(|| hears_publisher(self.index_address)),
            Box::new(|| hears_publisher(self.index_address)),
            Box::new(|| self.leader.load()),
            Box::new(|| get(self.index_address, "/health", "").map(drop)),
        ]
    }

    fn usages(&self) -> Vec<Usages> {
        let served = ("serve", self.served.child.id());
        let [worker, index] = [&self.worker, &self.index].map(|Program(name, child)| (*name, child.id()));
        let usages = [served, worker, index].map(|(name, id)| {
            let before = Usage::of(id);
            Usages { name, id, before, most: before, after: before }
        });
        usages.into()
    }

    fn report(&self, options: &Options, usages: &[Usages]) -> ExitCode {
        let heard = self.engine.heard.lock().unwrap();
        let process = |usages: &Usages| {
            let Usages { name, before, most, after, .. } = usages;
            json!({
                "name": name,
                "rss_before_kib": before.rss_kib,
                "rss_most_kib": most.rss_kib,
                "rss_after_kib": after.rss_kib,
                "descriptors_before": before.descriptors,
                "descriptors_after": after.descriptors,
            })
        };
        let report = json!({
            "seconds": options.seconds,
            "verified": heard.verified,
            "wrong_bytes": heard.wrong,
            "hangs": heard.hangs,
            "sockets": self.sockets.iter().map(Socket::to_json).collect::<Vec<_>>(),
            "processes": usages.iter().map(process).collect::<Vec<_>>(),
        });
        println!("{report}");
        let is_well = heard.wrong == 0 && heard.hangs.is_empty() && heard.verified > 0;
        if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Writes a certificate for 127.0.0.1, which is its own authority, and its key.
fn certify(dir: &Path) {
    let names = ["127.0.0.1".to_owned()];
    let CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed(names).unwrap();
    private(&dir.join("cert.pem"), &cert.pem());
    private(&dir.join("key.pem"), &signing_key.serialize_pem());
}

fn private(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// The head of a record of TLS, and of a client's first message in it.
const CLIENT_HELLO: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";

/// The head of a frame of the line between processes: 64 bytes of the first kind.
const FRAME: &[u8] = b"\x40\0\0\0\x01";

/// The greeting of ZMTP 3.0 with the mechanism NULL (RFC 23 of `ZeroMQ`).
const GREETING: &[u8] = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
    \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

impl Socket {
    fn new(name: &'static str, address: Address, prefix: &'static [u8]) -> Self {
        let [streams, refused, longest_wait] = [(); 3].map(|()| AtomicU64::new(0));
        Self { name, address, prefix, streams, refused, longest_wait }
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "streams": self.streams.load(Ordering::Relaxed),
            "refused": self.refused.load(Ordering::Relaxed),
            "longest_wait_s": self.longest_wait.load(Ordering::Relaxed) as f64 / 1000.0,
        })
    }

    /// Connects, and sends some of `bytes`.
    fn send(&self, bytes: &[u8]) -> IoResult<Box<dyn Write>> {
        Ok(match &self.address {
            Address::Unix(path) => {
                let mut stream = UnixStream::connect(path)?;
                stream.set_write_timeout(Some(WRITE))?;
                // Who listens may close the line before all is written.
                let _ = stream.write_all(bytes);
                Box::new(stream)
            }
            Address::Tcp(address) => {
                let mut stream = TcpStream::connect(address)?;
                stream.set_write_timeout(Some(WRITE))?;
                let _ = stream.write_all(bytes);
                Box::new(stream)
            }
        })
    }
}

/// Sends `rate` streams a second until it is over. Some begin as an honest one, some stay open.
fn attack(socket: &Socket, rate: u64, mut random: Random, over: &AtomicBool) {
    let begun = Instant::now();
    let mut held = VecDeque::new();
    let mut bytes = Vec::new();
    for count in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let due = begun + Duration::from_nanos(count * 1_000_000_000 / rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        bytes.clear();
        if random.below(2) == 0 {
            bytes.extend_from_slice(socket.prefix);
        }
        let length = random.below(LONGEST) * random.below(2);
        bytes.extend((0..length.div_ceil(8)).flat_map(|_| random.below(u64::MAX).to_le_bytes()));
        match socket.send(&bytes) {
            Ok(stream) => {
                socket.streams.fetch_add(1, Ordering::Relaxed);
                if random.below(16) == 0 {
                    held.push_back(stream);
                }
                if held.len() > HELD {
                    held.pop_front();
                }
            }
            Err(_) => {
                socket.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Asks as an honest client, and keeps the longest time between two answers.
fn be_served(
    socket: &Socket,
    mut ask: Box<dyn FnMut() -> Result<(), String> + Send + '_>,
    over: &AtomicBool,
) {
    let mut last = Instant::now();
    let mut said = 0;
    while !over.load(Ordering::Relaxed) {
        let answer = ask();
        socket.longest_wait.fetch_max(last.elapsed().as_millis() as u64, Ordering::Relaxed);
        match answer {
            Ok(()) => last = Instant::now(),
            Err(error) if said < 3 => {
                said += 1;
                eprintln!("{}: {error}", socket.name);
            }
            Err(_) => {}
        }
        std::thread::sleep(ASK);
    }
}

/// Whether the index has heard its publisher lately.
fn hears_publisher(index: SocketAddr) -> Result<(), String> {
    let text = get(index, "/sources", "")?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let answer: Value = serde_json::from_str(body).map_err(|error| format!("{error}: {text}"))?;
    let silent = answer["sources"][0]["silent_s"].as_f64();
    silent.is_some_and(|silent| silent < SILENT).then_some(()).ok_or(text)
}

fn worker_socket(options: &Options) -> PathBuf {
    options.dir.join("run").join("worker.sock")
}

fn worker_config(options: &Options) -> String {
    let more = format!(
        "workers = [\"{}\"]\n[device]\ncapacity = 16\n[host]\ncapacity = 32\n[policy]\nadmission = \"all\"\n\
         [offload.g1_g2]\nqueue_share = 1.0\n",
        worker_socket(options).display()
    );
    support::config_text(1, &more)
}

fn worker(options: &Options) -> Program {
    let file = options.dir.join("worker.toml");
    std::fs::write(&file, worker_config(options)).unwrap();
    let mut command = Command::new(&options.program);
    command.arg("worker").arg("--config").arg(file).args(["--rank", "0"]);
    let child = command.stdout(Stdio::null()).spawn().unwrap();
    wait_for(&worker_socket(options));
    Program("worker", child)
}

fn index_of(options: &Options, url: &str, address: SocketAddr) -> Program {
    let mut command = Command::new(&options.program);
    command.args(["events", "serve-index", url, "--listen", &address.to_string(), "--wait", "30"]);
    let child = command.stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < until, "the index does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    Program("index", child)
}

fn wait_for(socket: &Path) {
    let until = Instant::now() + PATIENCE;
    while !socket.exists() {
        assert!(Instant::now() < until, "nobody listens at {}", socket.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The leader of the worker: it loads the same blocks again and again.
struct HonestLeader {
    manager: KvBlockManager<Owned>,
    sequence: TokenSequence,
}

impl HonestLeader {
    fn start(options: &Options) -> Self {
        let config = Config::from_toml(&worker_config(options), "worker").expect("a configuration");
        let sequence = support::sequence(&config, 1, BLOCKS);
        let manager = KvBlockManager::<Owned>::builder().config(config).build().unwrap();
        let fresh = manager.allocate(BLOCKS).unwrap();
        drop(manager.register(manager.commit(fresh, &sequence, 0).unwrap().0).unwrap());
        assert!(manager.wait_offloads(Instant::now() + PATIENCE), "the worker copies nothing");
        Self { manager, sequence }
    }

    fn load(&self) -> Result<(), String> {
        self.manager.clear(Tier::G1).map_err(|error| error.to_string())?;
        let found = self.manager.onboard(self.manager.match_prefix(&self.sequence)).wait();
        match found {
            Ok(blocks) if blocks.len() == BLOCKS => Ok(()),
            Ok(blocks) => Err(format!("{} of {BLOCKS} blocks", blocks.len())),
            Err(error) => Err(error.to_string()),
        }
    }
}
