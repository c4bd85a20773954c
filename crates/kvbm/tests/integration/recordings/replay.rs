//! Replays recordings with a manager over host memory, and compares it with a model.

use super::file::{Call, Key, Kind, Recording};
use crate::support::{compute, holds, namespace, soon, unlimited};
use kvbm::config::{Blocks, ModelConfig};
use kvbm::layout::{OpaqueLayout, OpaqueTensor};
use kvbm::{
    BlockId, Comparison, Elements, Engine, ExternalSequence, FinishedLoad, KvBlockManager, LookUp, Owned,
    SequenceHash, Tier,
};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a block, whatever the recording's blocks have.
const BLOCK_BYTES: u32 = 512;
/// Before this age a ticket cannot have ended by itself.
const YOUNG: Duration = Duration::from_secs(5);

/// What was replayed.
#[derive(Debug, Default)]
pub(super) struct Summary {
    pub(super) calls: usize,
    pub(super) promised: usize,
    pub(super) arrived: usize,
    /// Of these, by tier that promised them.
    pub(super) by_tier: [usize; 4],
    pub(super) loads: usize,
    /// Loads that were given up while they ran.
    pub(super) abandoned: usize,
    pub(super) offloaded: usize,
    /// Blocks that were compared.
    pub(super) audited: usize,
    /// Blocks whose copy to host memory began ahead of a request.
    pub(super) prefetched: usize,
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// Its copy out of this engine block may be under way.
    Pending(u32),
    /// The engine block was given up while the copy may have been under way.
    Doomed,
    /// It may be there.
    Maybe,
    /// It has to be found.
    Certain,
}

struct Ticket {
    chain: Vec<Key>,
    first: usize,
    promised: usize,
    by_tier: [usize; 4],
    since: Instant,
}

struct Load {
    ids: Vec<u32>,
    keys: Vec<Key>,
    is_abandoned: bool,
    is_audit: bool,
}

/// What an independent observer knows of the stores. It outlives a manager, as a disk does.
#[derive(Default)]
struct Model {
    stored: HashMap<Key, Stored>,
    parents: HashMap<Key, Key>,
    /// Blocks that are not settled, in the order in which they were offered.
    open: Vec<Key>,
}

/// Replays recordings one after the other over one disk, as restarts of an engine. An error names
/// the recording's number, the line and the reason.
pub(super) fn replay(recordings: &[Recording], disk: &Path) -> Result<Vec<Summary>, String> {
    let keys: HashSet<Key> = recordings
        .iter()
        .flat_map(|recording| &recording.calls)
        .flat_map(|call| match &call.kind {
            Kind::LookUp { chain, .. }
            | Kind::Stage { chain, .. }
            | Kind::Offload { chain, .. }
            | Kind::Prefetch { chain, .. } => &chain[..],
            _ => &[],
        })
        .copied()
        .collect();
    // All tickets together pin a quarter of a tier: no block is evicted, every one can be promised.
    let capacity = u32::try_from(keys.len() * 4 + 64).map_err(|_| "too many blocks".to_owned())?;
    let mut model = Model::default();
    let mut summaries = Vec::new();
    for (number, recording) in recordings.iter().enumerate() {
        if !recording.has_disk {
            model = Model::default();
        }
        let mut run = Run::open(recording, disk, capacity, model);
        for call in &recording.calls {
            run.play(call).map_err(|why| format!("recording {}, line {}: {why}", number + 1, call.line))?;
        }
        let (left, summary) =
            run.end().map_err(|why| format!("recording {}, at its end: {why}", number + 1))?;
        model = left;
        summaries.push(summary);
    }
    Ok(summaries)
}

struct Run<'a> {
    recording: &'a Recording,
    manager: KvBlockManager<Engine>,
    model: Model,
    /// What the engine's blocks hold.
    content: Vec<Option<Key>>,
    names: HashMap<Key, SequenceHash>,
    tickets: HashMap<u64, Ticket>,
    loads: HashMap<u64, Load>,
    ended: HashMap<String, FinishedLoad>,
    summary: Summary,
}

impl<'a> Run<'a> {
    fn open(recording: &'a Recording, disk: &Path, capacity: u32, model: Model) -> Self {
        let tensor = OpaqueTensor {
            region: 0,
            offset: 0,
            block_stride: u64::from(BLOCK_BYTES),
            block_bytes: BLOCK_BYTES,
        };
        let layout = OpaqueLayout::new(recording.blocks, vec![tensor]).unwrap();
        let namespace = if recording.flat { namespace().flat() } else { namespace() };
        let mut builder = KvBlockManager::<Owned>::builder()
            .model(ModelConfig::opaque(16, [BLOCK_BYTES]))
            .namespace(namespace)
            .engine_host(vec![crate::support::host::host_tensors(Arc::new(layout))])
            .host(Blocks(capacity));
        if recording.has_disk {
            builder = builder.disk(disk, Blocks(capacity));
        }
        let manager = builder
            .configure(|config| {
                unlimited(config);
                config.offload.g2_g3.write_through = true;
            })
            .build()
            .unwrap();
        Self {
            recording,
            manager,
            model,
            content: vec![None; recording.blocks as usize],
            names: HashMap::new(),
            tickets: HashMap::new(),
            loads: HashMap::new(),
            ended: HashMap::new(),
            summary: Summary::default(),
        }
    }

