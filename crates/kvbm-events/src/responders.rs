//! Who answers for which source at one end of a transport.

use crate::{Answering, Responder, SourceId};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Entries come and go with their [`Answering`].
#[derive(Default)]
pub(crate) struct Responders {
    entries: Mutex<Vec<(SourceId, Responder)>>,
}

impl Responders {
    pub(crate) fn add(self: &Arc<Self>, source: SourceId, responder: Responder) -> Answering {
        self.entries.lock().push((source, Arc::clone(&responder)));
        let this: Weak<Self> = Arc::downgrade(self);
        Answering::new(move || {
            let Some(this) = this.upgrade() else { return };
            this.entries.lock().retain(|(_, entry)| !Arc::ptr_eq(entry, &responder));
        })
    }

    /// The newest one.
    pub(crate) fn find(&self, source: SourceId) -> Option<Responder> {
        let entries = self.entries.lock();
        entries.iter().rev().find(|(of, _)| *of == source).map(|(_, responder)| Arc::clone(responder))
    }
}
