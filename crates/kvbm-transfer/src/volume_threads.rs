//! Threads that call volumes. Each volume has a few of its own, so a volume whose calls never
//! return blocks no other.
//!
//! A thread starts when there is work for it and ends when it had none for a while. It runs where
//! the worker's threads do, not where the one does that had work for it: an engine's may keep to
//! one processor.

use crate::error::StartError;
use crate::hub::Hub;
use crate::threads::spawn;
use kvbm_plan::{Rank, VolumeId, deadline_after};
use kvbm_storage::Processors;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);

/// What all volume threads of a kind have in common.
pub(crate) struct ThreadLimits {
    pub(crate) hub: Arc<Hub>,
    pub(crate) rank: Rank,
    /// What they do.
    pub(crate) what: String,
    /// Threads of each volume, at most.
    pub(crate) threads: usize,
    /// Jobs of each volume that may wait.
    pub(crate) pending: usize,
}

/// The threads of all volumes that do one kind of work, and their queues. Dropped, they end after
/// what is queued; the hub waits for them.
pub(crate) struct VolumeThreads<J> {
    shared: Arc<Shared<J>>,
}

type Body = Box<dyn FnOnce() + Send>;
/// What becomes of a job that no thread takes, and why none does.
type Refuse<J> = Box<dyn Fn(VolumeId, J, &str) + Send + Sync>;
/// Starts a thread that does something.
type Spawn = Box<dyn Fn(&str, Body) -> Result<(), StartError> + Send + Sync>;

struct Shared<J> {
    terms: ThreadLimits,
    work: Box<dyn Fn(VolumeId, J) + Send + Sync>,
    refuse: Refuse<J>,
    spawn: Spawn,
    state: Mutex<GroupState<J>>,
}

struct GroupState<J> {
    /// Of volumes that have threads.
    volume_threads: BTreeMap<VolumeId, ThreadGroup<J>>,
    is_closed: bool,
}

struct ThreadGroup<J> {
    queue: VecDeque<J>,
    threads: usize,
    idle: usize,
    wake: Arc<Condvar>,
}

impl<J> Default for ThreadGroup<J> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), threads: 0, idle: 0, wake: Arc::default() }
    }
}

impl<J: Send + 'static> VolumeThreads<J> {
    /// Threads will run on the processors of the calling one. `work` is called by them, and does
    /// not panic; `refuse`, by senders, of each job that was taken and has no thread, with the
    /// reason: none could be started.
    pub(crate) fn new(
        terms: ThreadLimits,
        work: impl Fn(VolumeId, J) + Send + Sync + 'static,
        refuse: impl Fn(VolumeId, J, &str) + Send + Sync + 'static,
    ) -> Self {
        let rank = terms.rank;
        let processors = Processors::of_this_thread();
        Self::started_by(terms, work, refuse, move |what, body| {
            let processors = processors.clone();
            let body = move || {
                if let Some(Err(error)) = processors.map(|processors| processors.run_here()) {
                    tracing::warn!(%rank, %error, "a volume's thread runs where it was started");
                }
                body();
            };
            spawn(rank, what, body).map(drop)
        })
    }

    fn started_by(
        terms: ThreadLimits,
        work: impl Fn(VolumeId, J) + Send + Sync + 'static,
        refuse: impl Fn(VolumeId, J, &str) + Send + Sync + 'static,
        spawn: impl Fn(&str, Body) -> Result<(), StartError> + Send + Sync + 'static,
    ) -> Self {
        let state = Mutex::new(GroupState { volume_threads: BTreeMap::new(), is_closed: false });
        let (work, refuse, spawn) = (Box::new(work), Box::new(refuse), Box::new(spawn));
        Self { shared: Arc::new(Shared { terms, work, refuse, spawn, state }) }
    }

    /// Hands a job to a thread of `volume`, or gives it back because too many wait. The caller
    /// keeps the hub from ending meanwhile.
    pub(crate) fn send(&self, volume: VolumeId, job: J) -> Result<(), J> {
        let ThreadLimits { threads, pending, .. } = self.shared.terms;
        let mut state = self.shared.state.lock();
        let crew = state.volume_threads.entry(volume).or_default();
        if crew.queue.len() >= pending {
            return Err(job);
        }
        crew.queue.push_back(job);
        if crew.queue.len() <= crew.idle || crew.threads >= threads {
            crew.wake.notify_one();
            return Ok(());
        }
        crew.threads += 1;
        drop(state);
        self.start(volume);
        Ok(())
    }

    fn start(&self, volume: VolumeId) {
        let ThreadLimits { hub, what, .. } = &self.shared.terms;
        let (shared, alive) = (Arc::clone(&self.shared), hub.producer());
        let body = move || {
            shared.run(volume);
            drop(alive);
        };
        let Err(error) = (self.shared.spawn)(&format!("{what}-{volume}"), Box::new(body)) else { return };
        let mut state = self.shared.state.lock();
        let Some(crew) = state.volume_threads.get_mut(&volume) else { return };
        crew.threads -= 1;
        if crew.threads > 0 {
            tracing::warn!(%error, "a volume goes on with fewer threads");
            return;
        }
        // Others may have sent jobs to the thread that did not start.
        let jobs = state.volume_threads.remove(&volume).map(|crew| crew.queue).unwrap_or_default();
        drop(state);
        let reason = format!("no thread for volume {volume}: {error}");
        for job in jobs {
            (self.shared.refuse)(volume, job, &reason);
        }
    }

    /// Threads of `volume` that could take a job at once, started or not.
    pub(crate) fn ready(&self, volume: VolumeId) -> usize {
        let busy = self
            .shared
            .state
            .lock()
            .volume_threads
            .get(&volume)
            .map_or(0, |crew| (crew.threads + crew.queue.len()).saturating_sub(crew.idle));
        self.shared.terms.threads.saturating_sub(busy)
    }
}

