//! From the workers to the leader.
//!
//! Answers go through one inbox that whoever comes first empties, so a worker that answers from inside `send` cannot
//! recurse.

use super::Leader;
use super::inflight::{Answer, Finished};
use super::operation::PlanPart;
use super::recovery::Part;
use kvbm_plan::wire::{self, DecodeError};
use kvbm_plan::{Failure, FlushOutcome, Message, Path, PlanId, Rank, Tier};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Bytes of the longest [`Message::Ready`], with room to spare; most other messages are longer.
const MOST_READY: usize = 64;

#[derive(Default)]
pub(super) struct Inbox {
    items: VecDeque<Item>,
    busy: bool,
}

/// What the leader has to react to, one after the other.
pub(super) enum Item {
    /// A message in wire form, and the rank on whose line it came.
    Message(Rank, Vec<u8>),
    /// A plan did not reach a rank.
    Unreached { plan_id: PlanId, rank: Rank, path: Path, failure: Failure },
}

impl Leader {
    /// A message of the worker of `rank`, in wire form. Malformed ones, and those that speak for another rank, are counted and
    /// dropped: their plan runs into its deadline.
    pub(crate) fn deliver(self: &Arc<Self>, rank: Rank, message: Vec<u8>) {
        if self.tells_start(rank, &message) {
            self.ranks.start_is_told(rank);
        }
        self.react(Item::Message(rank, message));
    }

    /// Whether a worker of `rank` says that it has started: known before the message has its turn.
    fn tells_start(&self, rank: Rank, message: &[u8]) -> bool {
        let Some(Ok(Message::Ready { rank: speaker, epoch, .. })) =
            (message.len() <= MOST_READY).then(|| wire::decode_message(message))
        else {
            return false;
        };
        speaker == rank && epoch == self.settings.epoch
    }

    pub(super) fn react(self: &Arc<Self>, item: Item) {
        {
            let mut inbox = self.inbox.lock();
            inbox.items.push_back(item);
            if inbox.busy {
                return;
            }
            inbox.busy = true;
        }
        while let Some(item) = self.next_item() {
            // Whatever goes wrong with one item, the others are waited for.
            if catch_unwind(AssertUnwindSafe(|| self.handle(item))).is_err() {
                tracing::error!(
                    "the leader failed on a message; what it was about is over, or runs into its deadline"
                );
                // What ended makes room for what waits, as after any message.
                let _failed_again = catch_unwind(AssertUnwindSafe(|| self.pump()));
            }
        }
    }

    fn next_item(&self) -> Option<Item> {
        let mut inbox = self.inbox.lock();
        let next = inbox.items.pop_front();
        inbox.busy = next.is_some();
        next
    }

    fn handle(self: &Arc<Self>, item: Item) {
        match item {
            Item::Message(from, message) => self.handle_message(from, &message),
            Item::Unreached { plan_id, rank, path, failure } => {
                let answer = self.inflight.answer_failed(plan_id, rank, path, &failure);
                self.take(answer);
            }
        }
    }

    fn handle_message(self: &Arc<Self>, from: Rank, message: &[u8]) {
        match wire::decode_message(message) {
            Ok(message) if speaker(&message) != from => {
                self.metrics.malformed_messages.add(1);
                tracing::warn!(%from, claims = %speaker(&message), "message of a worker that speaks for another rank dropped");
            }
            Ok(Message::Transfer(report)) => {
                let answer = self.inflight.answer(report);
                self.take(answer);
            }
            Ok(Message::Flushed { rank, epoch, token, outcome }) => {
                if epoch == self.settings.epoch {
                    if matches!(outcome, FlushOutcome::Durable { .. }) {
                        self.ranks.caught_up(rank, token);
                    }
                    self.flushes.answer(rank, token, outcome);
                }
            }
            Ok(Message::Recovered { rank, tier, blocks, unusable, last }) => {
                let again = self.recoveries.answer(rank, tier, Part { blocks, unusable, last });
                if let Some(part) = again {
                    self.disk_found_again(rank, &part);
                    self.disk_opened_again(part.unusable);
                }
            }
            Ok(Message::Volume { rank, epoch, token, answer }) => {
                if epoch == self.settings.epoch {
                    self.volume_answered(rank, token, answer);
                }
            }
            Ok(Message::Ready { rank, epoch, volumes }) => {
                if epoch == self.settings.epoch {
                    self.rank_started(rank);
                    if volumes {
                        self.volumes.hellos.ready(rank);
                        self.introduce_volumes(rank);
                    }
                }
            }
            Ok(Message::Damaged { epoch, tier, block, identity, failure, .. }) => {
                if epoch == self.settings.epoch && tier == Tier::G3 {
                    self.disk_damaged(block, identity, failure);
                }
            }
            Err(error) => {
                if let DecodeError::Version { found } = error {
                    self.volumes.hellos.speaks(from, found);
                }
                self.metrics.malformed_messages.add(1);
                tracing::warn!(%error, "malformed message of a worker dropped");
            }
        }
    }

    fn take(self: &Arc<Self>, answer: Answer<PlanPart>) {
        match answer {
            Answer::Finished(finished) => self.plan_finished(&finished),
            Answer::Ignored => self.metrics.ignored_reports.add(1),
            Answer::Waiting => {}
        }
    }

    fn plan_finished(self: &Arc<Self>, finished: &Finished<PlanPart>) {
        let PlanPart { operation, first } = &finished.operation;
        self.note_what_stores_give(finished);
        let unsettled = operation.merge(*first, &finished.failures, finished.own.then_some(finished.busy));
        self.count_plan(finished);
        if let Some(unsettled) = unsettled {
            self.settle(operation, unsettled);
        }
    }

    /// Blocks that arrived show that a store works, whoever waits behind them.
    fn note_what_stores_give(&self, finished: &Finished<PlanPart>) {
        let Finished { path, own, failures, .. } = finished;
        if !own || failures.iter().all(Option::is_some) {
            return;
        }
        if path.src == Tier::G3 {
            self.disk_gives();
        }
        if path.src == Tier::G4 || path.dst == Tier::G4 {
            let volume = finished.operation.operation.volume;
            if let Some(volume) = volume.and_then(|id| self.volumes.get(id)) {
                volume.gives();
            }
        }
    }

    fn count_plan(&self, finished: &Finished<PlanPart>) {
        let path = self.metrics.path(finished.path);
        let failed = finished.failures.iter().flatten();
        failed.for_each(|failure| path.failures(failure.kind).add(1));
        let arrived = finished.failures.iter().filter(|slot| slot.is_none()).count();
        let Finished { queued, elapsed, bytes, .. } = finished;
        tracing::trace!(path = %finished.path, arrived, bytes, ?queued, ?elapsed, "plan finished");
        path.leave();
        if arrived > 0 {
            path.arrived(arrived as u64, finished.bytes, finished.elapsed);
            self.speeds.saw(finished.path, arrived, finished.elapsed);
        }
    }
}

/// The rank that a message says it is of.
fn speaker(message: &Message) -> Rank {
    match message {
        Message::Transfer(report) => report.rank,
        Message::Flushed { rank, .. }
        | Message::Recovered { rank, .. }
        | Message::Volume { rank, .. }
        | Message::Damaged { rank, .. }
        | Message::Ready { rank, .. } => *rank,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::Epoch;

    #[test]
    fn a_start_is_short_enough_to_be_looked_for() {
        let message = Message::Ready { rank: Rank(u16::MAX), epoch: Epoch(u64::MAX), volumes: true };
        assert!(wire::encode_message(&message).expect("a message").len() <= MOST_READY);
    }
}
