//! Transfers past their deadline: what arrived of a prefix counts, the rest is given up.

use super::transfer::{Parts, Transfer, expired};
use super::{Destination, Purpose, Transfers};
use kvbm_plan::Tier;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

/// Callers that wait for transfers with other deadlines than their own.
#[derive(Default)]
pub(super) struct Alarms(Mutex<Vec<(Instant, Waker)>>);

impl Alarms {
    fn set(&self, at: Instant, waker: &Waker) {
        let mut alarms = self.0.lock();
        if !alarms.iter().any(|(known, who)| *known == at && who.will_wake(waker)) {
            alarms.push((at, waker.clone()));
        }
    }

    fn take_due(&self, now: Instant) -> Vec<Waker> {
        let due = |alarm: &mut (Instant, Waker)| alarm.0 <= now;
        self.0.lock().extract_if(.., due).map(|(_, waker)| waker).collect()
    }
}

impl Transfers {
    /// Wakes `waker` soon after `at`.
    pub(crate) fn wake_at(&self, at: Instant, waker: &Waker) {
        self.alarms.set(at, waker);
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(&self, now: Instant) {
        self.alarms.take_due(now).into_iter().for_each(Waker::wake);
        for transfer in self.select(|transfer| transfer.deadline <= now) {
            let late = expired("transfer", transfer.limit);
            if transfer.expires() {
                self.note_late_disk_reads(&transfer, now);
            }
            // Each time: a request that joined it in the last moment waits for it again.
            self.keep_arrived(&transfer);
            if self.abandon(&transfer, &late) {
                transfer.announce_kept();
            }
            self.note_hung_disk_reads(&transfer, &late, now);
        }
    }

    /// The front of a prefix that has arrived counts, although the rest is on its way: somebody has
    /// waited long enough. What workers may still write is touched by nobody.
    pub(super) fn keep_arrived(&self, transfer: &Arc<Transfer>) {
        if transfer.purpose != Purpose::Offload {
            transfer.keep_front(|parts, front| self.keep(transfer, parts, front));
        }
    }

    /// How many blocks of `front`, from its first on, are there as they should be: what is reserved
    /// for them is visible now.
    fn keep(&self, transfer: &Transfer, parts: &mut Parts, front: Range<usize>) -> usize {
        let Parts { destination, losses, check, .. } = parts;
        let is_lost = |tier: Tier| Tier::SLOTTED.contains(&tier) && self.registry.is_lost(tier, *losses);
        if is_lost(transfer.to) {
            return 0;
        }
        let is_sound = |at: &usize| {
            !is_lost(transfer.moves[*at].from) && check.as_ref().is_none_or(|check| check(*at).is_none())
        };
        let sound = front.take_while(is_sound);
        match destination {
            Destination::Reserved { arrivals, places } => arrivals.complete_front(sound.map(|at| places[at])),
            Destination::Unregistered => sound.count(),
            Destination::Volume => 0,
        }
    }
}
