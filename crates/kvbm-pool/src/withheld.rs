//! Slots that no allocation gets for now.

use crate::blocks::HeldSlots;
use kvbm_plan::BlockId;
use std::fmt;

/// Slots without content that are out of use as long as this is kept; dropped, they are free.
/// [`fail_and_withhold`](crate::AnyArrivals::fail_and_withhold) makes it.
#[must_use = "dropping it gives the slots back"]
pub struct Withheld(HeldSlots);

impl Withheld {
    pub(crate) fn new(slots: HeldSlots) -> Self {
        Self(slots)
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.0.ids.len()
    }

    /// Whether there is no slot.
    pub fn is_empty(&self) -> bool {
        self.0.ids.is_empty()
    }

    /// The slots.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.0.ids
    }

    /// Cuts off the slots from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self(self.0.split_off(at))
    }
}

impl fmt::Debug for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Withheld{:?}", self.0.ids)
    }
}
