//! The movers of one rank, as the daemon's worker sees them: it hands them copies, and hears what
//! came of them.

use crate::protocol::{Moved, decode};
use kvbm::plan::{BlockOutcome, Command, Failure, FailureKind, Message, Tier, TransferPlan, wire};
use kvbm::{BlockId, MoveDone, Movers};
use kvbm_link::{AttachedSender, Lane, ProcessState};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a look at a process that does not answer may take.
const LOOK: Duration = Duration::from_millis(200);

/// Blocks of one engine, in the id space of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: u32,
    pub(crate) blocks: u32,
}

impl Range {
    pub(crate) fn end(self) -> u32 {
        self.first + self.blocks
    }

    /// The engine's own ids in the id space of all; the first that it does not have otherwise.
    pub(crate) fn shared(self, ids: &[u32]) -> Result<Vec<BlockId>, u32> {
        let shared = |id: &u32| if *id < self.blocks { Ok(BlockId(self.first + id)) } else { Err(*id) };
        ids.iter().map(shared).collect()
    }

    /// And back.
    pub(crate) fn own(self, ids: &[BlockId]) -> Vec<u32> {
        ids.iter().map(|id| id.0.saturating_sub(self.first)).collect()
    }
}

/// What a mover sent that is no report of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoverNotice {
    /// Nothing else.
    Nothing,
    /// It can copy from now on.
    Ready,
    /// The engine has passed this point of its work.
    Passed(u64),
}

/// All movers of a rank, by the first block of their engine.
#[derive(Default)]
pub(crate) struct RankMovers {
    sessions: Mutex<BTreeMap<u32, Arc<MoverSession>>>,
}

/// One mover: a process, until it has ended or attached anew.
pub(crate) struct MoverSession {
    pub(crate) engine: String,
    pub(crate) range: Range,
    out: AttachedSender,
    pending: Mutex<Pending>,
    /// Nothing of this session touches memory any more.
    is_over: AtomicBool,
}

#[derive(Default)]
struct Pending {
    copies: HashMap<u64, MoveDone>,
    /// The line has ended: no copy reaches the process.
    closed: bool,
    /// No copy is sent for now.
    held: bool,
}

impl RankMovers {
    pub(crate) fn add(&self, session: &Arc<MoverSession>) {
        self.sessions.lock().insert(session.range.first, Arc::clone(session));
    }

    pub(crate) fn remove(&self, session: &MoverSession) {
        let mut sessions = self.sessions.lock();
        let first = session.range.first;
        if sessions.get(&first).is_some_and(|known| std::ptr::eq(&raw const **known, session)) {
            sessions.remove(&first);
        }
    }

    /// Earlier sessions of a process that attaches anew are over: it says so by that.
    pub(crate) fn attached_anew(&self, engine: &str, pid: i32) {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        for known in sessions.iter().filter(|known| known.engine == engine && known.out.pid() == pid) {
            known.closed();
            known.over();
        }
    }

    /// Whether copies are refused from now on, and not sent; those that were sent go on.
    pub(crate) fn hold(&self, held: bool) {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        for session in sessions {
            session.pending.lock().held = held;
        }
    }

    /// Processes that have copies.
    pub(crate) fn copying(&self) -> Vec<i32> {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let has_copies = |session: &&Arc<MoverSession>| !session.pending.lock().copies.is_empty();
        sessions.iter().filter(has_copies).map(|session| session.pid()).collect()
    }

    fn of(&self, plan: &TransferPlan) -> Option<Arc<MoverSession>> {
        let at_g1 = plan.src.tier() == Tier::G1;
        let mut ids = plan.blocks.iter().map(|block| if at_g1 { block.src.0 } else { block.dst.0 });
        let first = ids.next()?;
        let sessions = self.sessions.lock();
        let (_, session) = sessions.range(..=first).next_back()?;
        let is_theirs = |id: u32| (session.range.first..session.range.end()).contains(&id);
        (is_theirs(first) && ids.all(is_theirs)).then(|| Arc::clone(session))
    }
}

