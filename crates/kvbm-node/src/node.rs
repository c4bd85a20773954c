//! What all sessions of a daemon share.

use crate::handover::HandoverTerms;
use crate::instances::{EngineInstance, EngineInstances};
use crate::movers::{Range, RankMovers};
use crate::protocol::{DaemonNotice, Load};
use kvbm::{BlockId, Engine, FinishedLoad, GroupKind, KvBlockManager, SharedHost};
use parking_lot::RwLock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the thread that tells of loads looks whether the daemon stops.
const TICK: Duration = Duration::from_millis(100);
/// Failures of a load that an engine is told.
const MAX_FAILURES: usize = 16;

/// What all sessions share.
pub(crate) struct Node {
    pub(crate) manager: KvBlockManager<Engine>,
    pub(crate) movers: Vec<Arc<RankMovers>>,
    pub(crate) hosts: Vec<SharedHost>,
    pub(crate) instances: Arc<EngineInstances>,
    /// What the layers of each cache group keep.
    pub(crate) kinds: Vec<GroupKind>,
    pub(crate) stopping: Arc<AtomicBool>,
    /// Whether calls that start transfers are carried out. They are under way with a lock on it.
    pub(crate) open: RwLock<bool>,
    /// What a daemon that takes over must agree on.
    pub(crate) handover_terms: HandoverTerms,
    /// Another daemon has its host memory.
    pub(crate) handed_over: AtomicBool,
}

impl Node {
    /// The blocks of an engine, as the manager knows them.
    fn blocks(range: Range) -> Vec<BlockId> {
        (range.first..range.end()).map(BlockId).collect()
    }

    /// Whether copies may touch blocks of an engine.
    pub(crate) fn is_busy(&self, range: Range) -> bool {
        self.manager.busy(&Self::blocks(range)).is_ok_and(|busy| !busy.is_empty())
    }

    /// Whether no engine's process is sent a copy any more.
    pub(crate) fn hold_copies(&self, held: bool) {
        self.movers.iter().for_each(|movers| movers.hold(held));
    }

    /// Reports loads that are over to their engines, until the daemon stops.
    pub(crate) fn report_finished_loads(&self) {
        let time = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        let tickets = self.manager.tickets();
        while !self.stopping.load(Ordering::Acquire) {
            match tickets.finished_fd() {
                Some(fd) => {
                    // An interrupted wait is a short one.
                    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time));
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            for load in tickets.finished() {
                let FinishedLoad { request, arrived, wanted, failures } = load;
                let Some((number, name)) = EngineInstance::split(&request) else { continue };
                let Some(instance) = self.instances.numbered(number) else { continue };
                let failures = failures.iter().take(MAX_FAILURES).map(ToString::to_string).collect();
                let (arrived, wanted) = (arrived as u32, wanted as u32);
                instance.notify(&DaemonNotice::Finished(Load {
                    request: name.to_owned(),
                    arrived,
                    wanted,
                    failures,
                }));
            }
        }
    }

    /// A session of `instance` ends, and with it the instance.
    pub(crate) fn leave(&self, instance: &Arc<EngineInstance>) {
        let is_last = self.instances.leave(instance);
        let prefix = instance.request("");
        self.manager.tickets().abandon_where(|request| request.starts_with(&prefix));
        // What is read from its blocks now is nothing that may be kept.
        let _known = self.manager.released(&Self::blocks(instance.range));
        if is_last {
            self.instances.retire(instance);
            tracing::info!(engine = instance.engine, "an engine is detached: its blocks of G1 are gone");
        }
    }
}
