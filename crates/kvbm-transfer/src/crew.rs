//! Threads that wait for volumes. Each volume has a few of its own, so that one whose calls never return keeps nobody else's.
//!
//! A thread starts when there is work for it and ends when it had none for a while.

use crate::hub::Hub;
use crate::start::spawn;
use kvbm_plan::{Rank, VolumeId};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);

/// What all crews of a kind have in common.
pub(crate) struct Terms {
    pub(crate) hub: Arc<Hub>,
    pub(crate) rank: Rank,
    /// What they do.
    pub(crate) what: String,
    /// Threads of each volume, at most.
    pub(crate) threads: usize,
    /// Jobs of each volume that may wait.
    pub(crate) pending: usize,
}

/// The threads of all volumes that do one kind of work, and their queues. Dropped, they end after what is queued; the hub waits for them.
pub(crate) struct Crews<J> {
    shared: Arc<Shared<J>>,
}

/// Why a job was not taken; it comes back.
pub(crate) enum Refused<J> {
    /// Too many wait.
    Full(J),
    /// The volume has no thread, and none could be started.
    NoThread(J, String),
}

struct Shared<J> {
    terms: Terms,
    work: Box<dyn Fn(VolumeId, J) + Send + Sync>,
    state: Mutex<State<J>>,
}

struct State<J> {
    /// Of volumes that have threads.
    crews: BTreeMap<VolumeId, Crew<J>>,
    is_closed: bool,
}

struct Crew<J> {
    queue: VecDeque<J>,
    threads: usize,
    idle: usize,
    wake: Arc<Condvar>,
}

impl<J> Default for Crew<J> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), threads: 0, idle: 0, wake: Arc::default() }
    }
}

impl<J: Send + 'static> Crews<J> {
    /// `work` is called by the threads, and does not panic.
    pub(crate) fn new(terms: Terms, work: impl Fn(VolumeId, J) + Send + Sync + 'static) -> Self {
        let state = Mutex::new(State { crews: BTreeMap::new(), is_closed: false });
        Self { shared: Arc::new(Shared { terms, work: Box::new(work), state }) }
    }

    /// Hands a job to a thread of `volume`. The caller keeps the hub from ending meanwhile.
    pub(crate) fn send(&self, volume: VolumeId, job: J) -> Result<(), Refused<J>> {
        let Terms { threads, pending, .. } = self.shared.terms;
        let mut state = self.shared.state.lock();
        let crew = state.crews.entry(volume).or_default();
        if crew.queue.len() >= pending {
            return Err(Refused::Full(job));
        }
        crew.queue.push_back(job);
        if crew.queue.len() <= crew.idle || crew.threads >= threads {
            crew.wake.notify_one();
            return Ok(());
        }
        crew.threads += 1;
        drop(state);
        self.start(volume)
    }

    fn start(&self, volume: VolumeId) -> Result<(), Refused<J>> {
        let Terms { hub, rank, what, .. } = &self.shared.terms;
        let (shared, alive) = (Arc::clone(&self.shared), hub.producer());
        let body = move || {
            shared.run(volume);
            drop(alive);
        };
        let Err(error) = spawn(*rank, &format!("{what}-{volume}"), body) else { return Ok(()) };
        let mut state = self.shared.state.lock();
        let Some(crew) = state.crews.get_mut(&volume) else { return Ok(()) };
        crew.threads -= 1;
        if crew.threads > 0 {
            tracing::warn!(%error, "a volume goes on with fewer threads");
            return Ok(());
        }
        let job = state.crews.remove(&volume).and_then(|mut crew| crew.queue.pop_back());
        drop(state);
        job.map_or(Ok(()), |job| Err(Refused::NoThread(job, error.to_string())))
    }

    /// Threads of `volume` that could take a job at once, started or not.
    pub(crate) fn ready(&self, volume: VolumeId) -> usize {
        let busy = self
            .shared
            .state
            .lock()
            .crews
            .get(&volume)
            .map_or(0, |crew| (crew.threads + crew.queue.len()).saturating_sub(crew.idle));
        self.shared.terms.threads.saturating_sub(busy)
    }
}

impl<J> Drop for Crews<J> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        for crew in state.crews.values() {
            crew.wake.notify_all();
        }
    }
}

impl<J> Shared<J> {
    /// The life of a thread.
    fn run(&self, volume: VolumeId) {
        while let Some(job) = self.next(volume) {
            let _call = self.terms.hub.call(&self.terms.what, volume);
            (self.work)(volume, job);
        }
    }

    /// The next job; none when the thread is to end, and has left its crew.
    fn next(&self, volume: VolumeId) -> Option<J> {
        let until = Instant::now() + IDLE;
        let mut state = self.state.lock();
        loop {
            let is_closed = state.is_closed;
            let crew = state.crews.get_mut(&volume)?;
            if let Some(job) = crew.queue.pop_front() {
                return Some(job);
            }
            if is_closed || Instant::now() >= until {
                crew.threads -= 1;
                if crew.threads == 0 {
                    state.crews.remove(&volume);
                }
                return None;
            }
            crew.idle += 1;
            let wake = Arc::clone(&crew.wake);
            let _timed_out = wake.wait_until(&mut state, until);
            if let Some(crew) = state.crews.get_mut(&volume) {
                crew.idle -= 1;
            }
        }
    }
}