    fn play(&mut self, call: &Call) -> Result<(), String> {
        self.summary.calls += 1;
        match &call.kind {
            Kind::LookUp { request, chain, first, promised } => {
                self.look_up(*request, chain, *first, promised.is_some_and(|blocks| blocks > 0))
            }
            Kind::Stage { request, chain, first } => self.stage(*request, chain, *first),
            Kind::Commit { request, ids, failed } => self.commit(*request, ids, *failed),
            Kind::Audit { request, ids, failed } => self.audit(*request, ids, *failed),
            Kind::Abandon { request } => {
                self.abandon(*request);
                Ok(())
            }
            Kind::Finished { request } => self.finished(*request),
            Kind::Offload { chain, first, ids, failed } => self.offload(chain, *first, ids, *failed),
            Kind::Released { ids } => {
                self.manager.released(&blocks(ids)).map_err(|why| why.to_string())?;
                self.given_up(ids);
                Ok(())
            }
            Kind::BeforeReuse { ids } => {
                self.manager.before_reuse(&blocks(ids), soon()).map_err(|why| why.to_string())?;
                self.given_up(ids);
                Ok(())
            }
            Kind::Step => {
                self.manager.step();
                Ok(())
            }
            Kind::BranchEnds { chain } => {
                let sequence = self.sequence(chain);
                self.manager.branch_ends(&sequence);
                Ok(())
            }
            Kind::Prefilled { tokens, elapsed_us } => {
                self.manager.prefilled(*tokens, Duration::from_micros(*elapsed_us));
                Ok(())
            }
            Kind::Prefetch { chain, resumes } => {
                let sequence = self.sequence(chain);
                let begun = if *resumes {
                    self.manager.session_resumes(&sequence)
                } else {
                    self.manager.prefetch(&sequence)
                };
                self.summary.prefetched += begun.started;
                Ok(())
            }
            Kind::WaitOffloads => self.settle(),
            Kind::Flush => {
                self.settle()?;
                self.manager.flush(Duration::from_secs(60)).map(drop).map_err(|why| why.to_string())
            }
            Kind::Clear { tier } => self.clear(tier),
            Kind::Forget { own } => self.forget(*own),
            Kind::End => Ok(()),
        }
    }

    fn sequence(&mut self, chain: &[Key]) -> ExternalSequence {
        let sequence = self.manager.external_sequence(chain);
        self.names.extend(chain.iter().copied().zip(sequence.hashes().iter().copied()));
        if !self.recording.flat {
            self.model.parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
        }
        sequence
    }

    fn look_up(
        &mut self,
        request: u64,
        chain: &[Key],
        first: usize,
        is_expected: bool,
    ) -> Result<(), String> {
        let known =
            self.tickets.remove(&request).filter(|ticket| ticket.chain == chain && ticket.first == first);
        if is_expected {
            self.settle()?;
        }
        let sequence = self.sequence(chain);
        let found = self.manager.tickets().look_up(&name(request), &sequence, first);
        let LookUp::Ready { blocks: promised, by_tier } = found.map_err(|why| why.to_string())? else {
            return Err("a look-up is pending, and there is no volume".into());
        };
        match known {
            Some(ticket) if ticket.since.elapsed() < YOUNG && ticket.promised != promised => {
                return Err(format!(
                    "request {request} was promised {} blocks, and {promised} when it asked again",
                    ticket.promised
                ));
            }
            None if is_expected => {
                let certain = |key: &&Key| self.model.stored.get(*key) == Some(&Stored::Certain);
                let least = chain.iter().skip(first).take_while(certain).count();
                if promised < least {
                    return Err(format!("{promised} blocks are found, and {least} were stored"));
                }
            }
            _ => {}
        }
        self.promised(request, chain, first, promised, by_tier)
    }

    fn stage(&mut self, request: u64, chain: &[Key], first: usize) -> Result<(), String> {
        let sequence = self.sequence(chain);
        let promised = self.manager.tickets().stage(&name(request), &sequence, first, soon());
        let promised = promised.map_err(|why| why.to_string())?;
        self.promised(request, chain, first, promised, [0, promised, 0, 0])
    }

