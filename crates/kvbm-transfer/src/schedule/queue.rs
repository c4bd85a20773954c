//! The bounded queue of one path.

use crate::stats::PathStats;
use kvbm_plan::{Endpoint, Path, PlanId, Priority, TransferPlan, VolumeId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Of the places of a queue that volumes share one may have so many times as many as it leaves.
const SHARE: usize = 7;

/// Bounds of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathLimits {
    /// Plans that may be queued.
    pub(crate) plans: usize,
    /// Blocks that may be queued.
    pub(crate) blocks: usize,
}

/// Place in the order of a queue: priority first, then arrival.
type Place = (Reverse<Priority>, u64, PlanId);

/// The volume at an end of `plan`.
pub(crate) fn volume_of(plan: &TransferPlan) -> Option<VolumeId> {
    [plan.src, plan.dst].into_iter().find_map(|end| match end {
        Endpoint::Volume(volume) => Some(volume),
        _ => None,
    })
}

/// Plans of one volume, or all of a path without volumes: there is room for all of them, or for
/// none.
#[derive(Default)]
struct Lane {
    /// Those that may be issued.
    ready: BTreeSet<Place>,
    /// Those that have not started, and their blocks.
    plans: usize,
    blocks: usize,
}

/// Plans of one path that may be issued, and the path's counters. Plans behind a gate are counted,
/// not listed.
pub(crate) struct PathQueue {
    /// Bounds; `None` where this worker does not have the path, with the reason.
    pub(crate) limits: Result<PathLimits, String>,
    pub(crate) stats: PathStats,
    lanes: BTreeMap<Option<VolumeId>, Lane>,
}

impl PathQueue {
    pub(crate) fn new(path: Path, limits: Result<PathLimits, String>) -> Self {
        Self { limits, stats: PathStats::new(path), lanes: BTreeMap::new() }
    }

    /// Whether `plan` still fits. Text for the report if not.
    pub(crate) fn check_room(&self, plan: &TransferPlan) -> Result<(), String> {
        let Ok(limits) = &self.limits else { return Ok(()) };
        let blocks = plan.blocks.len();
        let PathStats { path, queued_plans, queued_blocks, .. } = self.stats;
        if queued_plans >= limits.plans {
            return Err(format!(
                "queue of path {path} holds {queued_plans} plans of at most {}",
                limits.plans
            ));
        }
        if queued_blocks + blocks > limits.blocks {
            return Err(format!(
                "queue of path {path} holds {queued_blocks} blocks of at most {}, {blocks} more do not fit",
                limits.blocks
            ));
        }
        let Some(volume) = volume_of(plan) else { return Ok(()) };
        let Some(lane) = self.lanes.get(&Some(volume)).filter(|lane| lane.plans > 0) else { return Ok(()) };
        let left = (limits.plans - queued_plans - 1, limits.blocks - queued_blocks - blocks);
        if lane.plans + 1 > SHARE.saturating_mul(left.0)
            || lane.blocks + blocks > SHARE.saturating_mul(left.1)
        {
            return Err(format!(
                "queue of path {path} holds {} plans with {} blocks of volume {volume}: the rest is for other volumes",
                lane.plans, lane.blocks
            ));
        }
        Ok(())
    }

    /// `plan` waits for its start from now on.
    pub(crate) fn enters(&mut self, plan: &TransferPlan) {
        self.stats.queued_plans += 1;
        self.stats.queued_blocks += plan.blocks.len();
        let lane = self.lanes.entry(volume_of(plan)).or_default();
        lane.plans += 1;
        lane.blocks += plan.blocks.len();
    }

    /// `plan` has started, or is over before it did.
    pub(crate) fn leaves(&mut self, plan: &TransferPlan) {
        self.stats.queued_plans -= 1;
        self.stats.queued_blocks -= plan.blocks.len();
        self.change(plan, |lane| {
            lane.plans -= 1;
            lane.blocks -= plan.blocks.len();
        });
    }

    pub(crate) fn push(&mut self, plan: &TransferPlan, seq: u64) {
        self.lanes.entry(volume_of(plan)).or_default().ready.insert(place(plan, seq));
    }

    pub(crate) fn remove(&mut self, plan: &TransferPlan, seq: u64) {
        self.change(plan, |lane| {
            lane.ready.remove(&place(plan, seq));
        });
    }

    /// Changes the lane of `plan`, if there is one, and forgets it if nothing is left in it.
    fn change(&mut self, plan: &TransferPlan, change: impl FnOnce(&mut Lane)) {
        let volume = volume_of(plan);
        let Some(lane) = self.lanes.get_mut(&volume) else { return };
        change(lane);
        if lane.plans == 0 && lane.ready.is_empty() {
            self.lanes.remove(&volume);
        }
    }

    /// Whether a plan may be issued.
    pub(crate) fn is_ready(&self) -> bool {
        self.lanes.values().any(|lane| !lane.ready.is_empty())
    }

    /// The plan to issue next, of those that there is `room` for, which is asked once for each
    /// volume; and how much there is.
    pub(crate) fn next(&self, room: impl Fn(PlanId) -> usize) -> Option<(PlanId, usize)> {
        let firsts = self.lanes.values().filter_map(|lane| lane.ready.first());
        let rooms = firsts.map(|place| (place, room(place.2))).filter(|(_, room)| *room > 0);
        rooms.min_by_key(|(place, _)| **place).map(|((_, _, plan), room)| (*plan, room))
    }
}

fn place(plan: &TransferPlan, seq: u64) -> Place {
    (Reverse(plan.priority), seq, plan.plan_id)
}
