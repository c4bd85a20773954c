//! Ranks that go away and come back: what becomes of the transfers that they owe, and of blocks that are whole no more.

use super::answers::Item;
use super::operation::PlanPart;
use super::removals::Missed;
use super::{Leader, given_up};
use crate::status::RankStatus;
use crate::worker::LinkError;
use kvbm_plan::{Failure, FailureKind, FlushOutcome, Path, PlanId, Rank, Tier, VolumeAnswer};
use kvbm_pool::{Losses, Lost};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// All ranks, as the leader sees them.
pub(crate) struct Ranks {
    pub(super) each: Vec<State>,
    /// How long a rank may stay away until it is given up; 0 for ever.
    lost_after: Duration,
    /// Starts of workers that were handed over.
    told: AtomicU64,
}

pub(super) struct State {
    /// Given up: nothing is sent to it.
    lost: AtomicBool,
    contact: Mutex<Contact>,
    pub(super) missed: Mutex<Missed>,
}

#[derive(Clone, Copy, Default)]
struct Contact {
    /// Since when its line is closed: nothing is sent before its worker has started again.
    closed: Option<Instant>,
    /// How often a worker of it has started, as far as that was handled, and when the last one had.
    starts: u32,
    started: Option<Instant>,
    /// Number of the last start that was handed over, of all ranks' ([`Ranks::starts_told`]).
    told: u64,
    /// Starts that were handed over and are not handled yet: what the one before held still counts as there.
    waiting: u32,
}

impl Ranks {
    pub(super) fn new(ranks: usize, lost_after: Duration) -> Self {
        let state =
            |_| State { lost: AtomicBool::new(false), contact: Mutex::default(), missed: Mutex::default() };
        Self { each: (0..ranks).map(state).collect(), lost_after, told: AtomicU64::new(0) }
    }

