//! A scheduler's calls, carried out by the daemon's manager.

use crate::lives::Life;
use crate::node::Node;
use crate::protocol::{Answer, Ask, Call, Load, Told, decode, encode};
use kvbm::plan::deadline_after;
use kvbm::{BlockId, LookUp};
use kvbm_link::{AttachedSender, AttachedSession};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A call does not wait longer, whatever it asks for.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The line to a scheduler.
pub(crate) struct SchedulerSession {
    node: Arc<Node>,
    life: Arc<Life>,
    out: AttachedSender,
}

impl SchedulerSession {
    pub(crate) fn new(node: Arc<Node>, life: Arc<Life>, out: AttachedSender) -> Self {
        Self { node, life, out }
    }

    fn answer(&self, ask: Ask) -> Result<Option<Answer>, String> {
        let manager = &self.node.manager;
        Ok(Some(match ask {
            Ask::LookUp { request, run, first } => {
                if !self.life.can_copy() {
                    return Ok(Some(Answer::Ready { blocks: 0, by_tier: [0; 4] }));
                }
                let (request, hashes) = (self.life.request(&request), run.hashes());
                let found = manager.tickets().look_up(&request, run.chain(&hashes), first as usize);
                match found.map_err(|error| error.to_string())? {
                    LookUp::Ready { blocks, by_tier } => {
                        Answer::Ready { blocks: blocks as u32, by_tier: by_tier.map(|count| count as u32) }
                    }
                    LookUp::Pending => Answer::Pending,
                }
            }
            Ask::Commit { request, ids } => {
                if let Err(why) = self.commit(&request, &ids) {
                    let load = Load { request, arrived: 0, wanted: ids.len() as u32, failures: vec![why] };
                    self.out.answer(&encode(&Told::Finished(load)));
                }
                return Ok(None);
            }
            Ask::Abandon { request } => {
                Answer::Known(manager.tickets().abandon(&self.life.request(&request)))
            }
            Ask::Offload { ids, run, first } => {
                if !self.life.can_copy() {
                    return Err("movers of some ranks are not ready: offer the blocks again later".into());
                }
                let (ids, hashes) = (self.shared(&ids)?, run.hashes());
                let started = manager.offload(&ids, run.chain(&hashes), first as usize, None);
                let started = started.map_err(|error| error.to_string())?;
                let own = |block: BlockId| block.0.saturating_sub(self.life.range.first);
                let refused = started.refused.iter().map(|it| (own(it.block), it.reason.to_string()));
                Answer::Started {
                    started: started.started as u32,
                    present: started.present as u32,
                    refused: refused.collect(),
                }
            }
            Ask::Released { ids } => {
                let busy = manager.released(&self.shared(&ids)?).map_err(|error| error.to_string())?;
                Answer::Blocks(self.life.range.own(&busy))
            }
            Ask::BeforeReuse { ids, wait_ms } => {
                let wait = Duration::from_millis(wait_ms.into()).min(MAX_WAIT);
                let busy =
                    manager.before_reuse(&self.shared(&ids)?, deadline_after(Instant::now(), wait)).err();
                Answer::Blocks(busy.map_or_else(Vec::new, |busy| self.life.range.own(&busy.blocks)))
            }
            Ask::Step => {
                manager.step();
                return Ok(None);
            }
            Ask::Count => {
                let (tickets, loads) = manager.tickets().counts();
                Answer::Counts { tickets: tickets as u32, loads: loads as u32 }
            }
        }))
    }

    fn shared(&self, ids: &[u32]) -> Result<Vec<BlockId>, String> {
        let blocks = self.life.range.blocks;
        self.life
            .range
            .shared(ids)
            .map_err(|id| format!("block {id} does not exist: the engine has {blocks}"))
    }

    fn commit(&self, request: &str, ids: &[u32]) -> Result<(), String> {
        let (request, ids) = (self.life.request(request), self.shared(ids)?);
        self.node.manager.tickets().commit(&request, &ids, None).map_err(|error| error.to_string())
    }
}

impl AttachedSession for SchedulerSession {
    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Call { id, ask } = decode(bytes)?;
        ask.check()?;
        match self.answer(ask) {
            Ok(None) => {}
            Ok(Some(answer)) => self.out.answer(&encode(&Told::Answer { id, answer: Ok(answer) })),
            Err(why) => self.out.answer(&encode(&Told::Answer { id, answer: Err(why) })),
        }
        Ok(())
    }

    fn end(self: Box<Self>) {
        self.node.leave(&self.life);
    }
}
