//! Attaching to the daemon, and attaching again: one thread keeps an engine's process attached.
//!
//! A process is attached with all its lines, or with none. Where one of them ends, the others are
//! closed, copies under way run to their end, and only then is it said that loads have failed.

use crate::error::{NodeError, NotFree};
use crate::mover::{Mover, MoverMemory};
use crate::protocol::{Answer, Ask, Call, DaemonNotice, GroupIds, Role, Terms, Welcome, decode, encode};
use crate::shape::ModelShape;
use crate::terms::{EngineTerms, NodeLoad, NodeStatus, numbers};
use kvbm::BlockId;
use kvbm::plan::deadline_after;
use kvbm_link::{AttachedSender, DaemonLine, Lane, Welcomed};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How often an attached process looks whether the daemon is silent.
const TICK: Duration = Duration::from_millis(100);
/// A look that comes so late says that this process was stopped, not that the daemon is silent.
const STOPPED: Duration = Duration::from_millis(500);
/// First pause before the daemon is tried again; it doubles up to the line's `reconnect`.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Longest wait of one question about blocks that are to be reused.
const REUSE_STEP: Duration = Duration::from_millis(200);

type Reply = Result<Answer, String>;

/// What the calls, the lines and the thread share.
pub(crate) struct EngineAttachment {
    terms: EngineTerms,
    has_scheduler: bool,
    memories: Vec<MoverMemory>,
    pub(crate) notify: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    phase: Phase,
    movers: Vec<Arc<Mover>>,
    /// Movers of all ranks can copy, as the daemon says.
    ready: bool,
    /// Of the attachment: a line of an earlier one that ends says nothing.
    number: u64,
    next_call: u64,
    replies: HashMap<u64, SyncSender<Reply>>,
    /// Loads under way, and their blocks.
    loads: HashMap<String, usize>,
    finished: Vec<NodeLoad>,
    /// The latest point of the engine's work that this process has passed.
    passed: u64,
    /// The daemon did not answer in time, and has said nothing since.
    is_mute: bool,
    reason: String,
    ending: bool,
}

#[derive(Default)]
enum Phase {
    /// No line, and no copy.
    #[default]
    Detached,
    /// All lines.
    Attached { pid: i32, scheduler: Option<AttachedSender> },
    /// A line has ended; copies may be under way.
    Closing,
}

/// The lines of an attachment.
struct Lines {
    lines: Vec<DaemonLine>,
    movers: Vec<Arc<Mover>>,
}

impl EngineAttachment {
    pub(crate) fn new(
        terms: EngineTerms,
        has_scheduler: bool,
        memories: Vec<MoverMemory>,
    ) -> io::Result<Self> {
        let notify = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = State { reason: "not tried yet".into(), next_call: 1, ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Ok(Self { terms, has_scheduler, memories, notify, state, changed })
    }

    /// Keeps the process attached until it ends.
    pub(crate) fn run(self: &Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let number = {
                let mut state = self.state.lock();
                state.number += 1;
                state.number
            };
            match self.attach(number) {
                Ok(lines) => {
                    pause = FIRST_PAUSE;
                    self.stay(&lines, number);
                    self.close(lines);
                }
                Err(reason) => self.note(reason),
            }
            let mut state = self.state.lock();
            if !state.ending {
                self.changed.wait_until(&mut state, deadline_after(Instant::now(), pause));
            }
            if state.ending {
                drop(state);
                return self.leave();
            }
            drop(state);
            pause = (pause * 2).min(self.terms.times.reconnect.max(FIRST_PAUSE));
        }
    }

    /// Tells the daemon that this process copies no more: slots that it was to write are free.
    fn leave(&self) {
        for memory in &self.memories {
            let terms = self.offer(Role::Left(memory.rank.0), None);
            // A daemon that is gone has no slots; one that does not hear it waits for the process.
            let _ = Welcomed::attach(&self.terms.socket, &encode(&terms), self.terms.times);
        }
    }

