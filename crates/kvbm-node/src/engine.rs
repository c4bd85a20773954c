//! The engine's side: calls of its scheduler, and movers on its ranks.

use crate::attachment::EngineAttachment;
use crate::error::{NodeError, NotFree};
use crate::mover::MoverMemory;
use crate::protocol::{Answer, Ask, ChainRun};
use crate::terms::{EngineTerms, NodeLoad, NodeOffload, NodePromise, NodeStatus, numbers};
use kvbm::device::Event;
use kvbm::plan::deadline_after;
use kvbm::tokens::NamespaceTag;
use kvbm::{BlockChain, BlockId, GroupId, LookUp};
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a daemon is asked whether it has settled.
const SETTLE_TICK: Duration = Duration::from_millis(2);

/// A process of an engine that keeps its cache in a node daemon.
///
/// It attaches in the background, and again whenever the daemon was gone. Meanwhile everything is a
/// miss: no call fails for want of a daemon but those that say so. Dropping it detaches: it returns
/// when nothing is copied any more.
pub struct NodeEngine {
    shared: Arc<EngineAttachment>,
    thread: Option<JoinHandle<()>>,
}

impl NodeEngine {
    /// Begins to attach. `scheduler`: whether this process makes the engine's calls; one does.
    /// `movers`: the blocks of the ranks that this process copies for.
    ///
    /// # Errors
    /// [`NodeError::System`]; [`NodeError::Groups`]: a mover's memory is not that of the engine's
    /// cache groups.
    pub fn attach(terms: EngineTerms, scheduler: bool, movers: Vec<MoverMemory>) -> Result<Self, NodeError> {
        let needed = terms.groups.len();
        if let Some(other) = movers.iter().find(|mover| mover.g1.len() != needed) {
            return Err(NodeError::Groups { rank: other.rank, found: other.g1.len(), needed });
        }
        let system = |error: std::io::Error| NodeError::System(error.to_string());
        let shared = Arc::new(EngineAttachment::new(terms, scheduler, movers).map_err(system)?);
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvbm-attach".into()).spawn(move || own.run());
        Ok(Self { shared, thread: Some(thread.map_err(system)?) })
    }

    /// How it is attached.
    pub fn status(&self) -> NodeStatus {
        self.shared.status()
    }

    /// Waits until the process is attached and, where it has the scheduler, all movers are ready;
    /// `time` at most. Whether that was reached.
    pub fn wait_ready(&self, time: Duration) -> bool {
        self.shared.wait_ready(deadline_after(Instant::now(), time))
    }

    /// What is there for `request` of `chain` from block `first` on, as
    /// [`Tickets::look_up`](kvbm::Tickets::look_up) says. Nothing, where there is no daemon or it
    /// does not answer in time.
    ///
    /// # Errors
    /// [`NodeError::Refused`]: the request is being loaded. [`NodeError::NoScheduler`].
    pub fn look_up<'a>(
        &self,
        request: &str,
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<LookUp, NodeError> {
        self.look_up_groups(request, chain, first).map(|promise| promise.found)
    }

    /// As [`look_up`](Self::look_up), with the blocks of each cache group.
    ///
    /// # Errors
    /// As [`look_up`](Self::look_up).
    pub fn look_up_groups<'a>(
        &self,
        request: &str,
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<NodePromise, NodeError> {
        let run = ChainRun::of(chain.into());
        let ask = Ask::LookUp { request: request.to_owned(), run, first: first as u32 };
        match self.shared.call(ask) {
            Ok(Answer::Pending) => Ok(NodePromise { found: LookUp::Pending, groups: Vec::new() }),
            Ok(Answer::Ready { blocks, by_tier, promised }) => {
                let by_tier = by_tier.map(|count| count as usize);
                let found = LookUp::Ready { blocks: blocks as usize, by_tier };
                let range = |(first, end): (u32, u32)| first as usize..end as usize;
                Ok(NodePromise { found, groups: promised.into_iter().map(range).collect() })
            }
            Ok(_) | Err(NodeError::Detached { .. } | NodeError::Late(_)) => Ok(NodePromise::nothing()),
            Err(error) => Err(error),
        }
    }

    /// Starts the load of the first `ids.len()` promised blocks into `ids`. The outcome comes from
    /// [`finished`](Self::finished), also where the daemon has no ticket for the request.
    ///
    /// # Errors
    /// [`NodeError::Detached`]: nothing was started, and nothing comes from `finished`.
    pub fn commit(&self, request: &str, ids: &[BlockId]) -> Result<(), NodeError> {
        self.commit_with(request, ids, None, None)
    }

