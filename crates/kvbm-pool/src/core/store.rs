//! The one lock of a registry, and what is read without it.

use super::losses::LossCounts;
use super::state::Core;
use crate::config::RegistryConfig;
use crate::policy::EvictionPolicy;
use crate::sync::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};

/// Blocks that one hold of the lock moves, removes or completes before it lets other threads in.
pub(crate) const BLOCKS_PER_HOLD: usize = 64;

/// Most blocks evicted in one hold of the lock.
pub(crate) const MAX_VICTIMS: usize = RegistryConfig::MOST_EVICTED_AT_ONCE;

/// A registry's state behind its lock.
pub(crate) struct Store {
    /// Read without the lock.
    pub losses: LossCounts,
    core: Mutex<Core>,
}

/// One hold of the lock.
pub(crate) struct Hold<'a>(MutexGuard<'a, Core>);

impl Store {
    pub(crate) fn new(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>, seed: u64) -> Self {
        Self { losses: LossCounts::default(), core: Mutex::new(Core::new(config, policy, seed)) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Hold<'_> {
        let guard = self.core.lock();
        #[cfg(test)]
        crate::probe::hold_begins();
        Hold(guard)
    }
}

impl Hold<'_> {
    /// Releases the lock for a thread that waits, between two parts of long work. What was found
    /// before may have changed afterwards.
    pub(crate) fn let_others_in(&mut self) {
        MutexGuard::bump(&mut self.0);
        #[cfg(test)]
        crate::probe::hold_begins();
    }
}

impl Deref for Hold<'_> {
    type Target = Core;
    #[inline]
    fn deref(&self) -> &Core {
        &self.0
    }
}

impl DerefMut for Hold<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.0
    }
}
