//! Plans that not all workers have answered.
//!
//! A plan is finished when every rank has answered once. An answer of an earlier epoch, for an
//! unknown plan, from an unknown rank or from a rank that already answered changes nothing, so
//! messages may be repeated or late.

use crate::error::{condemns_source, may_land};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockOutcome, Epoch, Failure, FailureKind, Path, PlanId, Rank, Tier, TransferReport};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The plans in flight; `O` comes back when a plan finishes.
pub(super) struct Inflight<O> {
    epoch: Epoch,
    ranks: usize,
    /// For each rank the one that writes its bytes to storage that they share; empty where each
    /// rank writes its own.
    writers: Vec<Rank>,
    table: Mutex<Table<O>>,
}

struct Table<O> {
    next: u64,
    plans: HashMap<PlanId, Pending<O>>,
}

struct Pending<O> {
    operation: O,
    path: Path,
    answered: Vec<bool>,
    left: usize,
    failures: Vec<Option<Failure>>,
    /// Of ranks that share one copy of what this plan writes: who said first which checksum the
    /// writer's block has, by writer and block.
    sums: HashMap<(Rank, usize), (Rank, u64)>,
    bytes: u64,
    queued_us: u64,
    busy_us: u64,
    since: Instant,
    sent: Option<SentAmong>,
    /// The ranks that have answered did so themselves.
    own: bool,
}

/// When a plan was sent, as numbers of worker starts that were announced by then: when its sending
/// began, and when it was over. Of a start in between nobody knows whether the worker before it was
/// sent the plan, or the one after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SentAmong {
    pub(super) before: u64,
    pub(super) after: u64,
}

/// A plan that every rank has answered.
#[derive(Debug)]
pub(super) struct Finished<O> {
    pub(super) operation: O,
    pub(super) path: Path,
    /// Per block of the plan: why it did not arrive on some rank; `None` when it arrived on all.
    pub(super) failures: Vec<Option<Failure>>,
    /// Whether every rank answered for itself: the others could not be reached, or are gone.
    pub(super) own: bool,
    /// Bytes moved by all ranks.
    pub(super) bytes: u64,
    /// Longest wait in a queue of any rank.
    pub(super) queued: Duration,
    /// Longest time from start to completion on any rank.
    pub(super) busy: Duration,
    /// From sending to the last answer.
    pub(super) elapsed: Duration,
}

/// What an answer changed.
#[derive(Debug)]
pub(super) enum Answer<O> {
    /// Stale, repeated or unknown: nothing.
    Ignored,
    /// Other ranks still owe theirs.
    Waiting,
    /// It was the last one.
    Finished(Finished<O>),
}

impl<O> Inflight<O> {
    pub(super) fn new(epoch: Epoch, ranks: usize) -> Self {
        let table = Mutex::new(Table { next: 1, plans: HashMap::new() });
        Self { epoch, ranks, writers: Vec::new(), table }
    }

    /// The same where ranks hold the same bytes: `writers` says for each who writes them.
    pub(super) fn shared_by(self, writers: Vec<Rank>) -> Self {
        let shared = (0..).map(Rank).zip(&writers).any(|(rank, writer)| rank != *writer);
        Self { writers: if shared { writers } else { Vec::new() }, ..self }
    }

    /// Enters a plan of `blocks` blocks before it is sent. The id that it must carry.
    pub(super) fn enter(&self, operation: O, path: Path, blocks: usize) -> PlanId {
        let mut table = self.table.lock();
        let plan_id = PlanId(table.next);
        table.next += 1;
        let pending = Pending {
            operation,
            path,
            answered: vec![false; self.ranks],
            left: self.ranks,
            failures: vec![None; blocks],
            sums: HashMap::new(),
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
            since: kvbm_plan::clock::now(),
            sent: None,
            own: true,
        };
        table.plans.insert(plan_id, pending);
        plan_id
    }

    /// A plan was sent to all ranks.
    pub(super) fn sent(&self, plan_id: PlanId, among: SentAmong) {
        if let Some(pending) = self.table.lock().plans.get_mut(&plan_id) {
            pending.sent = Some(among);
        }
    }