    fn promised(
        &mut self,
        request: u64,
        chain: &[Key],
        first: usize,
        promised: usize,
        by_tier: [usize; 4],
    ) -> Result<(), String> {
        let part = chain.get(first..first + promised);
        let part = part.ok_or_else(|| format!("{promised} blocks are promised, more than the chain has"))?;
        if let Some(at) = part.iter().position(|key| !self.model.stored.contains_key(key)) {
            return Err(format!("block {} of the chain is promised, and was never offered", first + at));
        }
        self.summary.promised += promised;
        if promised > 0 {
            let ticket = Ticket { chain: chain.to_vec(), first, promised, by_tier, since: Instant::now() };
            self.tickets.insert(request, ticket);
        }
        Ok(())
    }

    fn commit(&mut self, request: u64, ids: &[u32], failed: bool) -> Result<(), String> {
        let Some(ticket) = self.tickets.remove(&request) else { return Ok(()) };
        let ids = &ids[..ids.len().min(ticket.promised)];
        if failed || ids.is_empty() {
            self.manager.tickets().abandon(&name(request));
            return Ok(());
        }
        self.given_up(ids);
        let started = self.manager.tickets().commit(&name(request), &blocks(ids), None);
        started.map_err(|why| why.to_string())?;
        let keys = ticket.chain[ticket.first..ticket.first + ids.len()].to_vec();
        let mut left = ids.len();
        for (sum, promised) in self.summary.by_tier.iter_mut().zip(ticket.by_tier) {
            let taken = promised.min(left);
            *sum += taken;
            left -= taken;
        }
        self.loads.insert(request, Load { ids: ids.to_vec(), keys, is_abandoned: false, is_audit: false });
        Ok(())
    }

    /// The engine computed what was promised, and has it compared.
    fn audit(&mut self, request: u64, ids: &[u32], failed: bool) -> Result<(), String> {
        let Some(ticket) = self.tickets.remove(&request) else { return Ok(()) };
        let ids = &ids[..ids.len().min(ticket.promised)];
        if failed || ids.is_empty() {
            self.manager.tickets().abandon(&name(request));
            return Ok(());
        }
        let keys = ticket.chain[ticket.first..ticket.first + ids.len()].to_vec();
        self.hold(ids, &keys)?;
        let exact = Comparison { elements: Elements::Bytes, tolerance_ppm: 0 };
        let started = self.manager.tickets().audit(&name(request), &blocks(ids), None, exact);
        started.map_err(|why| why.to_string())?;
        let load = Load { ids: ids.to_vec(), keys, is_abandoned: false, is_audit: true };
        self.loads.insert(request, load);
        Ok(())
    }

    fn abandon(&mut self, request: u64) {
        self.tickets.remove(&request);
        self.manager.tickets().abandon(&name(request));
        if let Some(load) = self.loads.get_mut(&request) {
            self.summary.abandoned += usize::from(!load.is_abandoned);
            load.is_abandoned = true;
        }
    }

