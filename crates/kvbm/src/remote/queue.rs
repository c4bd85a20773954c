//! Prefixes that wait to be read from peers: bounded, and no peer has more than its share of the
//! threads.

use super::fetch::Fetch;
use kvbm_plan::{BlockIdentity, GroupId, NodeId, SequenceHash};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most prefixes that wait.
const MAX_WAITING: usize = 256;
/// How often prefixes that wait for their peer are looked at: some may be late.
const TICK: Duration = Duration::from_millis(10);

/// A prefix to be read.
pub(super) struct Job {
    pub(super) fetch: Arc<Fetch>,
    /// Who is asked first.
    pub(super) node: NodeId,
    /// The cache group of all blocks.
    pub(super) group: GroupId,
    /// The first block of the chain.
    pub(super) first: SequenceHash,
    /// Where the group needs every block, all of the prefix from the first block of its chain. Else
    /// those that are at the peer.
    pub(super) identities: Vec<BlockIdentity>,
    pub(super) deadline: Instant,
}

/// See the module.
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    per_peer: usize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    reading: HashMap<NodeId, usize>,
    is_closed: bool,
}

/// A read of one peer. Dropped, another may begin.
pub(super) struct Turn<'a> {
    queue: &'a Queue,
    node: NodeId,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        if let Some(reading) = state.reading.get_mut(&self.node) {
            *reading -= 1;
            if *reading == 0 {
                state.reading.remove(&self.node);
            }
        }
        drop(state);
        self.queue.changed.notify_all();
    }
}

impl Queue {
    pub(super) fn new(per_peer: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), per_peer }
    }

    /// Gives a job back that finds no room.
    pub(super) fn push(&self, job: Job) -> Result<(), Job> {
        let mut state = self.state.lock();
        if state.is_closed || state.waiting.len() >= MAX_WAITING {
            return Err(job);
        }
        state.waiting.push_back(job);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// The first job whose peer has a turn left, with that turn, or that is late, without one. None
    /// when the queue is closed.
    pub(super) fn next(&self) -> Option<(Job, Option<Turn<'_>>)> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let now = kvbm_plan::clock::now();
            let is_free = |node: NodeId| state.reading.get(&node).is_none_or(|read| *read < self.per_peer);
            let ready = state.waiting.iter().position(|job| now >= job.deadline || is_free(job.node));
            if let Some(job) = ready.and_then(|at| state.waiting.remove(at)) {
                let turn = (now < job.deadline).then(|| self.begin(&mut state, job.node));
                return Some((job, turn));
            }
            if state.waiting.is_empty() {
                self.changed.wait(&mut state);
            } else {
                self.changed.wait_for(&mut state, TICK);
            }
        }
    }

    fn begin(&self, state: &mut State, node: NodeId) -> Turn<'_> {
        *state.reading.entry(node).or_default() += 1;
        Turn { queue: self, node }
    }

    /// A turn at another peer, if it has one left.
    pub(super) fn turn(&self, node: NodeId) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        let is_free = state.reading.get(&node).is_none_or(|read| *read < self.per_peer);
        is_free.then(|| self.begin(&mut state, node))
    }

    pub(super) fn reading(&self, node: NodeId) -> usize {
        self.state.lock().reading.get(&node).copied().unwrap_or(0)
    }

    /// Nothing is read any more: the jobs that wait are given back.
    pub(super) fn close(&self) -> Vec<Job> {
        let mut state = self.state.lock();
        state.is_closed = true;
        let left = state.waiting.drain(..).collect();
        drop(state);
        self.changed.notify_all();
        left
    }
}

#[cfg(test)]
mod tests {
    use super::super::Fetching;
    use super::*;

    fn job(node: u32, deadline: Instant) -> (Fetching, Job) {
        let fetching = Fetching::new(Box::new(|| None));
        let job = Job {
            fetch: fetching.share(),
            node: NodeId(node),
            group: GroupId(0),
            first: SequenceHash::from_bytes([0; 16]),
            identities: Vec::new(),
            deadline,
        };
        (fetching, job)
    }

    #[test]
    fn a_peer_has_its_share_and_the_others_go_on() {
        let queue = Queue::new(1);
        let later = Instant::now() + Duration::from_secs(60);
        let jobs: Vec<_> = [1, 1, 2].map(|node| job(node, later)).into();
        let mut shares = Vec::new();
        for (share, job) in jobs {
            shares.push(share);
            assert!(queue.push(job).is_ok());
        }
        let (first, turn) = queue.next().expect("a job");
        assert_eq!(first.node, NodeId(1));
        let (second, _turn) = queue.next().expect("a job of another peer");
        assert_eq!(second.node, NodeId(2));
        assert!(queue.turn(NodeId(1)).is_none() && queue.reading(NodeId(1)) == 1);
        drop(turn);
        assert_eq!(queue.next().expect("its turn").0.node, NodeId(1));
    }

    #[test]
    fn what_is_late_waits_for_no_turn_and_what_is_too_much_is_given_back() {
        let queue = Queue::new(1);
        let now = Instant::now();
        let _turn = queue.turn(NodeId(1)).expect("free");
        let (_share, late) = job(1, now);
        assert!(queue.push(late).is_ok());
        assert!(queue.next().expect("late").1.is_none());
        let mut shares = Vec::new();
        for _ in 0..MAX_WAITING {
            let (share, job) = job(1, now);
            shares.push(share);
            assert!(queue.push(job).is_ok());
        }
        assert!(queue.push(job(1, now).1).is_err());
        assert_eq!(queue.close().len(), MAX_WAITING);
        assert!(queue.next().is_none() && queue.push(job(2, now).1).is_err());
    }
}
