//! The only place that names a lock: a model checker takes its place here (`--cfg kvbm_loom`, `--cfg kvbm_shuttle`).

pub(crate) use imp::{Mutex, MutexGuard, SeenLeaf, SeenLeafGuard};
pub(crate) use std::sync::{Arc, Weak};

/// A leaf lock: nothing else is locked while it is held, for a moment. A model checker sees what is done under it as one
/// step with what comes before (those of which that hides something are [`SeenLeaf`]). In cache lines of its own: what lies beside it is read by everybody.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Leaf<T>(parking_lot::Mutex<T>);

impl<T> Leaf<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> parking_lot::MutexGuard<'_, T> {
        for _ in 0..LOOKS * PAUSES {
            if let Some(guard) = self.0.try_lock() {
                return guard;
            }
            std::hint::spin_loop();
        }
        self.0.lock()
    }
}

/// Looks at a lock that is taken, so many pauses each, before a thread sleeps: about as long as the longest holds.
const LOOKS: usize = 32;
const PAUSES: usize = 64;

#[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
mod imp {
    use super::{LOOKS, PAUSES};
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// A mutex for short holds: who finds it taken waits awake for a while. To sleep and be woken takes many times
    /// longer than most holds, above all on virtual machines.
    #[derive(Default)]
    pub(crate) struct Mutex<T> {
        /// Threads that wait.
        waiting: AtomicUsize,
        lock: parking_lot::Mutex<T>,
    }

    pub(crate) struct MutexGuard<'a, T> {
        waiting: &'a AtomicUsize,
        guard: parking_lot::MutexGuard<'a, T>,
        #[cfg(feature = "hold-times")]
        hold: crate::hold_times::Hold,
    }

    impl<'a, T> MutexGuard<'a, T> {
        #[inline]
        fn new(waiting: &'a AtomicUsize, guard: parking_lot::MutexGuard<'a, T>) -> Self {
            Self {
                waiting,
                guard,
                #[cfg(feature = "hold-times")]
                hold: crate::hold_times::Hold::begin(),
            }
        }
    }

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self { waiting: AtomicUsize::new(0), lock: parking_lot::Mutex::new(value) }
        }

        #[inline]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.try_lock().unwrap_or_else(|| self.wait())
        }

        #[inline]
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let guard = self.lock.try_lock()?;
            Some(MutexGuard::new(&self.waiting, guard))
        }

        #[cold]
        fn wait(&self) -> MutexGuard<'_, T> {
            self.waiting.fetch_add(1, Relaxed);
            let guard = self.wait_awake().unwrap_or_else(|| self.lock.lock());
            self.waiting.fetch_sub(1, Relaxed);
            MutexGuard::new(&self.waiting, guard)
        }

        fn wait_awake(&self) -> Option<parking_lot::MutexGuard<'_, T>> {
            for _ in 0..LOOKS {
                for _ in 0..PAUSES {
                    if !self.lock.is_locked() {
                        break;
                    }
                    std::hint::spin_loop();
                }
                if let Some(guard) = self.lock.try_lock() {
                    return Some(guard);
                }
            }
            None
        }
    }

    /// A leaf lock that a model checker sees.
    pub(crate) type SeenLeaf<T> = super::Leaf<T>;

    pub(crate) type SeenLeafGuard<'a, T> = parking_lot::MutexGuard<'a, T>;

    impl<T> MutexGuard<'_, T> {
        /// Whether somebody waits for the lock.
        #[inline]
        pub(crate) fn is_wanted(this: &Self) -> bool {
            this.waiting.load(Relaxed) > 0
        }

        /// Lets those who wait take the lock before the caller has it again.
        pub(crate) fn bump(this: &mut Self) {
            let waiting = this.waiting;
            #[cfg(feature = "hold-times")]
            this.hold.end();
            parking_lot::MutexGuard::unlocked(&mut this.guard, || {
                #[cfg(test)]
                crate::core::counts::others_are_in();
                pause_for(waiting);
            });
            #[cfg(feature = "hold-times")]
            {
                this.hold = crate::hold_times::Hold::begin();
            }
        }
    }

    impl<T> Mutex<T> {
        /// Waits a moment, if somebody waits for the lock, which the caller does not hold.
        pub(crate) fn let_waiters_in(&self) {
            pause_for(&self.waiting);
        }
    }

    /// Waits until one of those who wait has the lock, but no longer than that takes one who is awake.
    fn pause_for(waiting: &AtomicUsize) {
        let before = waiting.load(Relaxed);
        for _ in 0..PAUSES {
            if waiting.load(Relaxed) < before.max(1) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            &self.guard
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            &mut self.guard
        }
    }
}

#[cfg(any(kvbm_loom, kvbm_shuttle))]
mod imp {
    #[cfg(kvbm_loom)]
    use loom::sync as checked;
    #[cfg(kvbm_shuttle)]
    use shuttle::sync as checked;
    use std::ops::{Deref, DerefMut};

    /// The same under a model checker, which decides who gets it.
    pub(crate) struct Mutex<T>(checked::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        guard: Option<checked::MutexGuard<'a, T>>,
    }

    /// A leaf lock that the checker sees: what threads do under it and around it is tried in every order.
    pub(crate) type SeenLeaf<T> = Mutex<T>;

    pub(crate) type SeenLeafGuard<'a, T> = MutexGuard<'a, T>;

    const HELD: &str = "a guard lacks its lock only inside of `unlocked`, which borrows it";

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(checked::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            let guard = self.0.lock().expect("a panic ends the model");
            MutexGuard { mutex: self, guard: Some(guard) }
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let guard = self.0.try_lock().ok()?;
            Some(MutexGuard { mutex: self, guard: Some(guard) })
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    impl<T> MutexGuard<'_, T> {
        pub(crate) fn is_wanted(_this: &Self) -> bool {
            true
        }

        pub(crate) fn bump(this: &mut Self) {
            this.guard = None;
            this.guard = this.mutex.lock().guard;
        }
    }

    impl<T> Mutex<T> {
        #[expect(clippy::unused_self, reason = "the checker decides who goes on")]
        pub(crate) fn let_waiters_in(&self) {}
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.guard.as_ref().expect(HELD)
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect(HELD)
        }
    }
}
