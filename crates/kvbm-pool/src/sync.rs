//! The only place that names a lock: a model checker takes its place here (`--cfg kvbm_loom`, `--cfg kvbm_shuttle`).

pub(crate) use imp::{Mutex, MutexGuard};
pub(crate) use std::sync::{Arc, Weak};

/// Lets a waiting thread in, if there is one, in the middle of long work.
pub(crate) fn yield_to_waiters<T>(guard: &mut MutexGuard<'_, T>) {
    MutexGuard::unlocked(guard, || {});
}

#[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
mod imp {
    use std::ops::{Deref, DerefMut};

    /// Looks at a lock that is taken, so many pauses each, before a thread sleeps: about as long as the longest holds.
    const LOOKS: usize = 32;
    const PAUSES: usize = 64;

    /// A mutex for short holds: who finds it taken waits awake for a while. To sleep and be woken takes many times
    /// longer than most holds, above all on virtual machines.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T>(parking_lot::MutexGuard<'a, T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        #[inline]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.try_lock().unwrap_or_else(|| self.wait())
        }

        #[inline]
        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().map(MutexGuard)
        }

        #[cold]
        fn wait(&self) -> MutexGuard<'_, T> {
            for _ in 0..LOOKS {
                for _ in 0..PAUSES {
                    if !self.0.is_locked() {
                        break;
                    }
                    std::hint::spin_loop();
                }
                if let Some(guard) = self.try_lock() {
                    return guard;
                }
            }
            MutexGuard(self.0.lock())
        }
    }

    impl<T> MutexGuard<'_, T> {
        /// Runs `work` without the lock.
        pub(crate) fn unlocked(this: &mut Self, work: impl FnOnce()) {
            parking_lot::MutexGuard::unlocked(&mut this.0, work);
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.0
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
        pub(crate) fn unlocked(this: &mut Self, work: impl FnOnce()) {
            this.guard = None;
            work();
            this.guard = this.mutex.lock().guard;
        }
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
