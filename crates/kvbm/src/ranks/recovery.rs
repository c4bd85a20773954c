//! What the ranks found on their disks at start.

use crate::signal::Signal;
use kvbm_plan::{BlockId, Rank, RecoveredBlock, Tier};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Instant;

/// Answers of the ranks, until all have given theirs.
pub(crate) struct Recoveries {
    ranks: Mutex<Vec<RankPart>>,
    complete: Signal,
    /// Slots of G3: no rank can hold more blocks.
    capacity: usize,
}

/// What a rank found, or a part of it.
#[derive(Default, Clone)]
pub(crate) struct RankPart {
    pub(crate) blocks: Vec<RecoveredBlock>,
    /// Slots that the rank never writes again.
    pub(crate) unusable: Vec<BlockId>,
    pub(crate) last: bool,
}

/// Blocks that can be served, and slots that cannot.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Common {
    /// In the same slot on every rank, oldest use first.
    pub(crate) blocks: Vec<RecoveredBlock>,
    /// Known to some ranks only, or under different identities.
    pub(crate) incomplete: Vec<BlockId>,
    /// Out of use on some rank, hence for all.
    pub(crate) unusable: Vec<BlockId>,
}

impl Recoveries {
    pub(crate) fn new(ranks: usize, capacity: u32) -> Self {
        let ranks = Mutex::new(vec![RankPart::default(); ranks]);
        Self { ranks, complete: Signal::default(), capacity: capacity as usize }
    }

    /// A part of what a rank found on G3. Given back where the rank had said all before: its worker
    /// has started again.
    pub(crate) fn answer(&self, rank: Rank, tier: Tier, part: RankPart) -> Option<RankPart> {
        let mut ranks = self.ranks.lock();
        let found = ranks.get_mut(rank.index()).filter(|_| tier == Tier::G3)?;
        if found.last {
            return Some(part);
        }
        let complete = extend(&mut found.blocks, part.blocks, self.capacity)
            & extend(&mut found.unusable, part.unusable, self.capacity);
        if !complete {
            tracing::warn!(%rank, capacity = self.capacity, "more recovered blocks than slots: the rest is left out");
        }
        found.last = part.last;
        if ranks.iter().all(|found| found.last) {
            drop(ranks);
            self.complete.set();
        }
        None
    }

    /// Waits for every rank.
    ///
    /// # Errors
    /// The first one that has not said all by `deadline`.
    pub(crate) fn wait(&self, deadline: Instant) -> Result<Common, Rank> {
        self.complete.wait_until(deadline);
        match self.unanswered() {
            Some(rank) => Err(rank),
            None => Ok(common(&self.take())),
        }
    }

    fn unanswered(&self) -> Option<Rank> {
        (0..).map(Rank).zip(self.ranks.lock().iter()).find_map(|(rank, found)| (!found.last).then_some(rank))
    }

    /// What was said; what comes from now on is of workers that start again.
    fn take(&self) -> Vec<RankPart> {
        let last_part = RankPart { last: true, ..RankPart::default() };
        self.ranks.lock().iter_mut().map(|part| std::mem::replace(part, last_part.clone())).collect()
    }
}

/// Adds up to `capacity` items in all; whether that was all of them.
fn extend<T>(into: &mut Vec<T>, items: Vec<T>, capacity: usize) -> bool {
    let room = capacity.saturating_sub(into.len());
    let all = items.len() <= room;
    into.extend(items.into_iter().take(room));
    all
}

fn common(ranks: &[RankPart]) -> Common {
    let Some((first, others)) = ranks.split_first() else { return Common::default() };
    let others: Vec<HashMap<BlockId, &RecoveredBlock>> = others
        .iter()
        .map(|found| found.blocks.iter().map(|recovered| (recovered.block, recovered)).collect())
        .collect();
    let everywhere = |recovered: &RecoveredBlock| {
        others.iter().all(|rank| rank.get(&recovered.block).is_some_and(|theirs| *theirs == recovered))
    };
    let (blocks, mut partial): (Vec<_>, Vec<_>) = first.blocks.iter().copied().partition(everywhere);
    let served: std::collections::HashSet<_> = blocks.iter().map(|recovered| recovered.block).collect();
    let theirs = ranks[1..].iter().flat_map(|found| &found.blocks);
    partial.extend(theirs.filter(|recovered| !served.contains(&recovered.block)));
    let mut incomplete: Vec<_> = partial.iter().map(|recovered| recovered.block).collect();
    incomplete.sort_unstable();
    incomplete.dedup();
    let mut unusable: Vec<_> = ranks.iter().flat_map(|found| &found.unusable).copied().collect();
    unusable.sort_unstable();
    unusable.dedup();
    Common { blocks, incomplete, unusable }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

    fn recovered(block: u32, hash: u8) -> RecoveredBlock {
        let hash = SequenceHash::from_bytes([hash; 16]);
        let identity =
            BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
        RecoveredBlock { block: BlockId(block), identity }
    }

    #[test]
    fn invariant_1_only_what_every_rank_has_is_served() {
        let recoveries = Recoveries::new(2, 16);
        let answer = |rank: u16, blocks: &[RecoveredBlock], unusable: &[u32], last: bool| {
            let unusable = unusable.iter().copied().map(BlockId).collect();
            recoveries.answer(Rank(rank), Tier::G3, RankPart { blocks: blocks.to_vec(), unusable, last });
        };
        let (a, b, c) = (recovered(1, 1), recovered(2, 2), recovered(3, 3));
        answer(0, &[a, b], &[8, 4], false);
        answer(0, &[c], &[6], true);
        answer(0, &[recovered(9, 9)], &[9], true);
        assert_eq!(recoveries.wait(Instant::now()), Err(Rank(1)), "it has not answered");
        answer(1, &[a, recovered(3, 7), recovered(5, 5)], &[4, 2], true);
        let common = recoveries.wait(Instant::now()).expect("both answered");
        assert_eq!(common.blocks, [a]);
        assert_eq!(common.incomplete, [2, 3, 5].map(BlockId));
        assert_eq!(common.unusable, [2, 4, 6, 8].map(BlockId), "on any rank");
    }
}
