//! Workers that are about to end, and wait: what only they hold is saved before.
//!
//! An engine that stops may end its workers before it closes the manager (vLLM does). Then nobody
//! could write to their disks any more when the manager saves.

use super::{FlushError, Leader};
use kvbm_plan::{Rank, deadline_after};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most time that is taken, whatever a worker says.
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Leaving {
    state: Mutex<LeavingState>,
}

#[derive(Default)]
struct LeavingState {
    /// Each with the time at which it ends in any case.
    waiting: Vec<(Rank, Instant)>,
    /// Told that they may end; their processes have not ended yet.
    dismissed: Vec<Rank>,
    /// A thread saves.
    is_saving: bool,
}

impl Leaving {
    /// Whether a thread has to be started for the worker.
    fn enter(&self, rank: Rank, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        state.waiting.retain(|(other, _)| *other != rank);
        state.waiting.push((rank, deadline));
        !std::mem::replace(&mut state.is_saving, true)
    }

    /// How many wait, and when the first of them ends.
    fn waiting(&self) -> (usize, Option<Instant>) {
        let state = self.state.lock();
        (state.waiting.len(), state.waiting.iter().map(|(_, deadline)| *deadline).min())
    }

    /// Those that wait may end, unless others came since there were `saved`.
    fn dismiss(&self, saved: usize) -> Option<Vec<Rank>> {
        let mut state = self.state.lock();
        if state.waiting.len() > saved {
            return None;
        }
        let ranks: Vec<Rank> = state.waiting.drain(..).map(|(rank, _)| rank).collect();
        state.is_saving = false;
        state.dismissed.retain(|rank| !ranks.contains(rank));
        state.dismissed.extend(&ranks);
        Some(ranks)
    }

    /// Whether a worker that has ended was told that it may.
    pub(super) fn ended(&self, rank: Rank) -> bool {
        let mut state = self.state.lock();
        let before = state.dismissed.len();
        state.dismissed.retain(|other| *other != rank);
        state.dismissed.len() < before
    }
}

/// The worker of a rank is about to end and waits for `patience`. Starts to save, and returns: the
/// caller brings the answers of the workers.
pub(crate) fn worker_leaves(leader: &Arc<Leader>, rank: Rank, patience: Duration) {
    let deadline = deadline_after(kvbm_plan::clock::now(), patience.min(LONGEST));
    if !leader.leaving.enter(rank, deadline) {
        return;
    }
    let own = Arc::clone(leader);
    let thread = std::thread::Builder::new().name("kvbm-save".into());
    if let Err(error) = thread.spawn(move || save_for_those_that_leave(&own)) {
        tracing::warn!(target: "kvbm", %rank, %error, "a rank's worker is about to end, and there is no thread that saves");
        dismiss_waiting(leader, usize::MAX);
    }
}

fn save_for_those_that_leave(leader: &Leader) {
    loop {
        let (waiting, first) = leader.leaving.waiting();
        if let Some(deadline) = first {
            save_before(leader, deadline);
        }
        // Who came meanwhile may hold what has come since.
        if dismiss_waiting(leader, waiting) {
            return;
        }
    }
}

/// Saves as far as time allows, and makes it durable.
fn save_before(leader: &Leader, deadline: Instant) {
    let now = kvbm_plan::clock::now();
    // What was saved has to be flushed in time too.
    let for_copies = deadline.saturating_duration_since(now) * 3 / 4;
    let drained = leader.save_all(deadline_after(now, for_copies));
    let flushed = leader.flush_unless_clean(deadline);
    let not_saved = leader.lasting().map_or(0, |last| leader.not_saved(last));
    if let (0, Ok(_) | Err(FlushError::NoDisk)) = (not_saved, &flushed) {
        tracing::info!(target: "kvbm", "workers are about to end: everything is saved");
    } else {
        let why = flushed.err().map_or_else(String::new, |error| error.to_string());
        tracing::warn!(target: "kvbm", not_saved, drained, why, "workers are about to end, and not everything could be saved before");
    }
}

/// Whether those that waited were dismissed: no others came since there were `saved`.
fn dismiss_waiting(leader: &Leader, saved: usize) -> bool {
    let Some(ranks) = leader.leaving.dismiss(saved) else { return false };
    for rank in ranks {
        leader.ranks.dismiss(rank);
    }
    true
}
