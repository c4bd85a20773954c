//! The only place that names a lock: a model checker can take its place here.

pub(crate) use parking_lot::{Mutex, MutexGuard};
pub(crate) use std::sync::{Arc, Weak};

/// Lets a waiting thread in, if there is one, in the middle of long work.
pub(crate) fn yield_to_waiters<T>(guard: &mut MutexGuard<'_, T>) {
    MutexGuard::unlocked(guard, || {});
}