    /// Takes a rank's answer.
    pub(super) fn answer(&self, report: TransferReport) -> Answer<O> {
        if report.epoch != self.epoch && !planted(Planted::TrustStaleEpoch) {
            return Answer::Ignored;
        }
        let TransferReport { plan_id, rank, blocks, bytes, queued_us, busy_us, .. } = report;
        let mut table = self.table.lock();
        let Some(pending) = table.plans.get_mut(&plan_id) else { return Answer::Ignored };
        match pending.answered.get_mut(rank.index()) {
            Some(answered) if !*answered || planted(Planted::CountReportTwice) => *answered = true,
            _ => return Answer::Ignored,
        }
        let blocks = match self.writers.get(rank.index()) {
            Some(writer) if matches!(pending.path.dst, Tier::G3 | Tier::G4) => {
                pending.compare(rank, *writer, blocks)
            }
            _ => blocks,
        };
        pending.merge(rank, blocks);
        pending.bytes = pending.bytes.saturating_add(bytes);
        pending.queued_us = pending.queued_us.max(queued_us);
        pending.busy_us = pending.busy_us.max(busy_us);
        pending.left -= 1;
        if pending.left > 0 && !planted(Planted::SkipRankReport) {
            return Answer::Waiting;
        }
        match table.plans.remove(&plan_id) {
            Some(pending) => Answer::Finished(pending.finish()),
            None => Answer::Ignored,
        }
    }

    /// Answers for a rank that cannot: its link is down.
    pub(super) fn answer_failed(
        &self,
        plan_id: PlanId,
        rank: Rank,
        path: Path,
        failure: &Failure,
    ) -> Answer<O> {
        let blocks = match self.table.lock().plans.get_mut(&plan_id) {
            Some(pending) => {
                pending.own &= pending.answered.get(rank.index()) != Some(&false);
                vec![BlockOutcome::Failed(failure.clone()); pending.failures.len()]
            }
            None => return Answer::Ignored,
        };
        let epoch = self.epoch;
        self.answer(TransferReport { plan_id, epoch, rank, path, blocks, bytes: 0, queued_us: 0, busy_us: 0 })
    }

    /// Plans that `rank` has not answered, of those that `select` picks by their operation and what
    /// [`sent`](Self::sent) said.
    pub(super) fn owed_by(
        &self,
        rank: Rank,
        select: impl Fn(&O, Option<SentAmong>) -> bool,
    ) -> Vec<(PlanId, Path)> {
        let table = self.table.lock();
        let owes = |pending: &Pending<O>| {
            pending.answered.get(rank.index()).is_some_and(|answered| !answered)
                && select(&pending.operation, pending.sent)
        };
        table
            .plans
            .iter()
            .filter(|(_, pending)| owes(pending))
            .map(|(&id, pending)| (id, pending.path))
            .collect()
    }

    /// Plans in flight on `path`.
    pub(super) fn on_path(&self, path: Path) -> usize {
        self.table.lock().plans.values().filter(|pending| pending.path == path).count()
    }

    /// Blocks of the plans in flight on `path`; a block of a plan counts as `share` of its
    /// operation says.
    pub(super) fn blocks_on(&self, path: Path, share: impl Fn(&O) -> f64) -> usize {
        let table = self.table.lock();
        let pending = table.plans.values().filter(|pending| pending.path == path);
        let blocks: f64 =
            pending.map(|pending| pending.failures.len() as f64 * share(&pending.operation)).sum();
        blocks.round() as usize
    }

    /// Ids of the plans whose operation `select` picks.
    pub(super) fn select(&self, mut select: impl FnMut(&O) -> bool) -> Vec<PlanId> {
        let table = self.table.lock();
        table.plans.iter().filter(|(_, pending)| select(&pending.operation)).map(|(&id, _)| id).collect()
    }
}

impl<O> Pending<O> {
    /// A block of which ranks hold other bytes than their writer fails: only the writer's are
    /// stored, and the others could not use them.
    fn compare(&mut self, rank: Rank, writer: Rank, blocks: Vec<BlockOutcome>) -> Vec<BlockOutcome> {
        let compared = |(at, outcome): (usize, BlockOutcome)| match outcome {
            // 0: the worker does not know it.
            BlockOutcome::Done { checksum } if checksum != 0 => {
                let (first, known) = *self.sums.entry((writer, at)).or_insert((rank, checksum));
                if known == checksum {
                    return outcome;
                }
                let detail = format!(
                    "ranks {first} and {rank} hold other bytes of the block, and the model says that they hold the same: \
                     only those of rank {writer} would be stored"
                );
                BlockOutcome::Failed(Failure::new(FailureKind::Unsupported, detail))
            }
            outcome => outcome,
        };
        blocks.into_iter().enumerate().map(compared).collect()
    }

