//! Which of some candidates is evicted: the least worth of a sample, and the parent that follows
//! its child.

use crate::entry::NONE;
use std::cmp::Ordering;

/// Leaves looked at for a victim, and how many lie side by side.
pub(super) const SAMPLE: usize = 64;
pub(super) const WINDOW: usize = 8;
/// A victim found without a sample. When a leaf goes, its parent becomes one; if that is worth no
/// more than the next best of the sample from which its child was taken, it follows. So chains go
/// in runs, which the memory likes.
#[derive(Clone, Copy)]
pub(super) struct Next {
    pub bar: f32,
    pub slot: u32,
}

impl Next {
    pub(super) const NOTHING: Self = Self { bar: f32::NEG_INFINITY, slot: NONE };

    /// None yet; the next best of the sample is the bar.
    pub(super) fn after(second: Offer) -> Self {
        Self { bar: second.worth, slot: NONE }
    }

    #[inline]
    pub(super) fn consider(&mut self, slot: u32, worth: f32) {
        if worth <= self.bar {
            self.slot = slot;
        }
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        let slot = std::mem::replace(&mut self.slot, NONE);
        (slot != NONE).then_some(slot)
    }
}

/// The two leaves of least worth among those offered; of equal worth the older.
pub(super) struct Least(pub [Offer; 2]);

#[derive(Clone, Copy)]
pub(super) struct Offer {
    pub worth: f32,
    pub age: u16,
    pub slot: u32,
}

impl Offer {
    pub(super) const NONE: Self = Self { worth: f32::INFINITY, age: 0, slot: NONE };

    pub(super) fn is_before(&self, other: &Self) -> bool {
        self.worth.total_cmp(&other.worth).then_with(|| other.age.cmp(&self.age)) == Ordering::Less
    }
}

impl Least {
    #[inline]
    pub(super) fn offer(&mut self, offer: Offer) {
        let [first, second] = &mut self.0;
        if offer.is_before(second) && offer.slot != first.slot {
            if offer.is_before(first) {
                *second = std::mem::replace(first, offer);
            } else {
                *second = offer;
            }
        }
    }
}
