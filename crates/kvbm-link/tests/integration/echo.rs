//! A worker that answers every command with its bytes, and a leader that collects the answers.

use kvbm_link::{
    LeaderInfo, LeaderLine, LeaderTerms, LineSendError, LineTimes, MessageSender, ProcessState, Service,
    Session, SharedSetting, WorkerAddress, WorkerListener, WorkerNotice, WorkerTerms,
};
use kvbm_plan::{Epoch, Message, Rank, wire};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) const TIMES: LineTimes = LineTimes {
    heartbeat: Duration::from_millis(20),
    silent_after: Duration::from_millis(300),
    lost_after: Duration::from_secs(3),
    handshake: Duration::from_secs(2),
    reconnect: Duration::from_millis(20),
};

/// Longest time that anything here may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

fn settings() -> Vec<SharedSetting> {
    vec![SharedSetting { name: "blocks of G1".into(), value: "2".into() }]
}

pub(crate) fn leader_terms(epoch: u64) -> LeaderTerms {
    LeaderTerms {
        deployment: "test".into(),
        namespace: [1; 16],
        rank: Rank(0),
        ranks: 1,
        epoch: Epoch(epoch),
        settings: settings(),
    }
}

pub(crate) fn worker_terms() -> WorkerTerms {
    WorkerTerms { deployment: "test".into(), namespace: None, rank: Rank(0), ranks: 1, settings: settings() }
}

/// Says that it is ready, then sends every command back.
#[derive(Default)]
pub(crate) struct Echo {
    pub(crate) started: AtomicUsize,
    pub(crate) ended: Arc<AtomicUsize>,
}

struct EchoSession {
    out: MessageSender,
    ended: Arc<AtomicUsize>,
}

impl Service for Echo {
    fn start(&self, leader: &LeaderInfo, out: MessageSender) -> Result<Box<dyn Session>, String> {
        if leader.terms.epoch == Epoch(13) {
            return Err("the disk is in use".into());
        }
        self.started.fetch_add(1, Ordering::SeqCst);
        if leader.terms.epoch == Epoch(14) {
            return Ok(Box::new(EchoSession { out, ended: Arc::clone(&self.ended) }));
        }
        let ready = Message::Ready { rank: Rank(0), epoch: leader.terms.epoch, volumes: true };
        out.send(&wire::encode_message(&ready).unwrap());
        Ok(Box::new(EchoSession { out, ended: Arc::clone(&self.ended) }))
    }
}

impl Session for EchoSession {
    fn command(&mut self, bytes: &[u8]) -> Result<(), String> {
        if bytes == b"nonsense" {
            return Err("nonsense".into());
        }
        self.out.send(bytes);
        Ok(())
    }

    fn end(self: Box<Self>) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// A worker on a thread; it ends with this.
pub(crate) struct Worker {
    pub(crate) echo: Arc<Echo>,
    pub(crate) listener: Arc<WorkerListener>,
    stop: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(address: impl Into<WorkerAddress>) -> Self {
        Self::listen(address).0
    }

    /// Also where it listens: the port may be any.
    pub(crate) fn listen(address: impl Into<WorkerAddress>) -> (Self, WorkerAddress) {
        Self::with_times(address, TIMES)
    }

    pub(crate) fn with_times(address: impl Into<WorkerAddress>, times: LineTimes) -> (Self, WorkerAddress) {
        let listener = Arc::new(WorkerListener::bind(address, worker_terms(), times).unwrap());
        let bound = listener.address().clone();
        let (echo, stop) = (Arc::new(Echo::default()), Box::new(listener.stopper()));
        let service: Arc<dyn Service> = Arc::clone(&echo) as _;
        let serving = Arc::clone(&listener);
        let thread = Some(std::thread::spawn(move || serving.serve(&service)));
        (Self { echo, listener, stop, thread }, bound)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        (self.stop)();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A leader, and what came back to it.
pub(crate) struct Leader {
    pub(crate) line: LeaderLine,
    received: Arc<Mutex<Vec<Vec<u8>>>>,
    /// What became of each worker's process.
    pub(crate) ended: Arc<Mutex<Vec<ProcessState>>>,
    /// How long each worker that said it was about to end waits.
    pub(crate) leaves: Arc<Mutex<Vec<Duration>>>,
}

impl Leader {
    pub(crate) fn start(address: impl Into<WorkerAddress>, terms: LeaderTerms) -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&received);
        let ended = Arc::new(Mutex::new(Vec::new()));
        let leaves = Arc::new(Mutex::new(Vec::new()));
        let (ends, leaving) = (Arc::clone(&ended), Arc::clone(&leaves));
        let sink = move |bytes| sink.lock().unwrap().push(bytes);
        let notice = move |notice| match notice {
            WorkerNotice::Ended(state) => ends.lock().unwrap().push(state),
            WorkerNotice::Leaves(patience) => leaving.lock().unwrap().push(patience),
        };
        let line = LeaderLine::connect(address, terms, TIMES, sink, notice);
        Self { line: line.unwrap(), received, ended, leaves }
    }

    /// What came back, those that say that the worker is ready aside.
    pub(crate) fn echoes(&self) -> Vec<Vec<u8>> {
        let is_echo = |bytes: &&Vec<u8>| !matches!(wire::decode_message(bytes), Ok(Message::Ready { .. }));
        self.received.lock().unwrap().iter().filter(is_echo).cloned().collect()
    }

    /// Sends as soon as a worker is there.
    pub(crate) fn send(&self, bytes: &[u8]) {
        let sent = soon(|| match self.line.send(kvbm_link::Lane::Bulk, bytes) {
            Ok(()) => Some(()),
            Err(LineSendError::Closed { .. }) => None,
            Err(error) => panic!("{error}"),
        });
        assert!(sent.is_some(), "{:?}", self.line);
    }

    pub(crate) fn expect_echoes(&self, expected: &[&[u8]]) {
        soon(|| (self.echoes().len() >= expected.len()).then_some(()));
        assert_eq!(self.echoes(), expected);
    }
}

/// Asks again until there is an answer, for a while.
pub(crate) fn soon<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask() {
            Some(answer) => return Some(answer),
            None if Instant::now() > until => return None,
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
