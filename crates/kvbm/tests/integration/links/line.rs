//! A line to the worker of one rank, of either kind, that can be cut.

use super::Kind;
use super::fault::{Fate, Fault, Faults, Waiting};
use super::relay::Relay;
use crate::support::soon;
use crate::support::store::namespace_tag;
use kvbm::config::Config;
use kvbm::disk::OpenError;
use kvbm::plan::{Epoch, Message, wire};
use kvbm::socket_link::{LineStatus, SocketLink, leader_terms};
use kvbm::storage::BoundLayout;
use kvbm::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm::{BlockId, FinishedPlan, G1Memory, Rank, Worker, WorkerError, WorkerServer};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long something late waits.
const DELAY: Duration = Duration::from_millis(3);

/// See the module.
pub(super) struct Line {
    faults: Arc<Faults>,
    waiting: Mutex<Waiting>,
    end: End,
    cut: Mutex<Sender<()>>,
    /// Cuts that are over.
    cuts: AtomicU64,
}

/// The other end.
enum End {
    InProcess(Box<LocalEnd>),
    Socket(SocketEnd),
}

/// A worker that is started anew when its line is cut.
struct LocalEnd {
    config: Config,
    memory: BoundLayout,
    rank: (Rank, Epoch),
    sink: MessageSink,
    /// Number of the worker that the line leads to, and whether it has said that it is ready.
    life: Arc<AtomicU64>,
    open: Arc<AtomicBool>,
    now: Mutex<Option<(Worker, Box<dyn WorkerLink>)>>,
}

/// A worker behind a socket, and a relay between it and the leader.
struct SocketEnd {
    link: SocketLink,
    relay: Arc<Relay>,
    server: Arc<WorkerServer>,
    stop: Box<dyn Fn() + Send + Sync>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct FaultyLink(Arc<Line>);

/// The leader's link over a line.
pub(super) fn link(line: &Arc<Line>) -> Box<dyn WorkerLink> {
    Box::new(FaultyLink(Arc::clone(line)))
}

impl Line {
    pub(super) fn new(
        kind: Kind,
        fault: Fault,
        config: &Config,
        memory: BoundLayout,
        (rank, epoch): (Rank, Epoch),
        sink: MessageSink,
        folder: &Path,
    ) -> Arc<Self> {
        let faults = Arc::new(Faults::new(fault));
        let (cut, cuts) = channel();
        let sink = faulty_sink(Arc::clone(&faults), sink, cut.clone());
        let end = match kind {
            Kind::InProcess => End::InProcess(Box::new(LocalEnd::new(config, memory, (rank, epoch), sink))),
            Kind::Socket | Kind::Tls => {
                let terms = leader_terms(config, memory.num_blocks(), namespace_tag(), rank, epoch);
                let folder = folder.join(format!("run-{rank}-{}", epoch.0));
                std::fs::create_dir(&folder).unwrap();
                let at = if kind == Kind::Tls { "tcp://127.0.0.1:0".into() } else { folder.join("worker") };
                let server = WorkerServer::bind(config, rank, &G1Memory::EngineHost(memory), &at);
                let server = Arc::new(server.unwrap());
                let relay = Relay::start(server.address(), &folder);
                let (stop, serving) = (Box::new(server.stopper()), Arc::clone(&server));
                let threads = Mutex::new(vec![std::thread::spawn(move || serving.serve()), relay.1]);
                let link = SocketLink::connect(relay.0.address().clone(), terms, sink, |_| {}).unwrap();
                End::Socket(SocketEnd { link, relay: relay.0, server, stop, threads })
            }
        };
        let waiting = Mutex::default();
        let line = Self { faults, waiting, end, cut: Mutex::new(cut), cuts: AtomicU64::new(0) };
        let line = Arc::new(line);
        line.watch(cuts);
        line
    }

    /// Cuts the line when somebody asks for it; forwards what is late.
    fn watch(self: &Arc<Self>, cuts: Receiver<()>) {
        let line = Arc::downgrade(self);
        std::thread::spawn(move || {
            loop {
                let asked = cuts.recv_timeout(DELAY);
                let Some(line) = line.upgrade() else { return };
                if asked.is_ok() {
                    match &line.end {
                        End::InProcess(end) => end.start_again(),
                        End::Socket(end) => end.relay.cut(),
                    }
                    line.cuts.fetch_add(1, Ordering::AcqRel);
                }
                let late = line.waiting.lock().unwrap().next();
                if let Some((lane, command)) = late {
                    // The leader was told that it is sent: only a line that ends loses it.
                    line.forward(lane, &command).unwrap();
                }
            }
        });
    }

    fn forward(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        match &self.end {
            End::InProcess(end) => end.send(lane, command),
            End::Socket(end) => end.link.send(lane, command),
        }
    }

    fn is_open(&self) -> bool {
        match &self.end {
            End::InProcess(end) => end.open.load(Ordering::Acquire),
            End::Socket(end) => matches!(end.link.status(), LineStatus::Connected { is_open: true, .. }),
        }
    }

