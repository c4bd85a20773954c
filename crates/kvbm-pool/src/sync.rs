//! The only place that names a lock. A model checker's lock takes its place in builds for it
//! (`--cfg kvbm_loom`, `--cfg kvbm_shuttle`).

pub(crate) use imp::{Mutex, MutexGuard};
pub(crate) use std::sync::{Arc, Weak};

#[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
mod imp {
    use std::ops::{Deref, DerefMut};

    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        guard: parking_lot::MutexGuard<'a, T>,
        #[cfg(feature = "hold-times")]
        hold: crate::hold_times::HoldTime,
    }

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        #[inline]
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard {
                guard: self.0.lock(),
                #[cfg(feature = "hold-times")]
                hold: crate::hold_times::HoldTime::begin(),
            }
        }

        /// The value, unless another thread has it.
        #[inline]
        pub(crate) fn try_lock(&self) -> Option<parking_lot::MutexGuard<'_, T>> {
            self.0.try_lock()
        }
    }

    impl<T> MutexGuard<'_, T> {
        /// Gives the lock to a thread that waits for it, if one does, and takes it again.
        #[inline]
        pub(crate) fn bump(this: &mut Self) {
            #[cfg(feature = "hold-times")]
            this.hold.end();
            #[cfg(test)]
            parking_lot::MutexGuard::unlocked(&mut this.guard, crate::probe::others_are_in);
            #[cfg(not(test))]
            parking_lot::MutexGuard::bump(&mut this.guard);
            #[cfg(feature = "hold-times")]
            {
                this.hold = crate::hold_times::HoldTime::begin();
            }
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

    /// The same under a model checker, which decides which thread gets it.
    pub(crate) struct Mutex<T>(checked::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        guard: Option<checked::MutexGuard<'a, T>>,
    }

    const HELD: &str = "a guard lacks its lock only inside of `bump`, which borrows it";

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

    impl<T> MutexGuard<'_, T> {
        pub(crate) fn bump(this: &mut Self) {
            this.guard = None;
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