    /// Like [`commit`](Self::commit). The copies wait until the engine has passed point `after` of
    /// its work on every rank ([`signal`](Self::signal)). After `time` the load is over, with what
    /// has arrived.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_with(
        &self,
        request: &str,
        ids: &[BlockId],
        after: Option<u64>,
        time: Option<Duration>,
    ) -> Result<(), NodeError> {
        self.commit_groups(request, &[ids], after, time)
    }

    /// As [`commit_with`](Self::commit_with), with an id for each block of each cache group that
    /// [`look_up_groups`](Self::look_up_groups) has named. All of them arrive or none. No ids in
    /// any group end the ticket.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); [`NodeError::Refused`]: not a list for each cache group.
    pub fn commit_groups(
        &self,
        request: &str,
        ids: &[&[BlockId]],
        after: Option<u64>,
        time: Option<Duration>,
    ) -> Result<(), NodeError> {
        if ids.iter().all(|ids| ids.is_empty()) {
            return self.abandon(request).map(|_known| ());
        }
        self.shared.commit(request, ids, after, time)
    }

    /// The engine passes point `number` of its work on the ranks of this process when `event` is
    /// complete, and all points before it. Numbers grow, over all processes of the engine alike.
    pub fn signal(&self, number: u64, event: &Event) {
        let shared = Arc::downgrade(&self.shared);
        event.on_complete(move |result| match (result, shared.upgrade()) {
            (Ok(()), Some(shared)) => shared.passed(number),
            (Ok(()), None) => {}
            // What waits for it ends at its deadline, as a miss.
            (Err(error), _) => tracing::warn!(target: "kvbm", number, %error, "the engine's work failed"),
        });
    }

    /// Drops the request's ticket, or gives up its load, which still comes from
    /// [`finished`](Self::finished). Whether there was one.
    ///
    /// # Errors
    /// [`NodeError::NoScheduler`].
    pub fn abandon(&self, request: &str) -> Result<bool, NodeError> {
        match self.shared.call(Ask::Abandon { request: request.to_owned() }) {
            Ok(Answer::Known(known)) => Ok(known),
            // The ticket ends by itself, or has ended with its instance.
            Ok(_) | Err(NodeError::Detached { .. } | NodeError::Late(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Loads that are over, each once, and only when no copy of this process can write to their
    /// blocks any more. Where other processes have movers, those ask
    /// [`wait_idle`](Self::wait_idle) before they write to blocks of a load that failed.
    pub fn finished(&self) -> Vec<NodeLoad> {
        self.shared.finished()
    }

    /// A descriptor that is readable when [`finished`](Self::finished) may have something.
    pub fn finished_fd(&self) -> BorrowedFd<'_> {
        self.shared.notify.as_fd()
    }

    /// Copies blocks to host memory in the background, as
    /// [`KvBlockManager::offload`](kvbm::KvBlockManager::offload) says. Nothing is started where
    /// there is no daemon.
    ///
    /// # Errors
    /// [`NodeError::Refused`] says why; [`NodeError::NoScheduler`].
    pub fn offload<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<NodeOffload, NodeError> {
        self.offload_after(ids, chain, first, None)
    }

    /// Like [`offload`](Self::offload): the blocks hold their bytes when the engine has passed
    /// point `after` of its work on every rank ([`signal`](Self::signal)).
    ///
    /// # Errors
    /// As [`offload`](Self::offload).
    pub fn offload_after<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<u64>,
    ) -> Result<NodeOffload, NodeError> {
        self.offload_group(GroupId(0), ids, chain, first, after)
    }

    /// As [`offload_after`](Self::offload_after), of blocks of a cache group. Those of a window or
    /// state may begin anywhere in the sequence.
    ///
    /// # Errors
    /// As [`offload`](Self::offload).
    pub fn offload_group<'a>(
        &self,
        group: GroupId,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<u64>,
    ) -> Result<NodeOffload, NodeError> {
        let (run, after) = (ChainRun::of(chain.into()), after.unwrap_or(0));
        let ask = Ask::Offload { group: group.0, ids: numbers(ids), run, first: first as u32, after };
        match self.shared.call(ask) {
            Ok(Answer::Started { started, present, refused }) => Ok(NodeOffload {
                started: started as usize,
                present: present as usize,
                refused: refused.into_iter().map(|(id, why)| (BlockId(id), why)).collect(),
            }),
            Ok(_) | Err(NodeError::Detached { .. } | NodeError::Late(_)) => Ok(NodeOffload::default()),
            Err(error) => Err(error),
        }
    }

    /// The engine has no more use for the content of these blocks, and may overwrite them: what a
    /// copy reads of them from now on is not kept. Those that a copy still touches. Where the
    /// daemon does not answer in time, this process detaches, and the call returns when its movers
    /// have ended. Movers of other processes then ask [`wait_idle`](Self::wait_idle).
    ///
    /// # Errors
    /// [`NodeError::Refused`]: a block that does not exist. [`NodeError::NoScheduler`].
    pub fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NodeError> {
        self.shared.released(ids)
    }

    /// Those of `ids` that a copy touches, as far as the daemon says; none without a daemon.
    ///
    /// # Errors
    /// [`NodeError::Refused`]: a block that does not exist. [`NodeError::NoScheduler`].
    pub fn busy(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NodeError> {
        match self.shared.call(Ask::Busy { ids: numbers(ids) }) {
            Ok(Answer::Blocks(busy)) => Ok(busy.into_iter().map(BlockId).collect()),
            Ok(_) | Err(NodeError::Detached { .. } | NodeError::Late(_)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// A request for `chain` will come: has what only the disk has of it copied to host memory. How
    /// many blocks are; 0 without a daemon.
    ///
    /// # Errors
    /// [`NodeError::Refused`], [`NodeError::NoScheduler`].
    pub fn prefetch<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Result<u64, NodeError> {
        self.bring_up(Ask::Prefetch { run: ChainRun::of(chain.into()) })
    }

    /// The session of `chain` goes on soon: its blocks count as used now, and
    /// [`prefetch`](Self::prefetch) begins. How many blocks it copies; 0 without a daemon.
    ///
    /// # Errors
    /// As [`prefetch`](Self::prefetch).
    pub fn session_resumes<'a>(&self, chain: impl Into<BlockChain<'a>>) -> Result<u64, NodeError> {
        self.bring_up(Ask::SessionResumes { run: ChainRun::of(chain.into()) })
    }

    /// How many blocks the daemon brings up; a hint is lost where it does not answer.
    fn bring_up(&self, ask: Ask) -> Result<u64, NodeError> {
        match self.shared.call(ask) {
            Ok(Answer::Count(started)) => Ok(started),
            Ok(_) | Err(NodeError::Detached { .. } | NodeError::Late(_)) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Removes the blocks of a namespace from all tiers, for all engines. How many went; disks make
    /// it durable later.
    ///
    /// # Errors
    /// [`NodeError`]: it is not known whether anything was removed.
    pub fn forget(&self, namespace: NamespaceTag) -> Result<u64, NodeError> {
        match self.shared.call(Ask::Forget { namespace: *namespace.as_bytes() })? {
            Answer::Count(removed) => Ok(removed),
            other => Err(NodeError::Refused(format!("{other:?} is no answer to this call"))),
        }
    }

    /// Waits until no block of any engine is on its way down; `time` at most. Whether that was
    /// reached.
    ///
    /// # Errors
    /// [`NodeError`]: the daemon does not say.
    pub fn wait_offloads(&self, time: Duration) -> Result<bool, NodeError> {
        let until = deadline_after(Instant::now(), time);
        loop {
            let settled = self.shared.call(Ask::Settled)? == Answer::Known(true);
            if settled || Instant::now() >= until {
                return Ok(settled);
            }
            std::thread::sleep(SETTLE_TICK);
        }
    }

    /// The engine computed so many tokens of prompts in this time. Nobody waits for the daemon to
    /// hear of it.
    pub fn prefilled(&self, tokens: u64, elapsed: Duration) {
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.shared.send_unanswered(Ask::Prefilled { tokens, micros });
    }

    /// Makes sure that these blocks can be overwritten. Copies under way are discarded, and the
    /// call returns when none touches the blocks, by the daemon's word and by the movers' of this
    /// process.
    ///
    /// # Errors
    /// [`NotFree`] at `deadline`.
    pub fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), NotFree> {
        self.shared.before_reuse(ids, deadline)
    }

    /// Waits until no copy that a mover of this process has accepted touches these blocks.
    ///
    /// # Errors
    /// [`NotFree`] at `deadline`.
    pub fn wait_idle(&self, ids: &[BlockId], deadline: Instant) -> Result<(), NotFree> {
        self.shared.wait_idle(ids, deadline)
    }

    /// An iteration of the engine is over. Nobody waits for the daemon to hear of it.
    pub fn step(&self) {
        self.shared.send_unanswered(Ask::Step);
    }

    /// Tickets and loads that the daemon has, of all its engines.
    ///
    /// # Errors
    /// [`NodeError`]: it does not answer.
    pub fn counts(&self) -> Result<(usize, usize), NodeError> {
        match self.shared.call(Ask::Count)? {
            Answer::Counts { tickets, loads } => Ok((tickets as usize, loads as usize)),
            other => Err(NodeError::Refused(format!("{other:?} is no answer to this call"))),
        }
    }
}

impl Drop for NodeEngine {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take() {
            // What panicked has said so.
            let _ = thread.join();
        }
    }
}
