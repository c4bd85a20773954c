//! Counters for tests of this crate. For one hold of the lock they have the blocks changed and the
//! positions of the eviction order looked at. They also have memory that a removal takes under the
//! lock, and work of other threads between two holds.

use std::cell::Cell;

thread_local! {
    static CHANGED: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
    static POSITIONS: Cell<usize> = const { Cell::new(0) };
    static IN_HOLD: Cell<usize> = const { Cell::new(0) };
    static MOST_POSITIONS: Cell<usize> = const { Cell::new(0) };
    static GROWN: Cell<usize> = const { Cell::new(0) };
    static OTHERS: Cell<Option<Box<dyn FnMut()>>> = const { Cell::new(None) };
}

pub(crate) fn hold_begins() {
    CHANGED.set(0);
    IN_HOLD.set(0);
}

/// A block is evicted or removed, or its arrival is complete.
pub(crate) fn block_changes() {
    CHANGED.set(CHANGED.get() + 1);
    MOST.set(MOST.get().max(CHANGED.get()));
}

/// The most blocks that came with arrivals, or left, in one hold while `work` ran.
pub(crate) fn most_changed(work: impl FnOnce()) -> usize {
    MOST.set(0);
    work();
    MOST.get()
}

/// A position of an order is looked at to count the blocks of a tenant that can be evicted.
pub(crate) fn position_is_counted() {
    POSITIONS.set(POSITIONS.get() + 1);
    IN_HOLD.set(IN_HOLD.get() + 1);
    MOST_POSITIONS.set(MOST_POSITIONS.get().max(IN_HOLD.get()));
}

/// How many were counted while `work` ran, and in one hold at most.
pub(crate) fn positions_counted(work: impl FnOnce()) -> (usize, usize) {
    POSITIONS.set(0);
    MOST_POSITIONS.set(0);
    work();
    (POSITIONS.get(), MOST_POSITIONS.get())
}

/// A removal takes more memory under the lock.
pub(crate) fn removal_grows() {
    GROWN.set(GROWN.get() + 1);
}

/// How often it did while `work` ran.
pub(crate) fn removal_growth(work: impl FnOnce()) -> usize {
    GROWN.set(0);
    work();
    GROWN.get()
}

/// The calling thread lets other threads in and holds no lock.
#[cfg_attr(any(kvbm_loom, kvbm_shuttle), allow(dead_code, reason = "the checker decides who runs"))]
pub(crate) fn others_are_in() {
    if let Some(mut others) = OTHERS.take() {
        others();
        OTHERS.set(Some(others));
    }
}

/// Runs `others` each time that `work` lets other threads in.
pub(crate) fn while_others<T>(others: impl FnMut() + 'static, work: impl FnOnce() -> T) -> T {
    OTHERS.set(Some(Box::new(others)));
    let done = work();
    OTHERS.set(None);
    done
}
