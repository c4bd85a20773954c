//! The one lock of a registry, and what is read without it.

use super::losses::LossCounts;
use super::state::Core;
use crate::config::RegistryConfig;
use crate::policy::EvictionPolicy;
use crate::sync::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Blocks that one hold of the lock moves, removes or completes before it lets other threads in.
pub(crate) const BLOCKS_PER_HOLD: usize = 64;

/// Most blocks evicted in one hold of the lock.
pub(crate) const MAX_VICTIMS: usize = RegistryConfig::MOST_EVICTED_AT_ONCE;

/// A registry's state behind its lock.
pub(crate) struct Store {
    /// Read without the lock.
    pub losses: LossCounts,
    /// Called behind a hold in which a drain of events became due.
    pub waker: OnceLock<EventWaker>,
    core: Mutex<Core>,
    /// Set by the ring of events, under the lock.
    due: Arc<AtomicBool>,
}

/// Wakes whoever drains events.
pub(crate) type EventWaker = Box<dyn Fn() + Send + Sync>;

/// One hold of the lock. Its fields are dropped in this order: the waker is called without it.
pub(crate) struct Hold<'a> {
    core: MutexGuard<'a, Core>,
    _wake: WakeAfter<'a>,
}

/// Wakes when it is dropped, if a drain of events is due.
struct WakeAfter<'a>(&'a Store);

impl Drop for WakeAfter<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.due.load(Ordering::Relaxed) {
            self.0.wake();
        }
    }
}

impl Store {
    pub(crate) fn new(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>, seed: u64) -> Self {
        let due = Arc::<AtomicBool>::default();
        let core = Mutex::new(Core::new(config, policy, seed, Arc::clone(&due)));
        Self { losses: LossCounts::default(), waker: OnceLock::new(), core, due }
    }

    #[cold]
    fn wake(&self) {
        // Of several holds that see it, one wakes.
        if self.due.swap(false, Ordering::Relaxed)
            && let Some(wake) = self.waker.get()
        {
            wake();
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Hold<'_> {
        let guard = self.core.lock();
        #[cfg(test)]
        crate::probe::hold_begins();
        Hold { core: guard, _wake: WakeAfter(self) }
    }
}

impl Hold<'_> {
    /// Releases the lock for a thread that waits, between two parts of long work. What was found
    /// before may have changed afterwards.
    pub(crate) fn let_others_in(&mut self) {
        MutexGuard::bump(&mut self.core);
        #[cfg(test)]
        crate::probe::hold_begins();
    }
}

impl Deref for Hold<'_> {
    type Target = Core;
    #[inline]
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Hold<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}