    /// All lines; where one is refused, those before it are closed again.
    fn attach(self: &Arc<Self>, number: u64) -> Result<Lines, String> {
        let mut all = Lines { lines: Vec::new(), movers: Vec::new() };
        match self.attach_into(&mut all, number) {
            Ok(()) => Ok(all),
            Err(reason) => {
                self.close(all);
                Err(reason)
            }
        }
    }

    fn attach_into(self: &Arc<Self>, all: &mut Lines, number: u64) -> Result<(), String> {
        let mut unmapped = Vec::new();
        for memory in &self.memories {
            let (welcomed, mut welcome) = self.welcomed(Role::Mover(memory.rank.0), Some(memory))?;
            let mover = Arc::new(Mover::new(memory.rank, &welcome.0, welcomed.sender()));
            let own = Arc::clone(&mover);
            let line = self.start(welcomed, number, move |bytes| own.take(bytes))?;
            all.lines.push(line);
            all.movers.push(Arc::clone(&mover));
            unmapped.push((mover, memory, std::mem::take(&mut welcome.1), welcome.0));
        }
        let mut scheduler = None;
        if self.has_scheduler {
            let (welcomed, _) = self.welcomed(Role::Scheduler, None)?;
            scheduler = Some(welcomed.sender());
            let shared = Arc::clone(self);
            all.lines.push(self.start(welcomed, number, move |bytes| shared.take_notice(number, bytes))?);
        }
        let passed = {
            let mut state = self.state.lock();
            if state.number != number {
                return Err("a line ended while others were attached".into());
            }
            let pid = all.lines.first().map_or(0, DaemonLine::pid);
            state.phase = Phase::Attached { pid, scheduler };
            state.movers.clone_from(&all.movers);
            state.is_mute = false;
            state.passed
        };
        // A daemon that is new knows of no point.
        if passed > 0 {
            all.movers.iter().for_each(|mover| mover.passed(passed));
        }
        // Misses until the memory is mapped: locking its pages takes time.
        for (mover, memory, files, welcome) in unmapped {
            mover.start(memory, &welcome, files)?;
        }
        self.changed.notify_all();
        tracing::info!(
            target: "kvbm", engine = self.terms.engine, socket = %self.terms.socket.display(),
            "attached to the node daemon"
        );
        Ok(())
    }

    fn offer(&self, role: Role, memory: Option<&MoverMemory>) -> Terms {
        let EngineTerms { engine, blocks, ranks, replicas, namespace, groups, .. } = &self.terms;
        let g1 = memory.iter().flat_map(|memory| &memory.g1);
        Terms {
            role,
            engine: engine.clone(),
            blocks: *blocks,
            ranks: *ranks,
            namespace: namespace.map(|tag| *tag.as_bytes()),
            model: ModelShape::new(groups, g1.map(|g1| g1.layout().config())),
            host: None,
            replicas: *replicas,
        }
    }

    fn welcomed(
        &self,
        role: Role,
        memory: Option<&MoverMemory>,
    ) -> Result<(Welcomed, (Welcome, Vec<OwnedFd>)), String> {
        let terms = encode(&self.offer(role, memory));
        let welcomed = Welcomed::attach(&self.terms.socket, &terms, self.terms.times);
        let mut welcomed = welcomed.map_err(|error| error.to_string())?;
        let welcome = decode(&welcomed.welcome)?;
        let files = std::mem::take(&mut welcomed.files);
        Ok((welcomed, (welcome, files)))
    }

    fn start(
        self: &Arc<Self>,
        welcomed: Welcomed,
        number: u64,
        take: impl FnMut(&[u8]) + Send + 'static,
    ) -> Result<DaemonLine, String> {
        let shared = Arc::clone(self);
        let line = welcomed.start(take, move |reason| shared.line_ended(number, &reason));
        line.map_err(|error| format!("no thread for a line: {error}"))
    }

