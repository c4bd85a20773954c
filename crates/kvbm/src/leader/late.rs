//! Operations whose time is up: what arrived of a prefix counts, the rest is given up.

use super::Leader;
use super::operation::{Destination, Operation, Parts, Purpose, expired};
use kvbm_plan::Tier;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

impl Leader {
    /// Gives up on what is past its deadline.
    pub(super) fn expire_operations(self: &Arc<Self>, now: Instant) {
        for operation in self.operations(|operation| operation.deadline <= now) {
            let late = expired("transfer", operation.limit);
            if operation.expires() {
                self.note_late_disk_reads(&operation, now);
            }
            // Each time: whoever joined it in the last moment waits for it again.
            self.keep_arrived(&operation);
            if self.abandon(&operation, &late) {
                self.tell_of_kept(&operation);
            }
            self.note_hung_disk_reads(&operation, &late, now);
        }
    }

    /// The front of a prefix that has arrived counts, although the rest is on its way: somebody has waited long enough. What workers may
    /// still write is touched by nobody.
    pub(crate) fn keep_arrived(&self, operation: &Arc<Operation>) {
        if operation.purpose != Purpose::Offload {
            operation.keep_front(|parts, front| self.keep(operation, parts, front));
        }
    }

    /// How many blocks of `front`, from its first on, are there as they should be: what is reserved for them is visible now.
    fn keep(&self, operation: &Operation, parts: &mut Parts, front: Range<usize>) -> usize {
        let Parts { moves, destination, losses, source_check, .. } = parts;
        let is_lost = |tier: Tier| Tier::SLOTTED.contains(&tier) && self.registry.is_lost(tier, *losses);
        if is_lost(operation.to) {
            return 0;
        }
        let is_sound = |at: &usize| {
            !is_lost(moves[*at].from) && source_check.as_ref().is_none_or(|check| check(*at).is_none())
        };
        let sound = front.take_while(is_sound);
        match destination {
            Destination::Reserved { arrivals, places } => arrivals.complete_front(sound.map(|at| places[at])),
            Destination::Unregistered => sound.count(),
            Destination::Volume => 0,
        }
    }

    /// Blocks that were kept of an operation that was given up are in G1 like any others.
    pub(crate) fn tell_of_kept(self: &Arc<Self>, operation: &Operation) {
        if let Some(arrived) = operation.with_outcome(|outcome| outcome.arrived.clone()) {
            self.registered(operation.to, None, || arrived);
        }
    }
}