    /// The manager is built: waits until commands reach the worker.
    pub(super) fn started(&self) {
        let until = soon();
        while !self.is_open() {
            assert!(Instant::now() < until, "the worker is ready");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.faults.started();
    }

    /// No faults from now on. A line that has lost something is cut.
    pub(super) fn mend(&self) {
        self.faults.mend();
        if self.faults.has_lost() {
            self.faults.ask_cut();
            self.cut.lock().unwrap().send(()).unwrap();
        }
        let until = soon();
        while self.cuts.load(Ordering::Acquire) < self.faults.cuts_asked() || !self.is_open() {
            assert!(Instant::now() < until, "the line is cut, and open again");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// No plan of the worker touches these blocks of G1.
    pub(super) fn wait_idle(&self, blocks: &[BlockId]) {
        match &self.end {
            End::InProcess(end) => end.now.lock().unwrap().as_ref().unwrap().0.wait_idle(blocks, soon()),
            End::Socket(end) => end.server.wait_idle(blocks, soon()),
        }
        .unwrap();
    }

    pub(super) fn drain_finished(&self) -> Vec<FinishedPlan> {
        match &self.end {
            End::InProcess(end) => end.now.lock().unwrap().as_ref().unwrap().0.drain_finished(),
            End::Socket(end) => end.server.drain_finished(),
        }
    }

    /// Commands and messages so far.
    pub(super) fn events(&self) -> usize {
        self.faults.seen()
    }
}

impl WorkerLink for FaultyLink {
    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let Self(line) = self;
        match line.faults.fate(true) {
            Fate::Passes => line.forward(lane, command),
            Fate::Twice => line.forward(lane, command).and_then(|()| line.forward(lane, command)),
            Fate::Late => {
                line.waiting.lock().unwrap().add(lane, command.to_vec());
                Ok(())
            }
            Fate::Lost => Ok(()),
            Fate::Cut => {
                line.cut.lock().unwrap().send(()).unwrap();
                Ok(())
            }
        }
    }
}

fn faulty_sink(faults: Arc<Faults>, sink: MessageSink, cut: Sender<()>) -> MessageSink {
    let cut = Mutex::new(cut);
    Arc::new(move |message: Vec<u8>| match faults.fate(false) {
        Fate::Passes => sink(message),
        Fate::Twice => {
            sink(message.clone());
            sink(message);
        }
        Fate::Late => {
            std::thread::sleep(DELAY);
            sink(message);
        }
        Fate::Lost => {}
        Fate::Cut => {
            sink(message);
            // The line's owner may be gone.
            let _gone = cut.lock().unwrap().send(());
        }
    })
}

impl LocalEnd {
    fn new(config: &Config, memory: BoundLayout, rank: (Rank, Epoch), sink: MessageSink) -> Self {
        let (life, open) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let now = Mutex::new(None);
        let end = Self { config: config.clone(), memory, rank, sink, life, open, now };
        end.start();
        end
    }

    fn start(&self) {
        let life = self.life.load(Ordering::Acquire);
        let (now, open, sink) = (Arc::clone(&self.life), Arc::clone(&self.open), Arc::clone(&self.sink));
        let connected = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&connected);
        let ours: MessageSink = Arc::new(move |message: Vec<u8>| {
            // A line leads to a worker before that worker says anything.
            while !gate.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
            if now.load(Ordering::Acquire) == life {
                let ready = matches!(wire::decode_message(&message), Ok(Message::Ready { .. }));
                open.fetch_or(ready, Ordering::AcqRel);
                sink(message);
            }
        });
        let (rank, epoch) = self.rank;
        let memory = G1Memory::EngineHost(self.memory.clone());
        let start = || Worker::start(&self.config, rank, &memory, epoch, namespace_tag(), Arc::clone(&ours));
        let (until, mut worker) = (soon(), start());
        // A thread of the worker before may keep the folder for a moment.
        while matches!(&worker, Err(WorkerError::Disk { source: OpenError::Busy { .. }, .. })) {
            assert!(Instant::now() < until, "the disk is closed");
            worker = start();
        }
        let worker = worker.unwrap();
        let link = worker.link();
        *self.now.lock().unwrap() = Some((worker, link));
        connected.store(true, Ordering::Release);
    }

    fn start_again(&self) {
        self.open.store(false, Ordering::Release);
        self.life.fetch_add(1, Ordering::AcqRel);
        // Dropped without the lock: its last messages are still looked at.
        let old = self.now.lock().unwrap().take();
        drop(old);
        self.start();
    }

    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let now = self.now.lock().unwrap();
        let is_open = |_: &&(Worker, Box<dyn WorkerLink>)| self.open.load(Ordering::Acquire);
        now.as_ref().filter(is_open).ok_or(LinkError::Closed)?.1.send(lane, command)
    }
}

impl Drop for SocketEnd {
    fn drop(&mut self) {
        (self.stop)();
        self.relay.end();
        for thread in self.threads.lock().unwrap().drain(..) {
            thread.join().unwrap();
        }
    }
}
