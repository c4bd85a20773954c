//! The ranks: sending to their workers, which of them are there, requests to all of them, and what
//! they found on their disks.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `handshake` | whether workers speak this version, and take volumes | - |
//! | `recovery` | what the ranks found on their disks | - |
//! | `requests` | requests that wait for answers | - |

pub(crate) mod handshake;
pub(crate) mod recovery;
pub(crate) mod requests;

use crate::metrics::Metrics;
use crate::worker::{Lane, LinkError, WorkerLink};
use kvbm_plan::{Command, Failure, FailureKind, Rank, wire};
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// All ranks, as the leader sees them, and the links to their workers.
pub(crate) struct Ranks {
    each: Vec<RankLiveness>,
    links: OnceLock<Vec<Box<dyn WorkerLink>>>,
    /// How long a link may stay closed before the leader gives the rank up; 0 for ever.
    lost_after: Duration,
    /// Worker starts that were announced.
    announced: AtomicU64,
    metrics: Metrics,
}

/// A rank, as the manager sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// Whether it is given up ([`KvBlockManager::rank_lost`](crate::KvBlockManager::rank_lost),
    /// `transfer.rank_lost_after`): every transfer fails until its worker starts again.
    pub is_lost: bool,
    /// Plans that it has not answered.
    pub plans: usize,
}

#[derive(Default)]
struct RankLiveness {
    /// Given up: nothing is sent to it.
    lost: AtomicBool,
    contact: Mutex<Contact>,
}

/// What is known of a rank's worker.
#[derive(Clone, Copy, Default)]
pub(crate) struct Contact {
    /// When its link was found closed: nothing is sent before its worker has started again.
    pub(crate) closed: Option<Instant>,
    /// Handled starts of its workers, and the time of the last one.
    pub(crate) starts: u32,
    pub(crate) started: Option<Instant>,
    /// Number of its last announced start, counted over all ranks ([`Ranks::starts_announced`]).
    pub(crate) announced: u64,
    /// Announced starts that are not handled yet: what the worker before held still counts as
    /// there.
    waiting: u32,
}

/// The failure of what a rank owes after the leader has given it up.
pub(crate) fn given_up(rank: Rank) -> Failure {
    Failure::new(FailureKind::Io, format!("rank {rank} was given up: start its worker again"))
}

/// Which commands a command may overtake. Releases, flushes and what is said about volumes keep
/// their order among plans. A plan writes to a slot that was released before it, and a flush counts
/// what came before it.
fn lane(command: &Command) -> Lane {
    match command {
        Command::Transfer(plan) => Lane::Numbered(plan.plan_id.0),
        Command::Cancel { plan_id } => Lane::Behind(plan_id.0),
        Command::Advance { .. } => Lane::Urgent,
        Command::Release { .. } | Command::Forget { .. } | Command::Flush { .. } | Command::Volume { .. } => {
            Lane::Bulk
        }
    }
}

fn not_sent(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(FailureKind::Io, error.to_string())
}

impl Ranks {
    pub(crate) fn new(ranks: usize, metrics: Metrics, lost_after: Duration) -> Self {
        Self {
            each: (0..ranks).map(|_| RankLiveness::default()).collect(),
            links: OnceLock::new(),
            lost_after,
            announced: AtomicU64::new(0),
            metrics,
        }
    }

    /// Connects the workers, rank by rank. Once.
    pub(crate) fn connect(&self, links: Vec<Box<dyn WorkerLink>>) {
        let connected = self.links.set(links);
        debug_assert!(connected.is_ok(), "workers are connected once");
    }

