//! The numbers of a publisher's messages: what they say of losses and new lives.

use std::cmp::Ordering;
use std::ops::Range;

/// What a message's number meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Continuity {
    /// The next message.
    Next,
    /// Messages with these numbers did not come before this one: ask for a replay from the first,
    /// or forget the engine until it clears. What is known of the engine may be wrong.
    Gap {
        /// Their numbers.
        missing: Range<u64>,
    },
    /// The number stepped back, or [`SequenceTracker::expect_restart`] was called before: the
    /// engine has started anew, and holds nothing but what it has said since. A publisher numbers
    /// its messages upwards and sends each once, so nothing else makes it step back. How far it
    /// steps back means nothing: without a replay, any message of the new life may be the first
    /// that is received.
    Restarted {
        /// Number that was expected.
        expected: u64,
    },
}

/// Follows the numbers of one publisher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceTracker {
    next: u64,
    /// The next message is the first of a new life.
    anew: bool,
}

impl SequenceTracker {
    /// Number that the next message should have.
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Begins with message `first`, as if all before it had been received: for a follower that does
    /// not want earlier messages.
    pub const fn starting_at(first: u64) -> Self {
        Self { next: first, anew: false }
    }

    /// The next message is [`Continuity::Restarted`], whatever its number: the publisher has
    /// started anew, or nobody can say that it has not. Its new numbers may have come as far as the
    /// old ones, and then they say nothing.
    pub const fn expect_restart(&mut self) {
        self.anew = true;
    }

    /// Takes the number of a message.
    pub fn accept(&mut self, sequence: u64) -> Continuity {
        let expected = std::mem::replace(&mut self.next, sequence.saturating_add(1));
        if std::mem::take(&mut self.anew) {
            return Continuity::Restarted { expected };
        }
        match sequence.cmp(&expected) {
            Ordering::Equal => Continuity::Next,
            Ordering::Greater => Continuity::Gap { missing: expected..sequence },
            Ordering::Less => Continuity::Restarted { expected },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_reveal_losses_and_new_lives() {
        let mut numbers = SequenceTracker::default();
        assert_eq!(numbers.accept(2), Continuity::Gap { missing: 0..2 }, "who comes late");
        assert_eq!(numbers.accept(3), Continuity::Next);
        assert_eq!(numbers.accept(0), Continuity::Restarted { expected: 4 });
        for first in [0, 3, 499, 500] {
            numbers = SequenceTracker::starting_at(500);
            assert_eq!(numbers.accept(500), Continuity::Next);
            assert_eq!(
                numbers.accept(first),
                Continuity::Restarted { expected: 501 },
                "however far it steps back"
            );
            assert_eq!(numbers.accept(first + 1), Continuity::Next);
        }
        for first in [0, 501, 502, 503] {
            numbers = SequenceTracker::starting_at(502);
            numbers.expect_restart();
            assert_eq!(
                numbers.accept(first),
                Continuity::Restarted { expected: 502 },
                "wherever it is heard"
            );
            assert_eq!(numbers.accept(first + 1), Continuity::Next);
        }
        numbers = SequenceTracker::starting_at(502);
        assert_eq!(numbers.accept(u64::MAX), Continuity::Gap { missing: 502..u64::MAX });
        assert_eq!(numbers.accept(u64::MAX), Continuity::Next, "without overflow");
    }
}
