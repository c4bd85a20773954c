//! Messages of the workers.
//!
//! They go through one queue, which the thread that finds it idle empties. So messages are handled
//! one after the other, in the order in which they came.

use super::Leader;
use crate::ranks::recovery::RankPart;
use kvbm_plan::wire::{self, DecodeError};
use kvbm_plan::{Message, Rank, Tier};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Default)]
pub(super) struct Inbox {
    /// Each with the rank on whose link it came.
    messages: VecDeque<(Rank, Result<Message, DecodeError>)>,
    busy: bool,
}

impl Leader {
    /// A message of the worker of `rank`, in wire form. Malformed ones, and those that speak for
    /// another rank, are counted and dropped: their plan runs into its deadline.
    pub(crate) fn deliver(&self, rank: Rank, message: &[u8]) {
        let message = wire::decode_message(message);
        if let Ok(Message::Ready { rank: speaker, epoch, .. }) = &message
            && *speaker == rank
            && *epoch == self.transfers.settings.epoch
        {
            // Known before the message has its turn.
            self.ranks.start_announced(rank);
        }
        {
            let mut inbox = self.inbox.lock();
            inbox.messages.push_back((rank, message));
            if inbox.busy {
                return;
            }
            inbox.busy = true;
        }
        while let Some((rank, message)) = self.next_message() {
            // Whatever goes wrong with one message, the others are waited for.
            if catch_unwind(AssertUnwindSafe(|| self.handle(rank, message))).is_err() {
                tracing::error!(
                    "the leader failed on a message; what it was about is over, or runs into its deadline"
                );
            }
        }
    }

    fn next_message(&self) -> Option<(Rank, Result<Message, DecodeError>)> {
        let mut inbox = self.inbox.lock();
        let next = inbox.messages.pop_front();
        inbox.busy = next.is_some();
        next
    }

    fn handle(&self, from: Rank, message: Result<Message, DecodeError>) {
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                if let DecodeError::Version { found } = error {
                    self.volumes.handshakes.speaks(from, found);
                }
                self.metrics.malformed_messages.add(1);
                tracing::warn!(%from, %error, "malformed message of a worker dropped");
                return;
            }
        };
        if speaker(&message) != from {
            self.metrics.malformed_messages.add(1);
            tracing::warn!(%from, claims = %speaker(&message), "message dropped: its worker names another rank than its own");
            return;
        }
        let ours = self.transfers.settings.epoch;
        match message {
            Message::Transfer(report) => self.transfers.report(report),
            Message::Flushed { rank, epoch, token, outcome } if epoch == ours => {
                self.slots.flush_answered(rank, token, outcome);
            }
            Message::Keys { rank, epoch, volume, keys } if epoch == ours => {
                self.key_notices.note(rank, volume, &keys);
            }
            Message::Recovered { rank, tier, blocks, unusable, last } => {
                let again = self.recoveries.answer(rank, tier, RankPart { blocks, unusable, last });
                if let Some(part) = again {
                    self.slots.disk_found_again(rank, &part);
                    self.slots.disk_reopened(part.unusable);
                }
            }
            Message::Volume { rank, epoch, token, answer } if epoch == ours => {
                self.volumes.answered(rank, token, answer);
            }
            Message::Ready { rank, epoch, volumes } if epoch == ours => {
                self.rank_started(rank);
                if volumes {
                    self.volumes.handshakes.ready(rank);
                    self.volumes.rank_started(rank);
                }
            }
            Message::Damaged { epoch, tier: Tier::G3, block, identity, failure, .. } if epoch == ours => {
                self.transfers.disk_damaged(block, identity, failure);
            }
            // Of an earlier leader.
            Message::Flushed { .. }
            | Message::Keys { .. }
            | Message::Volume { .. }
            | Message::Ready { .. }
            | Message::Damaged { .. } => {}
        }
    }
}

/// The rank that a message says it is of.
fn speaker(message: &Message) -> Rank {
    match message {
        Message::Transfer(report) => report.rank,
        Message::Flushed { rank, .. }
        | Message::Keys { rank, .. }
        | Message::Recovered { rank, .. }
        | Message::Volume { rank, .. }
        | Message::Damaged { rank, .. }
        | Message::Ready { rank, .. } => *rank,
    }
}
