//! A scheduler's calls, carried out by the daemon's manager.

use crate::instances::EngineInstance;
use crate::node::Node;
use crate::protocol::{Answer, Ask, Call, ChainRun, DaemonNotice, GroupIds, Load, decode, encode};
use kvbm::plan::deadline_after;
use kvbm::tokens::NamespaceTag;
use kvbm::{BlockId, Fence, GroupId, LoadOptions, LookUp, OffloadStarted};
use kvbm_link::{AttachedSender, AttachedSession};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A call does not wait longer, whatever it asks for.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// No block is promised.
const NOTHING: Answer = Answer::Ready { blocks: 0, by_tier: [0; 4], promised: Vec::new() };

/// The line to a scheduler.
pub(crate) struct SchedulerSession {
    node: Arc<Node>,
    instance: Arc<EngineInstance>,
    out: AttachedSender,
}

impl SchedulerSession {
    pub(crate) fn new(node: Arc<Node>, instance: Arc<EngineInstance>, out: AttachedSender) -> Self {
        Self { node, instance, out }
    }

    /// What the scheduler gets, if it waits for something.
    fn answer(&self, ask: Ask) -> Result<Option<Answer>, String> {
        let manager = &self.node.manager;
        let answer = match ask {
            Ask::LookUp { request, run, first } => self.look_up(&request, &run, first)?,
            Ask::Commit { request, ids, after, wait_ms } => {
                if let Err(why) = self.commit(&request, &ids, after, wait_ms) {
                    let load = Load { request, arrived: 0, wanted: ids.blocks(), failures: vec![why] };
                    self.out.answer(&encode(&DaemonNotice::Finished(load)));
                }
                return Ok(None);
            }
            Ask::Abandon { request } => {
                Answer::Known(manager.tickets().abandon(&self.instance.request(&request)))
            }
            Ask::Offload { group, ids, run, first, after } => {
                self.offload(GroupId(group), &ids, &run, first, after)?
            }
            Ask::Released { ids } => {
                let busy = manager.released(&self.shared(&ids)?).map_err(|error| error.to_string())?;
                Answer::Blocks(self.instance.range.own(&busy))
            }
            Ask::BeforeReuse { ids, wait_ms } => self.before_reuse(&ids, wait_ms)?,
            Ask::Busy { ids } => {
                let busy = manager.busy(&self.shared(&ids)?).map_err(|error| error.to_string())?;
                Answer::Blocks(self.instance.range.own(&busy))
            }
            Ask::Prefetch { run } => {
                let hashes = run.hashes();
                Answer::Count(manager.prefetch(run.chain(&hashes)).started as u64)
            }
            Ask::SessionResumes { run } => {
                let hashes = run.hashes();
                Answer::Count(manager.session_resumes(run.chain(&hashes)).started as u64)
            }
            Ask::Forget { namespace } => {
                Answer::Count(manager.forget_tag_in_background(NamespaceTag::from_bytes(namespace)))
            }
            Ask::Settled => Answer::Known(manager.wait_offloads(Instant::now())),
            Ask::Prefilled { tokens, micros } => {
                manager.prefilled(tokens, Duration::from_micros(micros));
                return Ok(None);
            }
            Ask::Step => {
                manager.step();
                return Ok(None);
            }
            Ask::Count => {
                let (tickets, loads) = manager.tickets().counts();
                Answer::Counts { tickets: tickets as u32, loads: loads as u32 }
            }
        };
        Ok(Some(answer))
    }

    fn look_up(&self, request: &str, run: &ChainRun, first: u32) -> Result<Answer, String> {
        let open = self.node.open.read();
        if !*open || !self.instance.can_copy() {
            return Ok(NOTHING);
        }
        let (request, hashes) = (self.instance.request(request), run.hashes());
        let tickets = self.node.manager.tickets();
        let found = tickets.look_up(&request, run.chain(&hashes), first as usize);
        Ok(match found.map_err(|error| error.to_string())? {
            LookUp::Ready { blocks, by_tier } => ready(blocks, by_tier, tickets.promised(&request)),
            LookUp::Pending => Answer::Pending,
        })
    }