    pub(super) fn get(&self, rank: Rank) -> Option<&State> {
        self.each.get(rank.index())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.each.len() as u16).map(Rank)
    }

    pub(super) fn is_lost(&self, rank: Rank) -> bool {
        self.get(rank).is_some_and(|state| state.lost.load(Ordering::Acquire))
    }

    /// A worker of the rank hands over that it has started, which is handled later, in turn: what was sent before now is not its.
    pub(super) fn start_is_told(&self, rank: Rank) {
        if let Some(state) = self.get(rank) {
            let mut contact = state.contact.lock();
            contact.told = self.told.fetch_add(1, Ordering::AcqRel) + 1;
            contact.waiting += 1;
        }
    }

    /// A start that was handed over has its turn.
    fn turn(&self, rank: Rank) -> Turn<'_> {
        Turn(self.get(rank))
    }

    /// How many starts were handed over, of all ranks.
    pub(crate) fn starts_told(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    /// Whether something may be sent to a rank: then how often a worker of it has started. Not to a new worker before its start was handled:
    /// what it would be told to read is what the one before had.
    pub(super) fn line(&self, rank: Rank) -> Result<u32, Failure> {
        let Some(state) = self.get(rank) else { return Ok(0) };
        if state.lost.load(Ordering::Acquire) {
            return Err(given_up(rank));
        }
        let contact = state.contact.lock();
        // The first worker of all took nobody's place.
        let is_new = contact.waiting > 0 && contact.starts > 0;
        if contact.closed.is_some() || is_new {
            return Err(Failure::new(FailureKind::Io, LinkError::Closed.to_string()));
        }
        Ok(contact.starts)
    }

    /// Why nothing may be sent to the first rank of which that is so.
    pub(crate) fn away(&self) -> Option<Failure> {
        self.all().find_map(|rank| self.line(rank).err())
    }

    /// The line of a rank was closed when something was to be sent after so many starts.
    pub(super) fn found_closed(&self, rank: Rank, starts: u32) {
        if let Some(state) = self.get(rank) {
            let mut contact = state.contact.lock();
            // Not that of a worker which has started meanwhile.
            if contact.starts == starts {
                contact.closed.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Whether a rank's line has been closed for too long.
    fn stays_away(&self, contact: &Contact, now: Instant) -> bool {
        let closed = |since| now.saturating_duration_since(since) >= self.lost_after;
        !self.lost_after.is_zero() && contact.closed.is_some_and(closed)
    }
}

/// A start that is being handled. Where that fails, its worker is not taken in: the line counts as closed, until another one starts or the
/// rank is given up.
struct Turn<'a>(Option<&'a State>);

impl Turn<'_> {
    /// Its worker is sent what the leader wants of it.
    fn handled(mut self) {
        if let Some(state) = self.0.take() {
            let mut contact = state.contact.lock();
            // At once: a first worker that counted and still waited would pass for one that took another's place.
            contact.starts += 1;
            contact.started = Some(Instant::now());
            contact.waiting = contact.waiting.saturating_sub(1);
            contact.closed = None;
            state.lost.store(false, Ordering::Release);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.0 {
            let mut contact = state.contact.lock();
            contact.waiting = contact.waiting.saturating_sub(1);
            contact.closed.get_or_insert_with(Instant::now);
        }
    }
}

impl Leader {
    /// Gives up on a rank: what it owes fails, nothing is sent to it until its worker says that it has started, and what would need its part
    /// of a block is found no more. Plans that it owed.
    pub(crate) fn rank_lost(self: &Arc<Self>, rank: Rank) -> usize {
        self.give_up(rank, |_| true)
    }

    /// The same, where `still` is true of what is known of the rank at that moment.
    fn give_up(self: &Arc<Self>, rank: Rank, still: impl FnOnce(&Contact) -> bool) -> usize {
        let Some(state) = self.ranks.get(rank) else { return 0 };
        // No worker of the rank is taken in meanwhile.
        let order = self.disk_order.lock();
        let owed = {
            let contact = state.contact.lock();
            if !still(&contact) {
                return 0;
            }
            // Before the look at what is under way: what is sent meanwhile is refused.
            if !state.lost.swap(true, Ordering::AcqRel)
                && let Some(metrics) = self.metrics.ranks().get(rank.index())
            {
                metrics.losses.add(1);
                metrics.lost.set(1);
            }
            self.inflight.owed_by(rank, |_, _| true)
        };
        let blocks = self.lose_blocks(&Tier::SLOTTED);
        self.end_questions(rank, &given_up(rank));
        drop(order);
        tracing::warn!(target: "kvbm", %rank, plans = owed.len(), blocks, "a rank was given up: its transfers fail, no cached block is whole any more");
        self.answer_for(rank, &owed, &given_up(rank));
        owed.len()
    }

    /// A worker of the rank says that it has started. Where another one served the rank before, the memory of that one is gone, and what lay
    /// there is found no more; what lies on its disk is compared when it is read.
    pub(super) fn rank_started(self: &Arc<Self>, rank: Rank) {
        let Some(state) = self.ranks.get(rank) else { return };
        // The rank is not given up meanwhile.
        let _order = self.disk_order.lock();
        let turn = self.ranks.turn(rank);
        let earlier = state.contact.lock().starts;
        let was_lost = self.ranks.is_lost(rank);
        if was_lost || earlier > 0 {
            let tiers: &[Tier] = if was_lost { &Tier::SLOTTED } else { &[Tier::G1, Tier::G2] };
            let blocks = self.lose_blocks(tiers);
            self.end_questions(rank, &started_again(rank));
            self.forget_disk_reads();
            tracing::info!(target: "kvbm", %rank, blocks, was_lost, "a rank's worker started again: what the one before it held is gone");
        }
        // Before anything reaches the new worker: a flush that it answers says nothing about what only the one before was told.
        let missed = state.missed.lock().anew();
        turn.handled();
        if let Some(metrics) = self.metrics.ranks().get(rank.index()) {
            metrics.lost.set(0);
        }
        // Still under the lock: no block was sent to its disk since.
        self.catch_up(rank, &missed);
    }

    /// Gives up ranks whose line stays closed, and lets go of what earlier workers of a rank owe.
    pub(super) fn watch_ranks(self: &Arc<Self>, now: Instant) {
        for rank in self.ranks.all().filter(|&rank| !self.ranks.is_lost(rank)) {
            let Some(state) = self.ranks.get(rank) else { continue };
            let contact = *state.contact.lock();
            if let (Some(started), 2..) = (contact.started, contact.starts) {
                // Its worker has had the time of a transfer, should the plan have reached it after all.
                let earlier = self.inflight.owed_by(rank, |part: &PlanPart, sent| {
                    sent.is_some_and(|sent| sent < contact.told)
                        && now.saturating_duration_since(started) >= part.operation.limit
                });
                self.answer_for(rank, &earlier, &started_again(rank));
            }
            if self.ranks.stays_away(&contact, now) {
                let same = |then: &Contact| then.starts == contact.starts && then.closed.is_some();
                self.give_up(rank, same);
            }
        }
    }

    /// Nobody answers what an earlier worker of a rank was asked.
    fn end_questions(&self, rank: Rank, reason: &Failure) {
        self.flushes.lost(rank, || FlushOutcome::Failed(reason.clone()));
        self.volumes.asks.lost(rank, || VolumeAnswer::Failed(reason.clone()));
    }

    fn answer_for(self: &Arc<Self>, rank: Rank, owed: &[(PlanId, Path)], failure: &Failure) {
        for &(plan_id, path) in owed {
            self.react(Item::Unreached { plan_id, rank, path, failure: failure.clone() });
        }
    }

    /// Blocks on `tiers` are whole no more: nothing finds them, and what is on its way there does not become visible. Records on disks stay, so
    /// that a later leader finds what all ranks have then. How many went.
    fn lose_blocks(&self, tiers: &[Tier]) -> u64 {
        let _order = self.disk_order.lock();
        self.registry.lose(tiers.iter().copied().collect()).blocks
    }

    /// Whether what was given out there on a tier is gone since. Counts it: it is asked where a caller wants to go on with it.
    pub(crate) fn check_lost(&self, tier: Tier, since: Losses) -> Result<(), Lost> {
        if !self.registry.is_lost(tier, since) {
            return Ok(());
        }
        let lost = Lost { tier };
        self.count_lost(lost);
        Err(lost)
    }

    /// Somebody came with what is gone, and was refused.
    pub(crate) fn count_lost(&self, lost: Lost) {
        self.metrics.tier(lost.tier).lost_refusals.add(1);
    }

    pub(crate) fn rank_status(&self) -> Vec<RankStatus> {
        let status = |rank: Rank| RankStatus {
            rank,
            is_lost: self.ranks.is_lost(rank),
            plans: self.inflight.owed_by(rank, |_, _| true).len(),
        };
        self.ranks.all().map(status).collect()
    }
}

fn started_again(rank: Rank) -> Failure {
    let detail = format!("rank {rank} had taken it when its worker ended, and started again");
    Failure::new(FailureKind::Io, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: Rank = Rank(1);

    fn started(ranks: &Ranks) {
        ranks.turn(RANK).handled();
    }

    #[test]
    fn the_first_worker_is_never_taken_for_another_ones_successor() {
        for _ in 0..100 {
            let ranks = Ranks::new(2, Duration::ZERO);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    ranks.start_is_told(RANK);
                    started(&ranks);
                });
                while ranks.line(RANK).expect("there is no other") == 0 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn nothing_is_sent_to_a_new_worker_before_its_start_was_handled() {
        let ranks = Ranks::new(2, Duration::ZERO);
        assert_eq!(ranks.line(RANK), Ok(0));
        ranks.start_is_told(RANK);
        assert_eq!(ranks.line(RANK), Ok(0), "the first one took nobody's place");
        started(&ranks);
        assert_eq!(ranks.line(RANK), Ok(1));
        for starts in 2..4 {
            ranks.start_is_told(RANK);
            assert!(ranks.line(RANK).is_err() && ranks.line(Rank(0)).is_ok());
            started(&ranks);
            assert_eq!(ranks.line(RANK), Ok(starts));
        }
        // Two in a row, of which the second has its turn later.
        ranks.start_is_told(RANK);
        ranks.start_is_told(RANK);
        started(&ranks);
        assert!(ranks.line(RANK).is_err());
        started(&ranks);
        ranks.found_closed(RANK, 5);
        assert!(ranks.line(RANK).is_err());
        assert!(ranks.line(Rank(7)).is_ok(), "no such rank: nothing is sent");
    }

    #[test]
    fn a_start_whose_handling_failed_closes_the_line_until_the_next_one() {
        let ranks = Ranks::new(2, Duration::from_secs(9));
        for starts in 1..4 {
            ranks.start_is_told(RANK);
            drop(ranks.turn(RANK));
            assert!(ranks.line(RANK).is_err(), "that worker may be told to read what it never had");
            let contact = *ranks.get(RANK).expect("there").contact.lock();
            assert!(
                ranks.stays_away(&contact, Instant::now() + Duration::from_secs(10)),
                "it can be given up"
            );
            ranks.start_is_told(RANK);
            started(&ranks);
            assert_eq!(ranks.line(RANK), Ok(starts));
        }
    }
}