impl Movers for RankMovers {
    fn copy(&self, mut plan: TransferPlan, done: MoveDone) {
        let blocks = plan.blocks.len();
        let Some(session) = self.of(&plan) else {
            return done(failed(blocks, "the engine of these blocks is gone"));
        };
        let at_g1 = plan.src.tier() == Tier::G1;
        for block in &mut plan.blocks {
            let id = if at_g1 { &mut block.src } else { &mut block.dst };
            id.0 -= session.range.first;
        }
        session.copy(plan, done);
    }
}

impl MoverSession {
    pub(crate) fn new(engine: String, range: Range, out: AttachedSender) -> Self {
        Self { engine, range, out, pending: Mutex::default(), is_over: AtomicBool::new(false) }
    }

    fn copy(&self, plan: TransferPlan, done: MoveDone) {
        let (id, blocks) = (plan.plan_id.0, plan.blocks.len());
        let command = wire::encode_command(&Command::Transfer(plan));
        let mut pending = self.pending.lock();
        if pending.closed || pending.held {
            let why = if pending.closed {
                "the engine's process is gone"
            } else {
                "another daemon takes the place of this one"
            };
            drop(pending);
            return done(failed(blocks, why));
        }
        // The answer comes after it is awaited.
        pending.copies.insert(id, done);
        drop(pending);
        let sent = command.map_err(|error| error.to_string());
        let sent =
            sent.and_then(|bytes| self.out.send(Lane::Bulk, &bytes).map_err(|error| error.to_string()));
        if let Err(why) = sent {
            // Unless the session ended meanwhile, and said so.
            let done = self.pending.lock().copies.remove(&id);
            if let Some(done) = done {
                done(failed(blocks, &why));
            }
        }
    }

    /// Takes what the mover says.
    pub(crate) fn take(&self, bytes: &[u8]) -> Result<MoverNotice, String> {
        let message = match decode::<Moved>(bytes)? {
            Moved::Message(message) => message,
            Moved::Passed(number) => return Ok(MoverNotice::Passed(number)),
        };
        match wire::decode_message(&message.0).map_err(|error| error.to_string())? {
            Message::Transfer(report) => {
                let id = report.plan_id.0;
                let done = self.pending.lock().copies.remove(&id);
                match done {
                    Some(done) => done(report.blocks),
                    // The process has attached anew, and this was still on its way on the old line.
                    None if self.is_over.load(Ordering::Acquire) => {}
                    None => return Err(format!("a report of copy {id}, which is not under way")),
                }
                Ok(MoverNotice::Nothing)
            }
            Message::Ready { .. } => Ok(MoverNotice::Ready),
            other => Err(format!("a mover does not send {other:?}")),
        }
    }

    pub(crate) fn close(&self) {
        self.out.close();
    }

    pub(crate) fn pid(&self) -> i32 {
        self.out.pid()
    }

    /// The line has ended: no copy is sent any more.
    pub(crate) fn closed(&self) {
        self.pending.lock().closed = true;
    }

    /// Whether nothing of this session can touch memory any more: everything was answered, the
    /// process has ended, or it has attached anew. Waits a little for that.
    pub(crate) fn look_if_over(&self) -> bool {
        if self.is_over.load(Ordering::Acquire) {
            return true;
        }
        let is_over = self.pending.lock().copies.is_empty() || self.out.process(LOOK) == ProcessState::Ended;
        if is_over {
            self.over();
        }
        is_over
    }

    fn over(&self) {
        self.is_over.store(true, Ordering::Release);
        let copies = std::mem::take(&mut self.pending.lock().copies);
        for (_, done) in copies {
            // How many blocks there were does not matter: each without an outcome has failed.
            done(Vec::new());
        }
    }
}

fn failed(blocks: usize, why: &str) -> Vec<BlockOutcome> {
    vec![BlockOutcome::Failed(Failure::new(FailureKind::Device, why)); blocks]
}
