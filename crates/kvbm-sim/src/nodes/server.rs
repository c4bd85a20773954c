//! A model of the server on which nodes find each other: a bucket of values that live as long as
//! they are renewed.

use kvbm_plan::{clock, deadline_after};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a value lives that nobody renews, and how often it is renewed: as `kvbm` does it.
pub(super) const LEASE: Duration = Duration::from_secs(15);
pub(super) const RENEWAL: Duration = Duration::from_secs(5);

/// All announcements, by name.
pub(super) type Found = Arc<Vec<(String, Arc<[u8]>)>>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) is_down: bool,
    values: BTreeMap<String, (Arc<[u8]>, Instant)>,
    /// Made from the values when one was read first after a change.
    list: Option<Found>,
}

impl Server {
    pub(super) fn put(&mut self, name: String, value: Arc<[u8]>) {
        let ends = deadline_after(clock::now(), LEASE);
        let before = self.values.insert(name, (Arc::clone(&value), ends));
        if before.is_none_or(|(before, _)| !Arc::ptr_eq(&before, &value)) {
            self.list = None;
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&Arc<[u8]>> {
        self.values.get(name).map(|(value, _)| value)
    }

    /// Every value that is there.
    pub(super) fn values(&mut self) -> Found {
        let now = clock::now();
        let count = self.values.len();
        self.values.retain(|_, (_, ends)| now < *ends);
        if count != self.values.len() {
            self.list = None;
        }
        let list = || {
            let values = self.values.iter().map(|(name, (value, _))| (name.clone(), Arc::clone(value)));
            Arc::new(values.collect())
        };
        Arc::clone(self.list.get_or_insert_with(list))
    }

    /// What it knows is in its memory.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }
}
