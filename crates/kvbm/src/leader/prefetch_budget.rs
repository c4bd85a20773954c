//! How many blocks prefetches may have on their way at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the module.
pub(crate) struct PrefetchBudget {
    most: usize,
    used: Arc<AtomicUsize>,
}

/// A part of the budget, given back when it is dropped.
pub(crate) struct BudgetShare {
    blocks: usize,
    used: Arc<AtomicUsize>,
}

impl PrefetchBudget {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, used: Arc::default() }
    }

    /// At most `wanted` blocks; `None` where nothing is left.
    pub(crate) fn take(&self, wanted: usize) -> Option<BudgetShare> {
        let rest = |used: usize| self.most.saturating_sub(used).min(wanted);
        let take = |used: usize| (rest(used) > 0).then(|| used + rest(used));
        let before = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(BudgetShare { blocks: rest(before), used: Arc::clone(&self.used) })
    }
}

impl BudgetShare {
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.used.fetch_sub(self.blocks, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_given_in_parts_and_comes_back() {
        let budget = PrefetchBudget::new(10);
        let first = budget.take(7).expect("7 of 10");
        let second = budget.take(7).expect("the rest");
        assert_eq!((first.blocks(), second.blocks()), (7, 3));
        assert!(budget.take(1).is_none() && budget.take(0).is_none());
        drop(first);
        assert_eq!(budget.take(99).map(|share| share.blocks()), Some(7));
        assert!(PrefetchBudget::new(0).take(1).is_none());
    }
}
