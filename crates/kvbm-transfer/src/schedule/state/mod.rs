//! The state of a worker's plans and its transitions: queued -> started -> over.

mod admit;
mod run;
mod waits;

use super::gates::Gates;
use super::history::History;
use super::job::{Job, Replies};
use super::queue::{PathLimits, PathQueue};
use crate::finished::FinishedPlans;
use crate::report_slot::ReportSlot;
use crate::stats::PathStats;
use kvbm_plan::{BlockId, Endpoint, Epoch, Message, Path, PlanId, Rank, Tier, TransferReport};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// What a worker has of a cache group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupLimits {
    /// Slots per tier, 0 where there is none.
    pub(crate) slots: [u32; Tier::ALL.len()],
    /// Layers of a block.
    pub(crate) layers: u32,
}

/// What a worker is, as far as scheduling goes.
pub(crate) struct Limits {
    pub(crate) rank: Rank,
    pub(crate) epoch: Epoch,
    /// Of each cache group, by its id.
    pub(crate) groups: Vec<GroupLimits>,
    /// Queue bounds of each path of [`Path::ALL`], or why the worker does not have it.
    pub(crate) paths: [Result<PathLimits, String>; Path::ALL.len()],
    /// Reports and messages that may wait for the sink before submissions are refused.
    pub(crate) outgoing: usize,
}

/// Who asked for a plan.
pub(crate) enum Reply {
    /// The leader, through the sink.
    Sink,
    /// A handle.
    Handle(Arc<ReportSlot>),
}

/// Something for the sink.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// The report, this many times.
    Report(Arc<TransferReport>, u32),
    /// Anything else.
    Message(Message),
}

/// Plans, queues, gates and history. See the module's documentation.
pub(crate) struct State {
    limits: Limits,
    queues: [PathQueue; Path::ALL.len()],
    jobs: HashMap<PlanId, Job>,
    /// Plans that wait for the end of the key.
    dependents: HashMap<PlanId, Vec<PlanId>>,
    deadlines: BTreeSet<(Instant, PlanId)>,
    gates: Gates,
    history: History,
    /// Finished plans with a tag.
    pub(crate) finished: FinishedPlans,
    seq: u64,
    closing: bool,
    /// (finished plan, whether all of it arrived, plan that waited for it), not yet told.
    ripple: VecDeque<(PlanId, bool, PlanId)>,
    outgoing: VecDeque<Delivery>,
    /// Reports for handles, to be put without the lock.
    notices: Vec<(Arc<ReportSlot>, Arc<TransferReport>)>,
    /// Paths whose executors have something new to look at.
    wake: [bool; Path::ALL.len()],
    /// Paths of which an executor looked for blocks and got none. The others have no room: they
    /// look by themselves when they have.
    hungry: [bool; Path::ALL.len()],
    /// Paths that got nothing because another goes first, and have not been told to look again.
    yielded: [bool; Path::ALL.len()],
}

/// Index of `path` in [`Path::ALL`].
fn index_of(path: Path) -> Option<usize> {
    Path::ALL.iter().position(|known| *known == path)
}

impl State {
    pub(crate) fn new(limits: Limits) -> Self {
        let queues =
            std::array::from_fn(|index| PathQueue::new(Path::ALL[index], limits.paths[index].clone()));
        Self {
            limits,
            queues,
            jobs: HashMap::new(),
            dependents: HashMap::new(),
            deadlines: BTreeSet::new(),
            gates: Gates::default(),
            history: History::default(),
            finished: FinishedPlans::default(),
            seq: 0,
            closing: false,
            ripple: VecDeque::new(),
            outgoing: VecDeque::new(),
            notices: Vec::new(),
            wake: [false; Path::ALL.len()],
            hungry: [true; Path::ALL.len()],
            yielded: [false; Path::ALL.len()],
        }
    }

    fn deliver(&mut self, report: &Arc<TransferReport>, replies: Replies) {
        if replies.sink > 0 {
            self.outgoing.push_back(Delivery::Report(Arc::clone(report), replies.sink));
        }
        self.notices.extend(replies.handles.into_iter().map(|slot| (slot, Arc::clone(report))));
    }

    /// Queues a message for the sink.
    pub(crate) fn send(&mut self, message: Message) {
        self.outgoing.push_back(Delivery::Message(message));
    }

    pub(crate) fn next_delivery(&mut self) -> Option<Delivery> {
        self.outgoing.pop_front()
    }

    pub(crate) fn take_notices(&mut self) -> Vec<(Arc<ReportSlot>, Arc<TransferReport>)> {
        std::mem::take(&mut self.notices)
    }

    pub(crate) fn take_wakes(&mut self) -> [bool; Path::ALL.len()] {
        std::mem::take(&mut self.wake)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Accepted plans without a report.
    pub(crate) fn live_plans(&self) -> usize {
        self.jobs.len()
    }

    /// Which of these blocks of G1 an accepted plan touches, in order.
    pub(crate) fn busy_blocks(&self, blocks: &HashSet<BlockId>) -> Vec<BlockId> {
        let mut busy = BTreeSet::new();
        for plan in self.jobs.values().map(|job| &job.plan) {
            let of_g1 = [plan.src, plan.dst].map(|end| end == Endpoint::Local(Tier::G1));
            for moved in &plan.blocks {
                let ends = [moved.src, moved.dst].into_iter().zip(of_g1);
                busy.extend(ends.filter(|(id, g1)| *g1 && blocks.contains(id)).map(|(id, _)| id));
            }
        }
        busy.into_iter().collect()
    }

    pub(crate) fn outgoing_len(&self) -> usize {
        self.outgoing.len()
    }

    pub(crate) fn path_stats(&self) -> [PathStats; Path::ALL.len()] {
        std::array::from_fn(|index| self.queues[index].stats)
    }
}
