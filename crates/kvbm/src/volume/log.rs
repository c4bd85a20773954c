//! Changes on volumes, for the publisher of events.

use kvbm_plan::{BlockIdentity, SequenceHash, VolumeId};
use std::collections::VecDeque;

/// What happened to a block on a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) volume: VolumeId,
    pub(crate) stored: bool,
    pub(crate) identity: BlockIdentity,
    /// First block of its chain, as far as that is known.
    pub(crate) root: SequenceHash,
}

/// Changes of all volumes in one row, numbered without gaps; the oldest are lost where nobody takes
/// them.
pub(crate) struct Log {
    changes: VecDeque<Change>,
    most: usize,
    /// Number of the first change that is kept.
    first: u64,
}

impl Log {
    /// Keeps at most `most` changes that nobody took yet.
    pub(crate) fn new(most: usize) -> Self {
        Self { changes: VecDeque::new(), most: most.max(1), first: 0 }
    }

    pub(super) fn push(&mut self, change: Change) {
        self.changes.push_back(change);
        if self.changes.len() > self.most {
            self.changes.pop_front();
            self.first += 1;
        }
    }

    /// The number of the next change.
    pub(super) fn next(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    /// Calls `take` with up to `max` changes and their numbers, oldest first. The number that
    /// follows the last one that was taken or lost: what still waits is neither.
    pub(crate) fn drain(&mut self, max: usize, mut take: impl FnMut(u64, Change)) -> u64 {
        for _ in 0..max.min(self.changes.len()) {
            let Some(change) = self.changes.pop_front() else { break };
            take(self.first, change);
            self.first += 1;
        }
        self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceId};

    /// Mutation that makes it fail: a `drain` that returns the number of the next change to come.
    #[test]
    fn what_waits_is_neither_taken_nor_lost() {
        let mut log = Log::new(4);
        for number in 0..6 {
            let hash = SequenceHash::from_bytes([number; 16]);
            let (namespace, group) = (NamespaceId(0), GroupId(0));
            let identity = BlockIdentity { namespace, group, hash, parent: None, position: 0 };
            log.push(Change { volume: VolumeId(0), stored: true, identity, root: hash });
        }
        let mut taken = Vec::new();
        let mut drain =
            |max| log.drain(max, |number, change| taken.push((number, change.root.as_bytes()[0])));
        assert_eq!([drain(0), drain(3), drain(9), drain(9)], [2, 5, 6, 6], "two were lost");
        assert_eq!(taken, [(2, 2), (3, 3), (4, 4), (5, 5)]);
        assert_eq!(log.next(), 6);
    }
}
