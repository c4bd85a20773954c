//! The numbers of a publisher's messages: what they say of losses and new lives.

use std::cmp::Ordering;
use std::ops::Range;

/// What a message's number meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The next message.
    Next,
    /// Messages with these numbers did not come before this one: ask for a replay from the first, or forget the engine
    /// until it clears. What is known of the engine may be wrong.
    Gap {
        /// Their numbers.
        missing: Range<u64>,
    },
    /// The number stepped back, or [`Numbers::begin_anew`] was called before: the engine has started anew, and holds nothing but
    /// what it has said since. A publisher numbers its messages upwards and sends each once, so nothing else makes it step back;
    /// how far says nothing, because without a replay any message of the new life may be the first that is heard.
    Restarted {
        /// Number that was expected.
        expected: u64,
    },
}

/// Follows the numbers of one publisher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    next: u64,
    /// The next message is the first of a new life.
    anew: bool,
}

impl Numbers {
    /// Number that the next message should have.
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Begins with message `first`, as if all before it had been heard: for who does not want what was before.
    pub const fn starting_at(first: u64) -> Self {
        Self { next: first, anew: false }
    }

    /// The next message is [`Heard::Restarted`], whatever its number: the publisher has started anew, or nobody can say that it has
    /// not. Its new numbers may have come as far as the old ones, and then they say nothing.
    pub const fn begin_anew(&mut self) {
        self.anew = true;
    }

    /// Takes the number of a message.
    pub fn hear(&mut self, sequence: u64) -> Heard {
        let expected = std::mem::replace(&mut self.next, sequence.saturating_add(1));
        if std::mem::take(&mut self.anew) {
            return Heard::Restarted { expected };
        }
        match sequence.cmp(&expected) {
            Ordering::Equal => Heard::Next,
            Ordering::Greater => Heard::Gap { missing: expected..sequence },
            Ordering::Less => Heard::Restarted { expected },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_of_losses_and_new_lives() {
        let mut numbers = Numbers::default();
        assert_eq!(numbers.hear(2), Heard::Gap { missing: 0..2 }, "who comes late");
        assert_eq!(numbers.hear(3), Heard::Next);
        assert_eq!(numbers.hear(0), Heard::Restarted { expected: 4 });
        for first in [0, 3, 499, 500] {
            numbers = Numbers::starting_at(500);
            assert_eq!(numbers.hear(500), Heard::Next);
            assert_eq!(numbers.hear(first), Heard::Restarted { expected: 501 }, "however far it steps back");
            assert_eq!(numbers.hear(first + 1), Heard::Next);
        }
        for first in [0, 501, 502, 503] {
            numbers = Numbers::starting_at(502);
            numbers.begin_anew();
            assert_eq!(numbers.hear(first), Heard::Restarted { expected: 502 }, "wherever it is heard");
            assert_eq!(numbers.hear(first + 1), Heard::Next);
        }
        numbers = Numbers::starting_at(502);
        assert_eq!(numbers.hear(u64::MAX), Heard::Gap { missing: 502..u64::MAX });
        assert_eq!(numbers.hear(u64::MAX), Heard::Next, "without overflow");
    }
}
