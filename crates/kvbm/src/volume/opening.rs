//! Ranks that start are sent every volume, again and again until they have opened it: a mount may
//! come later than the process.

use super::VolumeTier;
use super::requests::followed;
use crate::ranks::requests::Request;
use kvbm_plan::{FailureKind, Rank, VolumeAnswer, VolumePlace, VolumeRequest, deadline_after};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Deadlines that opening a volume may take.
pub(super) const OPENING: u32 = 12;
/// Pause before a rank that could not open a volume is asked again.
const RETRY: Duration = Duration::from_secs(2);

/// Ranks that have not said that the volume is open.
#[derive(Default)]
pub(super) struct Openings {
    of: Mutex<PendingOpenings>,
    sent: Condvar,
}

#[derive(Default)]
struct PendingOpenings {
    open: BTreeMap<Rank, Opening>,
    /// Ranks that are being sent the volume at this moment.
    sending: usize,
    /// The volume was unregistered: no rank is sent it any more.
    over: bool,
}

struct Opening {
    /// While it is under way.
    asked: Option<Request<VolumeAnswer>>,
    /// When it is late, or is tried again.
    next: Instant,
    /// Whether the rank has failed to open it.
    failed: bool,
}

impl Openings {
    /// Whether some rank could not open it: no block can be read or written whole.
    pub(super) fn lacks_one(&self) -> bool {
        self.of.lock().open.values().any(|opening| opening.failed)
    }

    /// No rank is sent the volume any more. What is being sent at this moment is sent when this
    /// returns, or at `deadline`: that the volume is closed comes after it.
    pub(super) fn end(&self, deadline: Instant) {
        let mut state = self.of.lock();
        state.over = true;
        state.open.clear();
        while state.sending > 0 && !self.sent.wait_until(&mut state, deadline).timed_out() {}
    }

    fn add(&self, rank: Rank, now: Instant) {
        let mut state = self.of.lock();
        if !state.over {
            let failed = state.open.get(&rank).is_some_and(|before| before.failed);
            state.open.insert(rank, Opening { asked: None, next: now, failed });
        }
    }

    fn sent(&self, count: usize) {
        self.of.lock().sending -= count;
        self.sent.notify_all();
    }
}

/// Has a rank open the volume.
pub(super) fn start(tier: &VolumeTier, rank: Rank, now: Instant) {
    tier.openings.add(rank, now);
    tend(tier, now);
}

/// Goes on with openings. Called again and again.
pub(super) fn tend(tier: &VolumeTier, now: Instant) {
    let id = tier.descriptor.id;
    let mut due = Vec::new();
    let mut state = tier.openings.of.lock();
    state.open.retain(|&rank, opening| {
        let over = opening.asked.as_ref();
        let over = over.is_some_and(|asked| asked.is_answered() || now >= opening.next);
        if over && let Some(asked) = opening.asked.take() {
            let opened = asked.wait(now, "that a volume is open", followed);
            let Err((_, failure)) = opened else { return false };
            if failure.kind == FailureKind::Unsupported {
                // It knows another one under this id, by its own configuration, or none at all:
                // asking again changes nothing.
                tracing::warn!(target: "kvbm", %rank, volume = %id, %failure, "a rank does not take a volume from here");
                return false;
            }
            if !opening.failed {
                tracing::warn!(
                    target: "kvbm", %rank, volume = %id, %failure,
                    "a rank that started cannot open a volume: it counts as down until that rank can"
                );
            }
            opening.failed = true;
            opening.next = now + RETRY;
        }
        if opening.asked.is_none() && now >= opening.next {
            let asked = tier.requests.pending.start_with(rank);
            due.push((rank, asked.token));
            opening.asked = Some(asked);
            opening.next = deadline_after(now, tier.descriptor.deadline.saturating_mul(OPENING));
        }
        true
    });
    state.sending += due.len();
    // A link may answer from inside `send`.
    drop(state);
    let count = due.len();
    for (rank, token) in due {
        let request = VolumeRequest::Register(VolumePlace::from(&tier.descriptor));
        tier.requests.send_to(rank, id, token, request);
    }
    tier.openings.sent(count);
}