impl<J> Drop for VolumeThreads<J> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        for crew in state.volume_threads.values() {
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
        let until = deadline_after(Instant::now(), IDLE);
        let mut state = self.state.lock();
        loop {
            let is_closed = state.is_closed;
            let crew = state.volume_threads.get_mut(&volume)?;
            if let Some(job) = crew.queue.pop_front() {
                return Some(job);
            }
            if is_closed || Instant::now() >= until {
                crew.threads -= 1;
                if crew.threads == 0 {
                    state.volume_threads.remove(&volume);
                }
                return None;
            }
            crew.idle += 1;
            let wake = Arc::clone(&crew.wake);
            let _timed_out = wake.wait_until(&mut state, until);
            if let Some(crew) = state.volume_threads.get_mut(&volume) {
                crew.idle -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{GroupLimits, Limits, PathLimits, State};
    use crossbeam_channel::unbounded;
    use kvbm_plan::Epoch;

    fn terms(what: &str) -> ThreadLimits {
        let limits = Limits {
            rank: Rank(0),
            epoch: Epoch(0),
            groups: vec![GroupLimits { slots: [0; 4], layers: 1 }],
            paths: std::array::from_fn(|_| Ok(PathLimits { plans: 1, blocks: 1 })),
            outgoing: 1,
        };
        let hub = Arc::new(Hub::new(State::new(limits), Default::default(), Arc::new(|_| {})));
        ThreadLimits { hub, rank: Rank(0), what: what.into(), threads: 1, pending: 8 }
    }

    /// Mutation that makes it fail: `VolumeThreads::new` lets threads run where they were started.
    #[test]
    fn threads_run_where_their_crews_were_made_whoever_has_work_for_them() {
        let here = Processors::of_this_thread().expect("the system says it");
        let (tell, told) = unbounded();
        let tell_where = move |_, ()| tell.send(Processors::of_this_thread()).expect("the test listens");
        let volume_threads =
            VolumeThreads::new(terms("probes"), tell_where, |_, (), reason| panic!("{reason}"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                here.first().run_here().expect("one of them");
                assert_eq!(volume_threads.send(VolumeId(3), ()), Ok(()));
            });
        });
        let there = told.recv_timeout(Duration::from_secs(60)).expect("a thread works");
        assert_eq!(there, Some(here));
    }

    /// Mutation that makes it fail: `VolumeThreads::start` refuses the job that came last.
    #[test]
    fn all_that_wait_for_a_thread_that_does_not_start_are_refused() {
        let terms = terms("probes");
        let (refused, refusals) = unbounded();
        let (starts, starting) = unbounded();
        let (fail, failing) = unbounded::<()>();
        let volume_threads = VolumeThreads::started_by(
            terms,
            |_, job: u32| panic!("nobody works on {job}"),
            move |volume, job, reason: &str| {
                assert!(reason.contains("no thread for volume 3"), "{reason}");
                refused.send((volume, job)).expect("the test listens");
            },
            move |name, _| {
                starts.send(()).expect("the test listens");
                failing.recv().expect("the test goes on");
                Err(StartError::Thread { name: name.into(), source: std::io::Error::other("planted") })
            },
        );
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(volume_threads.send(VolumeId(3), 1), Ok(())));
            starting.recv().expect("a thread starts");
            assert_eq!(volume_threads.send(VolumeId(3), 2), Ok(()), "it will have a thread");
            fail.send(()).expect("it waits");
        });
        let refusals: Vec<_> = refusals.try_iter().collect();
        assert_eq!(refusals, [(VolumeId(3), 1), (VolumeId(3), 2)]);
        assert_eq!(volume_threads.ready(VolumeId(3)), 1, "the next may try again");
    }
}
