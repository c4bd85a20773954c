//! Ranks that started are told of every volume, again and again until they have opened it: a mount may come later than the process.

use super::VolumeTier;
use super::asking::followed;
use crate::leader::Leader;
use crate::leader::gather::Asked;
use kvbm_plan::{FailureKind, Rank, VolumeAnswer, VolumePlace, VolumeRequest};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Deadlines that opening a volume may take.
pub(super) const OPENING: u32 = 12;
/// Pause before a rank that could not open a volume is asked again.
const RETRY: Duration = Duration::from_secs(2);

/// Ranks that have not said that the volume is open.
#[derive(Default)]
pub(super) struct Introductions {
    of: Mutex<State>,
    sent: Condvar,
}

#[derive(Default)]
struct State {
    open: BTreeMap<Rank, Introduction>,
    /// Ranks that are being told at this moment.
    sending: usize,
    /// The volume was unregistered: nobody is told of it any more.
    over: bool,
}

struct Introduction {
    /// While it is under way.
    asked: Option<Asked<VolumeAnswer>>,
    /// When it is late, or is tried again.
    next: Instant,
    /// Whether the rank has failed to open it.
    failed: bool,
}

impl Introductions {
    /// Whether some rank could not open it: no block can be read or written whole.
    pub(super) fn lacks_one(&self) -> bool {
        self.of.lock().open.values().any(|introduction| introduction.failed)
    }

    /// Nobody is told of the volume any more. What is being sent at this moment is sent when this returns, or at `deadline`: that the
    /// volume is closed comes after it.
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
            state.open.insert(rank, Introduction { asked: None, next: now, failed });
        }
    }

    fn sent(&self, count: usize) {
        self.of.lock().sending -= count;
        self.sent.notify_all();
    }
}

impl Leader {
    /// Tells a rank of every volume that there is: it may have started after they were registered.
    pub(crate) fn introduce_volumes(&self, rank: Rank) {
        self.volumes.note_start();
        let now = Instant::now();
        for tier in self.volumes.all() {
            self.introduce(&tier, rank, now);
        }
    }

    /// Tells a rank of a volume.
    pub(super) fn introduce(&self, tier: &VolumeTier, rank: Rank, now: Instant) {
        tier.introductions.add(rank, now);
        self.tend_introductions(tier, now);
    }

    /// Goes on with introductions. Called again and again.
    pub(super) fn tend_introductions(&self, tier: &VolumeTier, now: Instant) {
        let id = tier.descriptor.id;
        let mut due = Vec::new();
        let mut state = tier.introductions.of.lock();
        state.open.retain(|&rank, introduction| {
            let over = introduction.asked.as_ref();
            let over = over.is_some_and(|asked| asked.is_answered() || now >= introduction.next);
            if over && let Some(asked) = introduction.asked.take() {
                let opened = asked.wait(now, "that a volume is open", followed);
                let Err((_, failure)) = opened else { return false };
                if failure.kind == FailureKind::Unsupported {
                    // It knows another one under this id, by its own configuration, or none at all: asking again changes nothing.
                    tracing::warn!(target: "kvbm", %rank, volume = %id, %failure, "a rank does not take a volume from here");
                    return false;
                }
                if !introduction.failed {
                    tracing::warn!(
                        target: "kvbm", %rank, volume = %id, %failure,
                        "a rank that started cannot open a volume: it counts as down until that rank can"
                    );
                }
                introduction.failed = true;
                introduction.next = now + RETRY;
            }
            if introduction.asked.is_none() && now >= introduction.next {
                let asked = self.volumes.asks.start_with(rank);
                due.push((rank, asked.token));
                introduction.asked = Some(asked);
                introduction.next = now + OPENING * tier.descriptor.deadline;
            }
            true
        });
        state.sending += due.len();
        // A link may answer from inside `send`.
        drop(state);
        let count = due.len();
        for (rank, token) in due {
            let request = VolumeRequest::Register(VolumePlace::from(&tier.descriptor));
            self.send_one_about_volume(rank, tier, token, request);
        }
        tier.introductions.sent(count);
    }
}