    pub(crate) fn len(&self) -> usize {
        self.each.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Rank> + Clone + use<> {
        (0..self.each.len() as u16).map(Rank)
    }

    fn get(&self, rank: Rank) -> Option<&RankLiveness> {
        self.each.get(rank.index())
    }

    pub(crate) fn contact(&self, rank: Rank) -> Option<Contact> {
        self.get(rank).map(|state| *state.contact.lock())
    }

    /// Sends a command to every worker. The ranks that were not reached, each with the reason.
    pub(crate) fn broadcast(&self, command: &Command) -> Vec<(Rank, Failure)> {
        match wire::encode_command(command) {
            Ok(bytes) => {
                let send = |rank| self.send_bytes(rank, lane(command), &bytes);
                self.all().filter_map(|rank| send(rank).err().map(|failure| (rank, failure))).collect()
            }
            Err(error) => self.all().map(|rank| (rank, not_sent(&error))).collect(),
        }
    }

    /// Sends a command to one worker.
    pub(crate) fn send_to(&self, rank: Rank, command: &Command) -> Result<(), Failure> {
        let bytes = wire::encode_command(command).map_err(|error| not_sent(&error))?;
        self.send_bytes(rank, lane(command), &bytes)
    }

    fn send_bytes(&self, rank: Rank, lane: Lane, command: &[u8]) -> Result<(), Failure> {
        let starts = self.usable(rank)?;
        match self.links.get().and_then(|links| links.get(rank.index())) {
            Some(link) => {
                let sent = link.send(lane, command);
                if sent == Err(LinkError::Closed) {
                    self.found_closed(rank, starts);
                }
                sent.map_err(|error| not_sent(&error))
            }
            // Workers are connected before anything is sent.
            None => Ok(()),
        }
    }

    /// Tells a worker that is about to end that it may.
    pub(crate) fn dismiss(&self, rank: Rank) {
        if let Some(link) = self.links.get().and_then(|links| links.get(rank.index())) {
            link.dismiss();
        }
    }

    pub(crate) fn is_lost(&self, rank: Rank) -> bool {
        self.get(rank).is_some_and(|state| state.lost.load(Ordering::Acquire))
    }

    /// A worker announces that it has started; the start is handled later, in turn. What was sent
    /// before now went to the worker before it.
    pub(crate) fn start_announced(&self, rank: Rank) {
        if let Some(state) = self.get(rank) {
            let mut contact = state.contact.lock();
            contact.announced = self.announced.fetch_add(1, Ordering::AcqRel) + 1;
            contact.waiting += 1;
        }
    }

    /// An announced start is being handled.
    pub(crate) fn begin_start(&self, rank: Rank) -> StartInProgress<'_> {
        StartInProgress { ranks: self, rank, state: self.get(rank) }
    }

    /// Announced starts of all ranks.
    pub(crate) fn starts_announced(&self) -> u64 {
        self.announced.load(Ordering::Acquire)
    }

    /// Whether commands may be sent to a rank; then the number of its workers' handled starts. A
    /// new worker gets nothing before its start was handled: it would be sent to read what only the
    /// worker before had.
    fn usable(&self, rank: Rank) -> Result<u32, Failure> {
        let Some(state) = self.get(rank) else { return Ok(0) };
        if state.lost.load(Ordering::Acquire) {
            return Err(given_up(rank));
        }
        let contact = state.contact.lock();
        // The first worker of all replaced none.
        let is_new = contact.waiting > 0 && contact.starts > 0;
        if contact.closed.is_some() || is_new {
            return Err(Failure::new(FailureKind::Io, LinkError::Closed.to_string()));
        }
        Ok(contact.starts)
    }

    /// Why nothing may be sent to the first rank of which that is so.
    pub(crate) fn away(&self) -> Option<Failure> {
        self.all().find_map(|rank| self.usable(rank).err())
    }

    /// The worker of a rank has ended.
    pub(crate) fn closed(&self, rank: Rank) {
        if let Some(state) = self.get(rank) {
            state.contact.lock().closed.get_or_insert_with(kvbm_plan::clock::now);
        }
    }

    /// The link of a rank was closed when something was to be sent after so many starts.
    fn found_closed(&self, rank: Rank, starts: u32) {
        if let Some(state) = self.get(rank) {
            let mut contact = state.contact.lock();
            // Not the link of a worker that has started meanwhile.
            if contact.starts == starts {
                contact.closed.get_or_insert_with(kvbm_plan::clock::now);
            }
        }
    }

    /// Whether a rank's link has been closed for too long.
    pub(crate) fn stays_away(&self, contact: &Contact, now: Instant) -> bool {
        let closed = |since| now.saturating_duration_since(since) >= self.lost_after;
        !self.lost_after.is_zero() && contact.closed.is_some_and(closed)
    }

    /// Sends nothing to a rank any more, where `still` is true of what is known of it at this
    /// moment. Whether that was so.
    pub(crate) fn give_up(&self, rank: Rank, still: impl FnOnce(&Contact) -> bool) -> bool {
        let Some(state) = self.get(rank) else { return false };
        let contact = state.contact.lock();
        if !still(&contact) {
            return false;
        }
        if !state.lost.swap(true, Ordering::AcqRel)
            && let Some(metrics) = self.metrics.ranks().get(rank.index())
        {
            metrics.losses.add(1);
            metrics.lost.set(1);
        }
        true
    }
}

