//! Look-up tickets: what was promised to a request, until it is committed, abandoned or too old.

use crate::errors::{Error, Kind, Result};
use crate::loads::{FinishedLoad, LookUp};
use kvbm::{BlockChain, BlockId, Engine, EngineOnboarding, KvBlockManager, Prefix, Tier};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Tickets that are kept at a time; a look-up beyond promises nothing.
const MOST: usize = 1024;

/// How long a promise is kept that nobody commits: its blocks are pinned meanwhile.
const LIFE: Duration = Duration::from_secs(10);

struct Ticket {
    prefix: Prefix,
    first: usize,
    answer: LookUp,
    made: Instant,
}

struct Load {
    onboarding: EngineOnboarding,
    ids: Vec<BlockId>,
}

/// What requests were promised, and their loads.
#[derive(Default)]
pub(crate) struct Tickets {
    promised: Mutex<HashMap<String, Ticket>>,
    loads: Mutex<HashMap<String, Load>>,
}

impl Tickets {
    pub(crate) fn look_up(
        &self,
        manager: &KvBlockManager<Engine>,
        request: &str,
        chain: BlockChain<'_>,
        first: usize,
    ) -> LookUp {
        let now = Instant::now();
        let mut promised = self.promised.lock();
        promised.retain(|_, ticket| now.duration_since(ticket.made) < LIFE);
        if let Some(ticket) = promised.get(request)
            && ticket.first == first
            && ticket.prefix.lost().is_none()
        {
            return ticket.answer;
        }
        promised.remove(request);
        let nothing = LookUp { blocks: 0, by_tier: [0; 4] };
        if promised.len() >= MOST || first >= chain.len() {
            return nothing;
        }
        let mut prefix = manager.match_prefix(chain);
        if prefix.len() <= first {
            return nothing;
        }
        let prefix = prefix.split_off(first);
        let by_tier = Tier::ALL.map(|tier| prefix.count(tier));
        let answer = LookUp { blocks: prefix.blocks().len(), by_tier };
        promised.insert(request.to_owned(), Ticket { prefix, first, answer, made: now });
        answer
    }

    pub(crate) fn commit(
        &self,
        manager: &KvBlockManager<Engine>,
        request: &str,
        ids: Vec<BlockId>,
    ) -> Result<()> {
        let Some(mut ticket) = self.promised.lock().remove(request) else {
            let text = format!(
                "request {request:?} has no ticket: look up before commit, within {} s",
                LIFE.as_secs()
            );
            return Err(Error::argument(text));
        };
        if ids.len() > ticket.answer.blocks {
            let (given, blocks) = (ids.len(), ticket.answer.blocks);
            return Err(Error::argument(format!(
                "{given} ids for {blocks} promised blocks: give at most as many"
            )));
        }
        if self.loads.lock().contains_key(request) {
            let text =
                format!("request {request:?} has a load already: take it by `finished` or abandon it first");
            return Err(Error::new(Kind::Busy, text));
        }
        ticket.prefix.truncate(ticket.first + ids.len());
        let onboarding = manager.onboard(ticket.prefix, &ids)?;
        self.loads.lock().insert(request.to_owned(), Load { onboarding, ids });
        Ok(())
    }

    pub(crate) fn abandon(&self, request: &str) -> bool {
        let ticket = self.promised.lock().remove(request);
        let load = self.loads.lock().remove(request);
        ticket.is_some() || load.is_some()
    }

    /// Loads that are over and whose blocks no copy can write any more.
    pub(crate) fn finished(&self, manager: &KvBlockManager<Engine>) -> Result<Vec<FinishedLoad>> {
        let mut loads = self.loads.lock();
        let mut quiet = Vec::new();
        for (request, load) in loads.iter() {
            if load.onboarding.is_done() && manager.released(&load.ids)?.is_empty() {
                quiet.push(request.clone());
            }
        }
        let mut finished = Vec::with_capacity(quiet.len());
        for request in quiet {
            let Some(load) = loads.remove(&request) else { continue };
            let wanted = load.ids.len();
            finished.push(match load.onboarding.wait() {
                Ok(arrived) => FinishedLoad::new(request, arrived, wanted, &[]),
                Err(error) => FinishedLoad::new(request, error.arrived, wanted, &error.failures),
            });
        }
        Ok(finished)
    }

    /// Tickets and loads that are open.
    pub(crate) fn open(&self) -> (usize, usize) {
        (self.promised.lock().len(), self.loads.lock().len())
    }
}