    /// The first failure of a block, on whichever rank, is the one that is reported; one that left
    /// no bytes gives way to one that may have. Of ranks that did not start it, what one waited for
    /// is reported rather than that it was cancelled on another.
    fn merge(&mut self, rank: Rank, blocks: Vec<BlockOutcome>) {
        use FailureKind::{Cancelled, GateShut, PathBusy};

        if blocks.len() != self.failures.len() {
            let detail =
                format!("rank {rank} answered for {} blocks of {}", blocks.len(), self.failures.len());
            let failure = Failure::new(FailureKind::Io, detail);
            for slot in &mut self.failures {
                slot.get_or_insert_with(|| failure.clone());
            }
            return;
        }
        for (slot, outcome) in self.failures.iter_mut().zip(blocks) {
            let BlockOutcome::Failed(Failure { kind, detail }) = outcome else { continue };
            let gives_way = |known: &Failure| match (known.kind, kind) {
                (Cancelled, GateShut | PathBusy) => true,
                (GateShut | PathBusy, Cancelled) => false,
                // Ranks may share a slot: who finds the damage empties it for the others.
                (FailureKind::Missing, kind) if condemns_source(kind) => true,
                (known, kind) => may_land(kind) && !may_land(known),
            };
            if slot.as_ref().is_none_or(gives_way) {
                *slot = Some(Failure::new(kind, format!("rank {rank}: {detail}")));
            }
        }
    }

