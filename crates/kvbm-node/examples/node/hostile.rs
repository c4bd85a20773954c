//! Strangers that send random bytes to every socket that listens, while honest clients are served.
//!
//! Four programs listen: `kvbm serve` (engines, administration over its socket and over TLS,
//! metrics, events over `ZeroMQ`), two `kvbm worker` (its leader, at a socket and over TLS), and
//! `kvbm events serve-index` (HTTP).
//! One thread for each socket connects so many times a second ([`crate::strangers`]). An honest
//! client of each socket asks all the time.
//!
//! The last line is JSON: `seconds, hangs, verified, wrong_bytes`, `sockets` (name, streams,
//! refused, `longest_wait_s` of its honest client, and `alerts`, the clients of TLS that were told
//! that their certificate will not do) and `processes` (name; resident memory, descriptors and
//! threads before, at most and behind the attack).

use crate::authority::Authority;
use crate::process::TestProcess;
use crate::sampling::Usage;
use crate::served::{Served, free_address, get};
use crate::strangers::{Address, CLIENT_HELLO, FRAME, GREETING, Socket, TlsStrangers, attack};
use crate::{Options, Random, support};
use kvbm::config::{Blocks, Config};
use kvbm::{KvBlockManager, Owned, Tier, TokenSequence};
use rcgen::CertifiedKey;
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An honest client asks so often.
const ASK: Duration = Duration::from_millis(250);
/// Time of the honest clients before the attack, and behind it: longer than any server waits for a
/// client.
const START: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(12);
const SAMPLE: Duration = Duration::from_millis(200);
/// Blocks that an honest leader loads.
const BLOCKS: usize = 8;
/// How often a worker's leader asks before another one comes and asks once.
const ASKS: u32 = 8;
/// Time for a process to listen.
const PATIENCE: Duration = Duration::from_secs(60);
/// An index that has received nothing for so long has lost its publisher: there is a heartbeat each
/// second.
const SILENT: f64 = 10.0;
const TOKEN: &str = "token-of-the-honest-client";

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
    programs: [Program; 3],
    engine: TestProcess,
    leaders: [HonestLeader; 2],
    dir: PathBuf,
    http: SocketAddr,
    index_address: SocketAddr,
    sockets: [Socket; 9],
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
                usage.most = usage.most.most_of_each(Usage::of(usage.id));
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
        let [http, events, replay, index_address, tls] = [(); 5].map(|()| free_address());
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
        let socket = options.dir.join("run").join("worker.sock");
        let (over_tls, strangers) = over_tls(&options.dir, tls);
        let configs = [worker_config(&socket.display().to_string(), ""), over_tls];
        let programs = [
            worker(options, "worker", &configs[0], || socket.exists()),
            worker(options, "worker_tls", &configs[1], || TcpStream::connect(tls).is_ok()),
            index_of(options, &url, index_address),
        ];
        let post = b"POST /v1/clear HTTP/1.1\r\ncontent-length: 900\r\n";
        let find = b"POST /find HTTP/1.1\r\ncontent-length: 900\r\n\r\n";
        let sockets = [
            Socket::new("daemon", Address::Unix(options.socket()), FRAME),
            Socket::new("admin", Address::Unix(served.admin.clone()), post),
            Socket::new("admin_tls", Address::Tcp(http), CLIENT_HELLO),
            Socket::new("metrics", Address::Tcp(served.metrics), b"GET /metrics HTTP/1.1\r\nhost: "),
            Socket::new("events", Address::Tcp(events), GREETING),
            Socket::new("replay", Address::Tcp(replay), GREETING),
            Socket::new("worker", Address::Unix(socket), FRAME),
            Socket::over_tls("worker_tls", tls, strangers),
            Socket::new("index", Address::Tcp(index_address), find),
        ];
        let engine = TestProcess::start("engine", options, "honest", options.seed);
        let leaders = configs.map(|config| HonestLeader::start(&config));
        let dir = options.dir.clone();
        Self { served, programs, engine, leaders, dir, http, index_address, sockets }
    }

    /// The honest client of each socket. Whoever follows the events is that of `events` and
    /// `replay`.
    fn asks(&self) -> [Ask<'_>; 9] {
        let mut last = 0;
        let engine = move || {
            let now = self.engine.progress.lock().unwrap().verified;
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
            Box::new(|| receives_from_publisher(self.index_address)),
            Box::new(|| receives_from_publisher(self.index_address)),
            Box::new(self.leaders[0].asks()),
            Box::new(self.leaders[1].asks()),
            Box::new(|| get(self.index_address, "/health", "").map(drop)),
        ]
    }

    fn usages(&self) -> Vec<Usages> {
        let served = ("serve", self.served.child.id());
        let others = self.programs.iter().map(|Program(name, child)| (*name, child.id()));
        let usages = |(name, id)| {
            let before = Usage::of(id);
            Usages { name, id, before, most: before, after: before }
        };
        others.chain([served]).map(usages).collect()
    }

    fn report(&self, options: &Options, usages: &[Usages]) -> ExitCode {
        let progress = self.engine.progress.lock().unwrap();
        let process = |usages: &Usages| {
            let Usages { name, before, most, after, .. } = usages;
            json!({
                "name": name,
                "rss_before_kib": before.rss_kib,
                "rss_most_kib": most.rss_kib,
                "rss_after_kib": after.rss_kib,
                "descriptors_before": before.descriptors,
                "descriptors_most": most.descriptors,
                "descriptors_after": after.descriptors,
                "threads_before": before.threads,
                "threads_most": most.threads,
                "threads_after": after.threads,
            })
        };
        let report = json!({
            "seconds": options.seconds,
            "verified": progress.verified,
            "wrong_bytes": progress.wrong,
            "hangs": progress.hangs,
            "sockets": self.sockets.iter().map(Socket::to_json).collect::<Vec<_>>(),
            "processes": usages.iter().map(process).collect::<Vec<_>>(),
        });
        println!("{report}");
        let is_well = progress.wrong == 0 && progress.hangs.is_empty() && progress.verified > 0;
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

/// Whether the index has received from its publisher lately.
fn receives_from_publisher(index: SocketAddr) -> Result<(), String> {
    let text = get(index, "/sources", "")?;
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let answer: Value = serde_json::from_str(body).map_err(|error| format!("{error}: {text}"))?;
    let silent = answer["sources"][0]["silent_s"].as_f64();
    silent.is_some_and(|silent| silent < SILENT).then_some(()).ok_or(text)
}

/// A worker and its leader, with its address and settings of its line.
fn worker_config(address: &str, line: &str) -> String {
    let more = format!(
        "workers = [\"{address}\"]\n{line}[device]\ncapacity = 16\n[host]\ncapacity = 32\n\
         [policy]\nadmission = \"all\"\n[offload.g1_g2]\nqueue_share = 1.0\n"
    );
    support::config_text(1, &more)
}

/// A worker that listens over TLS, and strangers for it: without a certificate, and with one of
/// another authority.
fn over_tls(dir: &Path, address: SocketAddr) -> (String, TlsStrangers) {
    let [ours, other] = ["ours", "other"].map(|name| Authority::new(dir, name));
    let (cert, key) = ours.issue("rank", |_| {});
    let foreign = other.issue("foreign", |_| {});
    let [cert, key, ca] = [&cert, &key, &ours.file()].map(|path| path.display().to_string());
    let line = format!("tls_cert = \"{cert}\"\ntls_key = \"{key}\"\ntls_ca = \"{ca}\"\n");
    (worker_config(&format!("tcp://{address}"), &line), TlsStrangers::new(&ours.file(), &foreign))
}

fn worker(options: &Options, name: &'static str, config: &str, listens: impl Fn() -> bool) -> Program {
    let file = options.dir.join(format!("{name}.toml"));
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(&options.program);
    command.arg("worker").arg("--config").arg(file).args(["--rank", "0"]);
    let child = command.stdout(Stdio::null()).spawn().unwrap();
    wait_for(name, listens);
    Program(name, child)
}

fn index_of(options: &Options, url: &str, address: SocketAddr) -> Program {
    let mut command = Command::new(&options.program);
    command.args(["events", "serve-index", url, "--listen", &address.to_string(), "--wait", "30"]);
    let child = command.stdout(Stdio::null()).spawn().unwrap();
    wait_for("index", || TcpStream::connect(address).is_ok());
    Program("index", child)
}

fn wait_for(name: &str, listens: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !listens() {
        assert!(Instant::now() < until, "{name} does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The leader of a worker: it loads the same blocks again and again.
struct HonestLeader {
    manager: KvBlockManager<Owned>,
    sequence: TokenSequence,
    /// Of another leader, which fits the worker in all but this.
    other: Config,
}

impl HonestLeader {
    fn start(config: &str) -> Self {
        let config = Config::from_toml(config, "worker").expect("a configuration");
        let mut other = config.clone();
        other.host.capacity = Blocks(31).into();
        let sequence = support::sequence(&config, 1, BLOCKS);
        let manager = KvBlockManager::<Owned>::builder().config(config).build().unwrap();
        let fresh = manager.allocate(BLOCKS).unwrap();
        drop(manager.register(manager.commit(fresh, &sequence, 0).unwrap().0).unwrap());
        assert!(manager.wait_offloads(Instant::now() + PATIENCE), "the worker copies nothing");
        Self { manager, sequence, other }
    }

    /// Loads, and now and then comes as a leader that the worker has not seen yet.
    fn asks(&self) -> impl FnMut() -> Result<(), String> + Send + '_ {
        let mut asked = 0;
        move || {
            asked += 1;
            if asked % ASKS == 0 {
                self.is_refused()?;
            }
            self.load()
        }
    }

    /// Whether the worker answers a leader whose settings differ.
    fn is_refused(&self) -> Result<(), String> {
        let built = KvBlockManager::<Owned>::builder().config(self.other.clone()).build();
        let error = built.err().map(|error| error.to_string()).unwrap_or_default();
        error.contains("blocks of G2 differs").then_some(()).ok_or(error)
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