/// The handling of an announced start. Where it fails, the worker is not taken in: its link counts
/// as closed until another worker starts or the leader gives the rank up.
pub(crate) struct StartInProgress<'a> {
    ranks: &'a Ranks,
    rank: Rank,
    state: Option<&'a RankLiveness>,
}

impl StartInProgress<'_> {
    /// Commands go to the worker from now on.
    pub(crate) fn done(mut self) {
        if let Some(state) = self.state.take() {
            let mut contact = state.contact.lock();
            // In one step: a first worker whose start counts and still waits would pass for a
            // replacement.
            contact.starts += 1;
            contact.started = Some(kvbm_plan::clock::now());
            contact.waiting = contact.waiting.saturating_sub(1);
            contact.closed = None;
            state.lost.store(false, Ordering::Release);
        }
        if let Some(metrics) = self.ranks.metrics.ranks().get(self.rank.index()) {
            metrics.lost.set(0);
        }
    }
}

impl Drop for StartInProgress<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.state {
            let mut contact = state.contact.lock();
            contact.waiting = contact.waiting.saturating_sub(1);
            contact.closed.get_or_insert_with(kvbm_plan::clock::now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: Rank = Rank(1);

    fn started(ranks: &Ranks) {
        ranks.begin_start(RANK).done();
    }

    #[test]
    fn the_first_worker_is_never_taken_for_another_ones_successor() {
        for _ in 0..100 {
            let ranks = Ranks::new(2, Metrics::new(), Duration::ZERO);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    ranks.start_announced(RANK);
                    started(&ranks);
                });
                while ranks.usable(RANK).expect("there is no other") == 0 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn nothing_is_sent_to_a_new_worker_before_its_start_was_handled() {
        let ranks = Ranks::new(2, Metrics::new(), Duration::ZERO);
        assert_eq!(ranks.usable(RANK), Ok(0));
        ranks.start_announced(RANK);
        assert_eq!(ranks.usable(RANK), Ok(0), "the first one took nobody's place");
        started(&ranks);
        assert_eq!(ranks.usable(RANK), Ok(1));
        for starts in 2..4 {
            ranks.start_announced(RANK);
            assert!(ranks.usable(RANK).is_err() && ranks.usable(Rank(0)).is_ok());
            started(&ranks);
            assert_eq!(ranks.usable(RANK), Ok(starts));
        }
        // Two in a row, of which the second has its turn later.
        ranks.start_announced(RANK);
        ranks.start_announced(RANK);
        started(&ranks);
        assert!(ranks.usable(RANK).is_err());
        started(&ranks);
        ranks.found_closed(RANK, 5);
        assert!(ranks.usable(RANK).is_err());
        assert!(ranks.usable(Rank(7)).is_ok(), "no such rank: nothing is sent");
    }

    #[test]
    fn control_overtakes_plans_and_a_cancel_stays_behind_its_own() {
        let (plan_id, blocks) = (kvbm_plan::PlanId(7), Vec::new());
        assert_eq!(lane(&Command::Cancel { plan_id }), Lane::Behind(7));
        assert_eq!(lane(&Command::Advance { iteration: 1, layer: None }), Lane::Urgent);
        assert_eq!(lane(&Command::Release { tier: kvbm_plan::Tier::G3, blocks }), Lane::Bulk);
        assert_eq!(lane(&Command::Flush { token: 1 }), Lane::Bulk, "it counts what came before it");
    }

    #[test]
    fn a_start_whose_handling_failed_closes_the_line_until_the_next_one() {
        let ranks = Ranks::new(2, Metrics::new(), Duration::from_secs(9));
        for starts in 1..4 {
            ranks.start_announced(RANK);
            drop(ranks.begin_start(RANK));
            assert!(ranks.usable(RANK).is_err(), "that worker may be told to read what it never had");
            let contact = ranks.contact(RANK).expect("there");
            assert!(
                ranks.stays_away(&contact, Instant::now() + Duration::from_secs(10)),
                "it can be given up"
            );
            ranks.start_announced(RANK);
            started(&ranks);
            assert_eq!(ranks.usable(RANK), Ok(starts));
        }
    }
}