    fn finished(&mut self, request: u64) -> Result<(), String> {
        let Some(load) = self.loads.remove(&request) else { return Ok(()) };
        let until = soon();
        let done = loop {
            let over = self.manager.tickets().finished();
            self.ended.extend(over.into_iter().map(|load| (load.request.clone(), load)));
            if let Some(done) = self.ended.remove(&name(request)) {
                break done;
            }
            if Instant::now() > until {
                return Err(format!("the load of request {request} does not end"));
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        if load.is_audit {
            self.summary.audited += done.arrived;
        } else {
            self.summary.loads += 1;
            self.summary.arrived += done.arrived;
        }
        if done.wanted != load.ids.len() || (done.arrived < done.wanted && !load.is_abandoned) {
            let (wanted, why) = (load.ids.len(), done.failures);
            return Err(format!("{} of {wanted} blocks of request {request} arrived: {why:?}", done.arrived));
        }
        for (&id, &key) in load.ids.iter().zip(&load.keys).take(done.arrived) {
            if !holds(&self.manager, BlockId(id), self.names[&key]) {
                return Err(format!("engine block {id} holds other bytes than were stored"));
            }
            self.content[id as usize] = Some(key);
        }
        Ok(())
    }

    /// The engine has computed these blocks, unless they hold what they held.
    fn hold(&mut self, ids: &[u32], keys: &[Key]) -> Result<(), String> {
        for (&id, &key) in ids.iter().zip(keys) {
            match self.content[id as usize] {
                Some(held) if held == key => {}
                Some(_) => {
                    return Err(format!(
                        "engine block {id} changes, and the engine had not said that it would"
                    ));
                }
                None => compute(&self.manager, BlockId(id), self.names[&key]),
            }
            self.content[id as usize] = Some(key);
        }
        Ok(())
    }

    fn offload(&mut self, chain: &[Key], first: usize, ids: &[u32], failed: bool) -> Result<(), String> {
        let sequence = self.sequence(chain);
        let keys = chain.get(first..first + ids.len()).unwrap_or_default();
        self.hold(ids, keys)?;
        let begun = match self.manager.offload(&blocks(ids), &sequence, first, None) {
            Ok(begun) => begun,
            Err(_) if failed => return Ok(()),
            Err(why) => return Err(why.to_string()),
        };
        self.summary.offloaded += begun.started;
        for (&id, &key) in ids.iter().zip(keys) {
            if let Some(refused) = begun.refused.iter().find(|refused| refused.block.0 == id) {
                let parent = self.model.parents.get(&key);
                if parent.is_none_or(|key| self.model.stored.get(key) == Some(&Stored::Certain)) {
                    return Err(format!("engine block {id} is refused: {}", refused.reason));
                }
            } else if matches!(self.model.stored.get(&key), None | Some(Stored::Maybe)) {
                self.model.stored.insert(key, Stored::Pending(id));
                self.model.open.push(key);
            }
        }
        Ok(())
    }

    /// What these engine blocks hold is worth nothing from now on.
    fn given_up(&mut self, ids: &[u32]) {
        for &id in ids {
            let Some(held) = self.content[id as usize].take() else { continue };
            if self.model.stored.get(&held) == Some(&Stored::Pending(id)) {
                self.model.stored.insert(held, Stored::Doomed);
            }
        }
    }

    /// Waits for every copy; what was not given up meanwhile has to be there.
    fn settle(&mut self) -> Result<(), String> {
        if !self.manager.wait_offloads(soon()) {
            return Err("the offloads do not end".into());
        }
        for key in std::mem::take(&mut self.model.open) {
            let parent = self.model.parents.get(&key);
            let has_parent = parent.is_none_or(|key| self.model.stored.get(key) == Some(&Stored::Certain));
            let is_whole = matches!(self.model.stored.get(&key), Some(Stored::Pending(_)));
            let now = if has_parent && is_whole { Stored::Certain } else { Stored::Maybe };
            self.model.stored.insert(key, now);
        }
        Ok(())
    }

    fn clear(&mut self, tier: &str) -> Result<(), String> {
        self.settle()?;
        let tier: Tier = tier.parse().map_err(|why| format!("tier {tier:?}: {why}"))?;
        self.manager.clear(tier).map_err(|why| why.to_string())?;
        // What is settled is on disk too, where there is one.
        if tier != Tier::G2 || !self.recording.has_disk {
            self.model.stored.values_mut().for_each(|stored| *stored = Stored::Maybe);
        }
        Ok(())
    }

    fn forget(&mut self, own: bool) -> Result<(), String> {
        if own {
            self.settle()?;
            self.manager.forget(&self.manager.namespace().clone());
            self.model = Model::default();
        }
        Ok(())
    }

    /// A tier with blocks that somebody uses.
    fn in_use(&self) -> Option<String> {
        let status = self.manager.status();
        let tier = status.tiers.iter().find(|tier| (tier.active, tier.transfer_pins) != (0, 0))?;
        let (name, active, pins) = (tier.tier, tier.active, tier.transfer_pins);
        Some(format!("{name} has {active} active blocks and {pins} pins of transfers"))
    }

    /// Ends what the engine left open: then nothing may be in use.
    fn end(mut self) -> Result<(Model, Summary), String> {
        for request in self.tickets.keys().copied().collect::<Vec<_>>() {
            self.abandon(request);
        }
        for request in self.loads.keys().copied().collect::<Vec<_>>() {
            self.finished(request)?;
        }
        self.settle()?;
        let open = self.manager.tickets().counts();
        if open != (0, 0) {
            return Err(format!("{} tickets and {} loads are open", open.0, open.1));
        }
        // A thread that has told of the end of its work may not have dropped its blocks yet.
        let until = soon();
        while let Some(used) = self.in_use() {
            if Instant::now() >= until {
                return Err(used);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let every: Vec<u32> = (0..self.recording.blocks).collect();
        let busy = self.manager.busy(&blocks(&every)).map_err(|why| why.to_string())?;
        if !busy.is_empty() {
            return Err(format!("engine blocks {busy:?} are busy"));
        }
        let report = self.manager.shutdown(Duration::from_secs(30));
        if self.recording.has_disk && !report.is_complete() {
            return Err(format!("the shutdown is not complete: {report:?}"));
        }
        Ok((self.model, self.summary))
    }
}

fn name(request: u64) -> String {
    format!("r{request}")
}

fn blocks(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}