    fn finish(self) -> Finished<O> {
        Finished {
            operation: self.operation,
            path: self.path,
            failures: self.failures,
            own: self.own,
            bytes: self.bytes,
            queued: Duration::from_micros(self.queued_us),
            busy: Duration::from_micros(self.busy_us),
            elapsed: self.since.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: Path = Path::G2_G1;

    fn report(plan_id: PlanId, rank: u16, blocks: Vec<BlockOutcome>) -> TransferReport {
        let (epoch, rank) = (Epoch(2), Rank(rank));
        TransferReport { plan_id, epoch, rank, path: PATH, blocks, bytes: 10, queued_us: 0, busy_us: 0 }
    }

    fn done(blocks: usize) -> Vec<BlockOutcome> {
        vec![BlockOutcome::Done { checksum: 1 }; blocks]
    }

    #[test]
    fn a_plan_finishes_when_every_rank_answered_once() {
        let inflight = Inflight::new(Epoch(2), 2);
        let plan = inflight.enter("op", PATH, 3);
        assert_eq!((inflight.on_path(PATH), inflight.blocks_on(PATH, |_| 1.0)), (1, 3));
        assert!(matches!(inflight.answer(report(plan, 0, done(3))), Answer::Waiting));
        assert!(matches!(inflight.answer(report(plan, 0, done(3))), Answer::Ignored), "answered twice");
        assert!(matches!(inflight.answer(report(plan, 9, done(3))), Answer::Ignored), "no such rank");
        let Answer::Finished(finished) = inflight.answer(report(plan, 1, done(3))) else {
            panic!("both ranks answered");
        };
        assert_eq!((finished.operation, finished.bytes), ("op", 20));
        assert!(finished.failures.iter().all(Option::is_none));
        assert!(matches!(inflight.answer(report(plan, 1, done(3))), Answer::Ignored), "finished already");
        assert_eq!(inflight.on_path(PATH), 0);
    }

    #[test]
    fn a_stale_epoch_is_ignored() {
        let inflight = Inflight::new(Epoch(2), 1);
        let plan = inflight.enter((), PATH, 1);
        let stale = TransferReport { epoch: Epoch(1), ..report(plan, 0, done(1)) };
        assert!(matches!(inflight.answer(stale), Answer::Ignored));
        assert_eq!(inflight.select(|()| true), [plan]);
    }

    #[test]
    fn one_rank_that_fails_fails_the_block_and_is_named() {
        let inflight = Inflight::new(Epoch(2), 2);
        let plan = inflight.enter((), PATH, 2);
        let failure = Failure::new(FailureKind::Corrupt, "slot 4");
        let blocks = vec![BlockOutcome::Done { checksum: 1 }, BlockOutcome::Failed(failure)];
        assert!(matches!(inflight.answer(report(plan, 1, blocks)), Answer::Waiting));
        let Answer::Finished(finished) = inflight.answer(report(plan, 0, done(2))) else {
            panic!("finished")
        };
        assert!(finished.failures[0].is_none());
        let failure = finished.failures[1].as_ref().expect("block 1 failed on rank 1");
        assert_eq!((failure.kind, failure.detail.as_str()), (FailureKind::Corrupt, "rank 1: slot 4"));
    }

    #[test]
    fn a_failure_that_may_have_left_bytes_is_reported_rather_than_one_that_did_not() {
        use FailureKind::{Cancelled, Corrupt, Deadline, Differs, Full, Io, Missing, PathBusy, Predecessor};
        for (kinds, expected) in [
            ([Full, Deadline], Deadline),
            ([Predecessor, Full], Predecessor),
            ([Io, Corrupt], Io),
            ([PathBusy, Io], Io),
            ([PathBusy, Cancelled], PathBusy),
            ([Cancelled, PathBusy], PathBusy),
            ([Missing, Corrupt], Corrupt),
            ([Corrupt, Missing], Corrupt),
            ([Missing, Differs], Differs),
        ] {
            let inflight = Inflight::new(Epoch(2), 2);
            let plan = inflight.enter((), PATH, 1);
            let failed = |kind| vec![BlockOutcome::Failed(Failure::new(kind, "planted"))];
            assert!(matches!(inflight.answer(report(plan, 0, failed(kinds[0]))), Answer::Waiting));
            let Answer::Finished(finished) = inflight.answer(report(plan, 1, failed(kinds[1]))) else {
                panic!("finished")
            };
            assert_eq!(finished.failures[0].as_ref().map(|failure| failure.kind), Some(expected));
        }
    }

    #[test]
    fn ranks_that_share_a_copy_and_hold_other_bytes_store_none() {
        let writers = vec![Rank(0), Rank(0), Rank(2), Rank(2)];
        let shared = [Path::G2_G3, Path::G1_G3, Path::G2_G4, Path::G1_G4].map(|path| (path, [false, true]));
        for (path, expected) in shared.into_iter().chain([(PATH, [false; 2])]) {
            let inflight = Inflight::new(Epoch(2), 4).shared_by(writers.clone());
            let plan = inflight.enter((), path, 2);
            // Ranks 2 and 3 share another part. Nobody knows what rank 0 has of block 0.
            let sums = [[0, 7], [5, 8], [9, 9], [9, 9]];
            let mut finished = None;
            for (rank, sums) in (0..).zip(sums) {
                let blocks = sums.map(|checksum| BlockOutcome::Done { checksum }).to_vec();
                if let Answer::Finished(all) = inflight.answer(report(plan, rank, blocks)) {
                    finished = Some(all);
                }
            }
            let failures = finished.expect("all ranks answered").failures;
            assert_eq!([failures[0].is_some(), failures[1].is_some()], expected, "{path}");
            let told = failures[1].as_ref().map(|failure| failure.detail.clone()).unwrap_or_default();
            assert_eq!(told.contains("ranks 0 and 1"), expected[1], "{told}");
        }
    }

    #[test]
    fn an_answer_of_another_length_fails_every_block() {
        let inflight = Inflight::new(Epoch(2), 1);
        let plan = inflight.enter((), PATH, 2);
        let Answer::Finished(finished) = inflight.answer(report(plan, 0, done(3))) else {
            panic!("finished")
        };
        assert!(finished.failures.iter().all(Option::is_some));
    }

    #[test]
    fn what_was_sent_before_a_start_was_reported_is_known() {
        let inflight = Inflight::new(Epoch(2), 2);
        let [early, late, leaving] = std::array::from_fn(|_| inflight.enter((), PATH, 1));
        inflight.sent(early, SentAmong { before: 4, after: 4 });
        inflight.sent(late, SentAmong { before: 4, after: 5 });
        let before = |rank| inflight.owed_by(Rank(rank), |(), sent| sent.is_some_and(|sent| sent.after < 5));
        assert_eq!(before(0), [(early, PATH)], "{leaving:?} is still being sent");
        assert!(matches!(inflight.answer(report(early, 0, done(1))), Answer::Waiting));
        assert_eq!((before(0), before(1)), (vec![], vec![(early, PATH)]));
        inflight.sent(PlanId(99), SentAmong { before: 1, after: 1 });
    }

    #[test]
    fn a_dead_link_answers_for_its_rank() {
        let inflight = Inflight::new(Epoch(2), 1);
        let plan = inflight.enter((), PATH, 1);
        let failure = Failure::new(FailureKind::Io, "link down");
        let answer = inflight.answer_failed(plan, Rank(0), PATH, &failure);
        assert!(matches!(answer, Answer::Finished(finished) if finished.failures[0].is_some()));
    }
}