    fn offload(
        &self,
        group: GroupId,
        ids: &[u32],
        run: &ChainRun,
        first: u32,
        after: u64,
    ) -> Result<Answer, String> {
        let open = self.node.open.read();
        if !*open || !self.instance.can_copy() {
            return Err("movers of some ranks are not ready: offer the blocks again later".into());
        }
        let (ids, hashes, after) = (self.shared(ids)?, run.hashes(), self.fence(after)?);
        let chain = run.chain(&hashes);
        let started = self.node.manager.offload_group(group, &ids, chain, first as usize, after);
        Ok(self.started(&started.map_err(|error| error.to_string())?))
    }

    fn before_reuse(&self, ids: &[u32], wait_ms: u32) -> Result<Answer, String> {
        let wait = Duration::from_millis(wait_ms.into()).min(MAX_WAIT);
        let deadline = deadline_after(Instant::now(), wait);
        let busy = self.node.manager.before_reuse(&self.shared(ids)?, deadline).err();
        Ok(Answer::Blocks(busy.map_or_else(Vec::new, |busy| self.instance.range.own(&busy.blocks))))
    }

    fn shared(&self, ids: &[u32]) -> Result<Vec<BlockId>, String> {
        let blocks = self.instance.range.blocks;
        self.instance
            .range
            .shared(ids)
            .map_err(|id| format!("block {id} does not exist: the engine has {blocks}"))
    }

    fn started(&self, begun: &OffloadStarted) -> Answer {
        let own = |block: BlockId| block.0.saturating_sub(self.instance.range.first);
        let refused = begun.refused.iter().map(|it| (own(it.block), it.reason.to_string()));
        Answer::Started {
            started: begun.started as u32,
            present: begun.present as u32,
            refused: refused.collect(),
        }
    }

    /// What the manager calls a point of the engine's work.
    fn fence(&self, number: u64) -> Result<Option<Fence>, String> {
        let register = |events: &[kvbm::device::Event]| {
            self.node.manager.fence(events).map_err(|error| error.to_string())
        };
        self.instance.fence(number, register)
    }

    fn commit(&self, request: &str, ids: &GroupIds, after: u64, wait_ms: u32) -> Result<(), String> {
        let open = self.node.open.read();
        if !*open {
            return Err("another daemon takes the place of this one".into());
        }
        let (request, all) = (self.instance.request(request), self.shared(ids.all())?);
        let ids: Vec<&[BlockId]> = ids.places().into_iter().map(|place| &all[place]).collect();
        let mut options = LoadOptions::default();
        if let Some(fence) = self.fence(after)? {
            options = options.after(fence);
        }
        if wait_ms > 0 {
            options = options.until(deadline_after(Instant::now(), Duration::from_millis(wait_ms.into())));
        }
        let tickets = self.node.manager.tickets();
        tickets.commit_groups(&request, &ids, options).map_err(|error| error.to_string())
    }
}

/// What was found, unless its ticket has ended since: one of another request may have needed room.
fn ready(blocks: usize, by_tier: [usize; 4], promised: Vec<Range<usize>>) -> Answer {
    if promised.is_empty() {
        return NOTHING;
    }
    Answer::Ready {
        blocks: blocks as u32,
        by_tier: by_tier.map(|count| count as u32),
        promised: promised.into_iter().map(|range| (range.start as u32, range.end as u32)).collect(),
    }
}

impl AttachedSession for SchedulerSession {
    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Call { id, ask } = decode(bytes)?;
        ask.check()?;
        match self.answer(ask) {
            Ok(None) => {}
            Ok(Some(answer)) => self.out.answer(&encode(&DaemonNotice::Answer { id, answer: Ok(answer) })),
            Err(why) => self.out.answer(&encode(&DaemonNotice::Answer { id, answer: Err(why) })),
        }
        Ok(())
    }

    fn end(self: Box<Self>) {
        self.node.leave(&self.instance);
    }
}