    /// Why the daemon is not attached is logged when it changes, not at every try.
    fn note(&self, reason: String) {
        let mut state = self.state.lock();
        if state.reason != reason {
            tracing::warn!(
                target: "kvbm", engine = self.terms.engine, socket = %self.terms.socket.display(),
                "not attached to the node daemon, everything is a miss: {reason}"
            );
            state.reason = reason;
        }
    }

    fn line_ended(&self, number: u64, reason: &str) {
        let mut state = self.state.lock();
        if state.number == number {
            // No line of this attachment counts any more.
            state.number += 1;
            state.reason = format!("the line to the daemon ended: {reason}");
            state.begin_closing();
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Returns when a line has ended, the daemon is silent, or the process detaches.
    fn stay(&self, lines: &Lines, number: u64) {
        let mut silent_ticks = 0;
        let mut before = Instant::now();
        let mut state = self.state.lock();
        while state.number == number && !state.ending {
            self.changed.wait_until(&mut state, before + TICK);
            let now = Instant::now();
            let stopped = now.duration_since(before) > STOPPED;
            before = now;
            let silence = lines.lines.iter().map(DaemonLine::silence).max().unwrap_or_default();
            silent_ticks =
                if silence > self.terms.times.silent_after && !stopped { silent_ticks + 1 } else { 0 };
            if silent_ticks > 2 {
                state.reason = format!("the daemon has been silent for {} ms", silence.as_millis());
                break;
            }
        }
        if state.number == number {
            state.number += 1;
        }
        state.begin_closing();
    }

    /// Ends all lines, waits for the copies under way, and says that loads have failed.
    fn close(&self, lines: Lines) {
        let Lines { lines, movers } = lines;
        self.state.lock().begin_closing();
        drop(lines);
        for mover in &movers {
            mover.end();
        }
        let mut state = self.state.lock();
        if self.memories.is_empty() && !state.loads.is_empty() && !state.ending {
            // Movers of other processes close their lines to a silent daemon within this time.
            let until = deadline_after(Instant::now(), 2 * self.terms.times.silent_after);
            while !state.ending && Instant::now() < until {
                self.changed.wait_until(&mut state, until);
            }
        }
        state.movers.clear();
        state.ready = false;
        state.phase = Phase::Detached;
        let failures = vec![state.reason.clone()];
        let loads: Vec<_> = state.loads.drain().collect();
        let failed = !loads.is_empty();
        for (request, wanted) in loads {
            state.finished.push(NodeLoad { request, arrived: 0, wanted, failures: failures.clone() });
        }
        drop(state);
        self.changed.notify_all();
        if failed {
            self.ring();
        }
    }

    /// Makes the descriptor of finished loads readable.
    fn ring(&self) {
        // A counter that is full is readable as well.
        let _ = rustix::io::write(&self.notify, &1_u64.to_ne_bytes());
    }

    /// Takes what the daemon tells the scheduler.
    fn take_notice(&self, number: u64, bytes: &[u8]) {
        self.state.lock().is_mute = false;
        match decode::<DaemonNotice>(bytes) {
            Ok(DaemonNotice::Answer { id, answer }) => {
                let reply = self.state.lock().replies.remove(&id);
                if let Some(reply) = reply {
                    // Whoever asked may have gone.
                    let _ = reply.send(answer);
                }
            }
            Ok(DaemonNotice::Finished(load)) => {
                let mut state = self.state.lock();
                if state.number == number && state.loads.remove(&load.request).is_some() {
                    state.finished.push(load.into());
                    drop(state);
                    self.ring();
                }
            }
            Ok(DaemonNotice::Movers(ready)) => {
                let mut state = self.state.lock();
                state.ready = ready && state.number == number;
                drop(state);
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(target: "kvbm", "the daemon sent what means nothing: {error}"),
        }
    }
}

impl State {
    fn begin_closing(&mut self) {
        self.ready = false;
        // Whoever waits for an answer learns at once that none comes.
        self.replies.clear();
        if matches!(self.phase, Phase::Attached { .. }) {
            self.phase = Phase::Closing;
        }
    }
}

/// Calls.
impl EngineAttachment {
    pub(crate) fn end(&self) {
        self.state.lock().ending = true;
        self.changed.notify_all();
    }

    pub(crate) fn status(&self) -> NodeStatus {
        let state = self.state.lock();
        match &state.phase {
            Phase::Attached { pid, .. } => {
                NodeStatus::Attached { pid: *pid, ready: state.ready, number: state.number }
            }
            Phase::Detached | Phase::Closing => NodeStatus::Detached { reason: state.reason.clone() },
        }
    }

    pub(crate) fn wait_ready(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        loop {
            let attached = matches!(state.phase, Phase::Attached { .. });
            if attached && (state.ready || !self.has_scheduler) {
                return true;
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
    }

    fn detached(&self, reason: &str) -> NodeError {
        NodeError::Detached { socket: self.terms.socket.display().to_string(), reason: reason.to_owned() }
    }

    /// The scheduler's line.
    fn line(&self, state: &State) -> Result<AttachedSender, NodeError> {
        if !self.has_scheduler {
            return Err(NodeError::NoScheduler);
        }
        match &state.phase {
            Phase::Attached { scheduler: Some(line), .. } if state.ready => Ok(line.clone()),
            Phase::Attached { .. } => Err(self.detached("movers of some ranks are not ready")),
            Phase::Detached | Phase::Closing => Err(self.detached(&state.reason)),
        }
    }

    /// Asks the daemon. One that did not answer the last time is not waited for again before it
    /// says something.
    pub(crate) fn call(&self, ask: Ask) -> Result<Answer, NodeError> {
        let time = self.terms.call_time;
        if self.state.lock().is_mute {
            return Err(NodeError::Late(time));
        }
        self.call_within(ask, time)
    }

    fn call_within(&self, ask: Ask, time: Duration) -> Result<Answer, NodeError> {
        ask.check().map_err(NodeError::Refused)?;
        let (reply, answer) = sync_channel(1);
        let (line, id) = {
            let mut state = self.state.lock();
            let line = self.line(&state)?;
            let id = state.next_call;
            state.next_call += 1;
            state.replies.insert(id, reply);
            (line, id)
        };
        let sent = line.send(Lane::Bulk, &encode(&Call { id, ask }));
        let outcome = match sent {
            Ok(()) => answer.recv_timeout(time),
            Err(error) => {
                self.state.lock().replies.remove(&id);
                return Err(self.detached(&error.to_string()));
            }
        };
        match outcome {
            Ok(reply) => reply.map_err(NodeError::Refused),
            Err(RecvTimeoutError::Disconnected) => Err(self.detached("the line ended")),
            Err(RecvTimeoutError::Timeout) => {
                let mut state = self.state.lock();
                state.replies.remove(&id);
                state.is_mute |= time >= self.terms.call_time;
                Err(NodeError::Late(time))
            }
        }
    }

    /// Sends what nobody awaits an answer to.
    pub(crate) fn send_unanswered(&self, ask: Ask) {
        let line = self.line(&self.state.lock());
        if let Ok(line) = line {
            // A daemon that is gone counts no iterations.
            let _ = line.send(Lane::Bulk, &encode(&Call { id: 0, ask }));
        }
    }

    pub(crate) fn commit(
        &self,
        request: &str,
        ids: &[&[BlockId]],
        after: Option<u64>,
        time: Option<Duration>,
    ) -> Result<(), NodeError> {
        let wait_ms = time.map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1));
        let after = after.unwrap_or(0);
        let groups = self.terms.groups.len();
        if ids.len() != groups {
            let given = ids.len();
            return Err(NodeError::Refused(format!(
                "{given} lists of block ids, and the engine has {groups} cache groups: give a list for each"
            )));
        }
        let ids = GroupIds::of(ids);
        let wanted = ids.blocks() as usize;
        let ask = Ask::Commit { request: request.to_owned(), ids, after, wait_ms };
        ask.check().map_err(NodeError::Refused)?;
        let mut state = self.state.lock();
        let line = self.line(&state)?;
        if state.loads.contains_key(request) {
            return Err(NodeError::Refused(format!("request {request} is being loaded")));
        }
        // The outcome comes after it is awaited.
        state.loads.insert(request.to_owned(), wanted);
        let number = state.number;
        drop(state);
        let sent = line.send(Lane::Bulk, &encode(&Call { id: 0, ask }));
        let Err(error) = sent else { return Ok(()) };
        let mut state = self.state.lock();
        // Where the attachment ended meanwhile, the load has failed, and `finished` says so.
        if state.number == number && state.loads.remove(request).is_some() {
            return Err(self.detached(&error.to_string()));
        }
        Ok(())
    }

    /// The engine has passed this point of its work, and all before it.
    pub(crate) fn passed(&self, number: u64) {
        let mut state = self.state.lock();
        state.passed = state.passed.max(number);
        let movers = state.movers.clone();
        drop(state);
        for mover in movers {
            mover.passed(number);
        }
    }

    /// The engine's blocks change from now on, whatever the daemon knows of it. One that does not
    /// say that it has heard may keep what a copy reads of them: so no copy of this process may
    /// outlast this.
    pub(crate) fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NodeError> {
        let asked = Ask::Released { ids: numbers(ids) };
        match self.call_within(asked, self.terms.call_time) {
            Ok(Answer::Blocks(busy)) => return Ok(busy.into_iter().map(BlockId).collect()),
            Err(error @ (NodeError::Refused(_) | NodeError::NoScheduler)) => return Err(error),
            Ok(_) | Err(_) => {}
        }
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Attached { .. }) && state.ready {
            state.number += 1;
            state.reason = "the daemon did not confirm in time which blocks are reused".into();
            state.begin_closing();
            self.changed.notify_all();
        }
        while matches!(state.phase, Phase::Closing) && !state.movers.is_empty() {
            // Copies in memory, which end by themselves.
            self.changed.wait(&mut state);
        }
        Ok(Vec::new())
    }

    pub(crate) fn finished(&self) -> Vec<NodeLoad> {
        // Nothing to read where no load has ended since.
        let _ = rustix::io::read(&self.notify, &mut [0_u8; 8]);
        std::mem::take(&mut self.state.lock().finished)
    }

    pub(crate) fn wait_idle(&self, ids: &[BlockId], deadline: Instant) -> Result<(), NotFree> {
        let movers = self.state.lock().movers.clone();
        movers
            .iter()
            .try_for_each(|mover| mover.wait_idle(ids, deadline).map_err(|blocks| NotFree { blocks }))
    }

    pub(crate) fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), NotFree> {
        loop {
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let wait_ms = u32::try_from(left.min(REUSE_STEP).as_millis()).unwrap_or(0);
            let asked = Ask::BeforeReuse { ids: numbers(ids), wait_ms };
            let patience = self.terms.call_time.min(left) + Duration::from_millis(wait_ms.into());
            let busy = match self.call_within(asked, patience) {
                Ok(Answer::Blocks(busy)) if busy.is_empty() => return self.wait_idle(ids, deadline),
                Ok(Answer::Blocks(busy)) => busy.into_iter().map(BlockId).collect(),
                // Nobody but this process' movers copies, and they have ended.
                Err(NodeError::Detached { .. }) if self.is_quiet() => return Ok(()),
                _ => ids.to_vec(),
            };
            if now >= deadline {
                return Err(NotFree { blocks: busy });
            }
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Closing) {
                self.changed.wait_until(&mut state, deadline);
            } else if !matches!(state.phase, Phase::Attached { .. }) || !state.ready {
                self.changed.wait_until(&mut state, deadline.min(now + TICK));
            }
        }
    }

    /// Whether no copy can be under way: there is no line, or its movers were never ready.
    fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        match state.phase {
            Phase::Detached => true,
            Phase::Attached { .. } => !state.ready,
            Phase::Closing => false,
        }
    }
}
