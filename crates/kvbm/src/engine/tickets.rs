//! Tickets: what a scheduler promises a request, until the load of it ends.
//!
//! A scheduler may ask for the same request several times before it finds room for it. A ticket
//! keeps the answer and the pins in between: [`Tickets::look_up`] is idempotent.
//! [`Tickets::commit`] turns a ticket into a load, [`Tickets::abandon`] ends either.
//! [`Tickets::finished`] names each load once, when no copy writes to its blocks any more.

use super::answers::{FinishedLoad, LookUp, TIME_TO_LIVE, TicketError};
use super::pinned_parts::{Load, PinnedParts};
use super::{Engine, Fence, LoadOptions};
use crate::leader::{Leader, leave_out_slow};
use crate::manager::KvBlockManager;
use crate::prefetch;
use crate::transfers::Purpose;
use crate::volume::Probe;
use kvbm_plan::{BlockId, Comparison, SequenceHash, Tier};
use kvbm_tokens::{BlockChain, ChainOrigin, NamespaceTag};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

/// Most tickets; the oldest one ends when another comes.
const MAX_TICKETS: usize = 4096;
/// All tickets together pin at most one in so many blocks of a tier.
const PINNED_SHARE: u32 = 4;
/// A ticket that was asked for so lately does not end for want of room.
const SPARED: Duration = Duration::from_secs(1);
/// Questions to volumes that wait for the thread that asks.
const MAX_PROBES: usize = 64;

/// The tickets of a manager, see [`KvBlockManager::tickets`].
pub struct Tickets<'a>(pub(super) &'a KvBlockManager<Engine>);

/// What a look-up was made for: another chain or another position makes another ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    blocks: usize,
    last: Option<SequenceHash>,
    first: usize,
    /// Whether only blocks on G2 count.
    is_staged: bool,
}

impl Key {
    fn new(chain: BlockChain<'_>, first: usize, is_staged: bool) -> Self {
        Self { blocks: chain.len(), last: chain.hashes().last().copied(), first, is_staged }
    }
}

enum Ticket {
    /// Volumes are being asked.
    Probing(Key),
    /// These blocks are pinned.
    Promised { key: Key, promise: PinnedParts, since: Instant },
    /// These are on their way.
    Loading(Load),
}

/// What a volume is asked for.
struct Question {
    request: String,
    key: Key,
    hashes: Vec<SequenceHash>,
    origin: ChainOrigin,
    namespace: NamespaceTag,
    leader: Weak<Leader>,
}

/// All tickets of a manager.
#[derive(Default)]
pub(crate) struct TicketTable {
    tickets: Arc<Mutex<HashMap<String, Ticket>>>,
    /// Where the thread that asks volumes takes its questions from. Started with the first.
    questions: OnceLock<Option<SyncSender<Question>>>,
    notify: OnceLock<Option<Arc<Notify>>>,
}

/// Makes a file descriptor readable.
struct Notify(OwnedFd);

impl Wake for Notify {
    fn wake(self: Arc<Self>) {
        // A counter that is full is readable as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl std::fmt::Debug for TicketTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tickets", self.tickets.lock().len())
    }
}

impl Tickets<'_> {
    fn table(&self) -> &TicketTable {
        &self.0.g1.tickets
    }

    /// What is there for `request` of `chain` from block `first` on: the engine has the blocks
    /// before it. The same answer, with the same pins, for the same chain and position until the
    /// ticket ends: by [`commit`](Self::commit), [`abandon`](Self::abandon), or after ten seconds.
    /// All tickets pin at most a quarter of a tier; one alone may pin more. Where more is asked
    /// for, tickets end that nobody asked for in the last second. Then the answer has the blocks
    /// that fit beside the others, and none where there is no room. Never waits for a volume. A
    /// chain that volumes were asked for has a ticket even where they have nothing: end it too.
    ///
    /// # Errors
    /// [`TicketError::Loading`].
    pub fn look_up<'a>(
        &self,
        request: &str,
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<LookUp, TicketError> {
        let chain = chain.into();
        let key = Key::new(chain, first, false);
        let now = kvbm_plan::clock::now();
        if let Some(known) = self.known(request, key, now)? {
            return Ok(known);
        }
        let leader = &self.0.leader;
        leader.metrics.lookups.add(chain.len().saturating_sub(first) as u64);
        let (promise, asks) = if leader.has_groups() {
            PinnedParts::of_groups(leader, chain, first, Probe::Never)
        } else {
            let (prefix, asks) = leader.match_prefix(chain, Probe::Never);
            let asks = asks && prefix.len() < chain.len();
            (PinnedParts::of(leader, prefix, first), asks)
        };
        if asks && self.ask(request, key, chain) {
            return Ok(LookUp::Pending);
        }
        Ok(self.table().promise(leader, request, key, promise, now))
    }

    /// Like [`look_up`](Self::look_up), for engines that have no way to learn of a failed load.
    /// Only blocks whose verified bytes are in host memory (G2) are promised, and they are pinned
    /// there. What G3 has is copied to G2 first; what has not arrived at `deadline` is not
    /// promised, and is found by a later call. One call brings at most a quarter of G2, with the
    /// blocks before `first`, since a tier holds no block without its parent. Volumes are not
    /// asked. The number of blocks from `first` on.
    ///
    /// # Errors
    /// [`TicketError::Loading`]; [`TicketError::OneGroup`].
    pub fn stage<'a>(
        &self,
        request: &str,
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        deadline: Instant,
    ) -> Result<usize, TicketError> {
        let chain = chain.into();
        let key = Key::new(chain, first, true);
        let now = kvbm_plan::clock::now();
        if let Some(LookUp::Ready { blocks, .. }) = self.known(request, key, now)? {
            return Ok(blocks);
        }
        let leader = &self.0.leader;
        if leader.has_groups() {
            return Err(TicketError::OneGroup { call: "stage", groups: leader.groups().count() });
        }
        leader.metrics.lookups.add(chain.len().saturating_sub(first) as u64);
        let (mut prefix, _) = leader.match_prefix(chain, Probe::Never);
        leave_out_slow(leader, &mut prefix, first, Tier::G2);
        let most = leader.registry.capacity(Tier::G2).div_ceil(PINNED_SHARE) as usize;
        let copies = prefetch::start(leader, prefix, most, Purpose::Stage, None);
        if let Some(copies) = &copies {
            copies.wait_until(deadline);
        }
        let (mut prefix, _) = leader.match_prefix(chain, Probe::Never);
        // What arrived was pinned by its copy until here. What is late goes on without this caller.
        if let Some(copies) = copies {
            copies.detach();
        }
        let staged = prefix.blocks().iter().skip(first).take_while(|block| block.tier == Tier::G2).count();
        prefix.truncate(first.saturating_add(staged));
        let promise = PinnedParts::of(leader, prefix, first);
        let LookUp::Ready { blocks, .. } = self.table().promise(leader, request, key, promise, now) else {
            return Ok(0);
        };
        Ok(blocks)
    }

    /// The answer that `request` got to the same question. Another question ends its ticket.
    fn known(&self, request: &str, key: Key, now: Instant) -> Result<Option<LookUp>, TicketError> {
        let mut tickets = self.table().tickets.lock();
        match tickets.get_mut(request) {
            Some(Ticket::Loading(_)) => return Err(TicketError::Loading { request: request.to_owned() }),
            Some(Ticket::Probing(known)) if *known == key => return Ok(Some(LookUp::Pending)),
            Some(Ticket::Promised { key: known, promise, since }) if *known == key && !promise.is_lost() => {
                *since = now;
                return Ok(Some(ready(promise)));
            }
            _ => {}
        }
        let ended = tickets.remove(request);
        drop(tickets);
        // Pins end without the lock.
        drop(ended);
        Ok(None)
    }

    /// Has the volumes asked in the background. `false` where too many questions wait: what is
    /// known must do then.
    fn ask(&self, request: &str, key: Key, chain: BlockChain<'_>) -> bool {
        let table = self.table();
        let Some(questions) = table.questions() else { return false };
        let question = Question {
            request: request.to_owned(),
            key,
            hashes: chain.hashes().to_vec(),
            origin: chain.origin(),
            namespace: chain.namespace(),
            leader: Arc::downgrade(&self.0.leader),
        };
        let mut tickets = table.tickets.lock();
        // Under the lock: the answer comes after the ticket.
        let is_asked = questions.try_send(question).is_ok();
        if is_asked {
            tickets.insert(request.to_owned(), Ticket::Probing(key));
        }
        is_asked
    }

    /// What `request` was promised: for each cache group the blocks of the sequence that a load
    /// brings, all up to the same end. Full attention has each from the first that the engine lacks
    /// on; a window or state has the last ones. Empty where the request has no ticket with blocks.
    pub fn promised(&self, request: &str) -> Vec<Range<usize>> {
        match self.table().tickets.lock().get(request) {
            Some(Ticket::Promised { promise, .. }) => promise.ranges(),
            _ => Vec::new(),
        }
    }

    /// Starts the load of the first `ids.len()` promised blocks into `ids`; the copy waits for
    /// `after`. The outcome comes from [`finished`](Self::finished). No ids end the ticket.
    ///
    /// # Errors
    /// [`TicketError`]: nothing was started and nothing comes from `finished`. The ticket has
    /// ended, but where there are too many ids.
    pub fn commit(&self, request: &str, ids: &[BlockId], after: Option<Fence>) -> Result<(), TicketError> {
        self.commit_with(request, ids, LoadOptions { after, ..LoadOptions::default() })
    }

    /// Like [`commit`](Self::commit), with what [`LoadOptions`] say.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_with(
        &self,
        request: &str,
        ids: &[BlockId],
        options: LoadOptions,
    ) -> Result<(), TicketError> {
        self.start(request, &[ids], options, None)
    }

    /// Like [`commit_with`](Self::commit_with), with an id for each block that
    /// [`promised`](Self::promised) names, group by group. No ids in any group end the ticket. The
    /// loads of all groups start and end together. Where a block of one fails, none of the request
    /// counts as arrived. [`finished`](Self::finished) names the load when no copy of any group
    /// writes any more. [`layer_ready`](Self::layer_ready) counts layers within their groups.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); the ticket has not ended where there is not one id for each
    /// block.
    pub fn commit_groups(
        &self,
        request: &str,
        ids: &[&[BlockId]],
        options: LoadOptions,
    ) -> Result<(), TicketError> {
        self.start(request, ids, options, None)
    }

    /// Like [`commit`](Self::commit), where the engine has computed the promised blocks into `ids`
    /// and wants to know whether the stored copies are the same. Nothing is written to `ids`, which
    /// the engine may read meanwhile. The outcome comes from [`finished`](Self::finished): a block
    /// that is not the same has [`FailureKind::Differs`](kvbm_plan::FailureKind::Differs) and its
    /// history; its copies on G2 and G3 are quarantined. What is only on a volume is not compared,
    /// nor what follows it.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); [`TicketError::OneGroup`].
    pub fn audit(
        &self,
        request: &str,
        ids: &[BlockId],
        after: Option<Fence>,
        comparison: Comparison,
    ) -> Result<(), TicketError> {
        let groups = self.0.leader.groups().count();
        if groups > 1 {
            return Err(TicketError::OneGroup { call: "audit", groups });
        }
        self.start(request, &[ids], LoadOptions { after, ..LoadOptions::default() }, Some(comparison))
    }

    fn start(
        &self,
        request: &str,
        ids: &[&[BlockId]],
        options: LoadOptions,
        compare: Option<Comparison>,
    ) -> Result<(), TicketError> {
        let mut promise = self.take_promise(request, ids)?;
        promise.truncate(ids.first().map_or(0, |ids| ids.len()));
        if compare.is_some() {
            promise.keep_near();
        }
        let blocks: Vec<usize> = promise.blocks().collect();
        let ids: Vec<&[BlockId]> =
            ids.iter().zip(blocks).map(|(ids, blocks)| &ids[..ids.len().min(blocks)]).collect();
        if ids.iter().all(|ids| ids.is_empty()) {
            return Ok(());
        }
        let load = promise.load(&self.0.g1, &self.0.leader, &ids, options, compare)?;
        let table = self.table();
        if let Some(notify) = table.notify() {
            load.notify(&Context::from_waker(&Waker::from(Arc::clone(notify))));
        }
        let mut tickets = table.tickets.lock();
        tickets.insert(request.to_owned(), Ticket::Loading(load));
        // What ended before this point woke nobody, or somebody who found no load yet.
        let is_over = matches!(tickets.get(request), Some(Ticket::Loading(load)) if load.is_done());
        drop(tickets);
        if let (true, Some(notify)) = (is_over, table.notify()) {
            Arc::clone(notify).wake();
        }
        Ok(())
    }

    /// Ends the ticket of a request that is to be loaded into `ids`, unless they do not fit what it
    /// was promised.
    fn take_promise(&self, request: &str, ids: &[&[BlockId]]) -> Result<PinnedParts, TicketError> {
        let mut tickets = self.table().tickets.lock();
        match tickets.get(request) {
            Some(Ticket::Promised { promise, .. }) => check_ids(request, promise, ids)?,
            Some(Ticket::Loading(_)) => return Err(TicketError::Loading { request: request.to_owned() }),
            Some(Ticket::Probing(_)) | None => {}
        }
        match tickets.remove(request) {
            Some(Ticket::Promised { promise, .. }) => Ok(promise),
            _ => Err(TicketError::NoTicket { request: request.to_owned() }),
        }
    }

    /// Whether `layer` of all blocks of the request's load is in place, as
    /// [`layer_ready`](super::EngineOnboarding::layer_ready) of the load says. `false` where the
    /// request has no load.
    pub fn layer_ready(&self, request: &str, layer: u32) -> bool {
        let tickets = self.table().tickets.lock();
        matches!(tickets.get(request), Some(Ticket::Loading(load)) if load.layer_ready(layer))
    }

    /// Waits until it is known whether `layer` of all blocks of the request's load arrives, at most
    /// until `deadline`. Whether it has arrived, as [`layer_ready`](Self::layer_ready) says.
    pub fn wait_layer(&self, request: &str, layer: u32, deadline: Instant) -> bool {
        let wait = match self.table().tickets.lock().get(request) {
            Some(Ticket::Loading(load)) => load.layer_wait(),
            _ => return false,
        };
        // Without the lock: other requests go on.
        wait(layer, deadline);
        self.layer_ready(request, layer)
    }

    /// The [tags](super::EngineOnboarding::tag) of the plans of the request's load, by which
    /// `drain_finished` of each rank's worker names them: one for each part of the load that has
    /// plans. Empty where the request has no load.
    pub fn load_tags(&self, request: &str) -> Vec<u64> {
        match self.table().tickets.lock().get(request) {
            Some(Ticket::Loading(load)) => load.tags(),
            _ => Vec::new(),
        }
    }

    /// The request is over. A ticket ends at once; a load is given up, and comes from
    /// [`finished`](Self::finished) when no copy writes to its blocks any more. Whether there was
    /// either.
    pub fn abandon(&self, request: &str) -> bool {
        let mut tickets = self.table().tickets.lock();
        match tickets.remove(request) {
            Some(Ticket::Loading(mut load)) => {
                load.cancel();
                tickets.insert(request.to_owned(), Ticket::Loading(load));
                true
            }
            ended => {
                drop(tickets);
                ended.is_some()
            }
        }
    }

    /// Ends the tickets, and gives up the loads, of all requests that `is_theirs` says: an engine
    /// that has many of them is gone.
    pub fn abandon_where(&self, mut is_theirs: impl FnMut(&str) -> bool) {
        let mut tickets = self.table().tickets.lock();
        for (_, ticket) in tickets.iter_mut().filter(|(request, _)| is_theirs(request)) {
            if let Ticket::Loading(load) = ticket {
                load.cancel();
            }
        }
        let is_theirs = |request: &String, ticket: &mut Ticket| {
            !matches!(ticket, Ticket::Loading(_)) && is_theirs(request)
        };
        let ended: Vec<_> = tickets.extract_if(is_theirs).collect();
        drop(tickets);
        // Pins end without the lock.
        drop(ended);
    }

    /// Loads that are over, each once: their blocks are the engine's again.
    pub fn finished(&self) -> Vec<FinishedLoad> {
        let table = self.table();
        if let Some(Some(notify)) = table.notify.get() {
            // Nothing to read where no load has ended since.
            let _ = rustix::io::read(&notify.0, &mut [0_u8; 8]);
        }
        let done: Vec<(String, Load)> = {
            let mut tickets = table.tickets.lock();
            let is_done = |ticket: &mut Ticket| matches!(ticket, Ticket::Loading(load) if load.is_done());
            let done = tickets.extract_if(|_, ticket| is_done(ticket));
            done.filter_map(|(request, ticket)| match ticket {
                Ticket::Loading(load) => Some((request, load)),
                Ticket::Probing(_) | Ticket::Promised { .. } => None,
            })
            .collect()
        };
        let finished = |(request, load): (String, Load)| {
            let (arrived, wanted, failures) = load.wait();
            FinishedLoad { request, arrived, wanted, failures }
        };
        done.into_iter().map(finished).collect()
    }

    /// A descriptor that is readable when [`finished`](Self::finished) may have something; `None`
    /// where the system has none to give.
    pub fn finished_fd(&self) -> Option<BorrowedFd<'_>> {
        self.table().notify().map(|notify| notify.0.as_fd())
    }

    /// Requests with a ticket, and those that are being loaded.
    pub fn counts(&self) -> (usize, usize) {
        let tickets = self.table().tickets.lock();
        let loading = tickets.values().filter(|ticket| matches!(ticket, Ticket::Loading(_))).count();
        (tickets.len() - loading, loading)
    }
}

fn ready(promise: &PinnedParts) -> LookUp {
    LookUp::Ready { blocks: promise.len(), by_tier: promise.by_tier() }
}

/// Whether `ids` fit what was promised. Fewer than promised do where layers are alike.
fn check_ids(request: &str, promise: &PinnedParts, ids: &[&[BlockId]]) -> Result<(), TicketError> {
    let (request, groups) = (|| request.to_owned(), promise.groups());
    if ids.len() != groups {
        return Err(TicketError::Groups { request: request(), given: ids.len(), groups });
    }
    let gives_up = ids.iter().all(|ids| ids.is_empty());
    for (group, (ids, promised)) in ids.iter().zip(promise.blocks()).enumerate() {
        let ids = ids.len();
        if groups == 1 && ids > promised {
            return Err(TicketError::TooMany { request: request(), ids, promised });
        }
        if groups > 1 && ids != promised && !gives_up {
            return Err(TicketError::Count { request: request(), group, ids, promised });
        }
    }
    Ok(())
}

impl TicketTable {
    fn notify(&self) -> Option<&Arc<Notify>> {
        let open = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok();
        self.notify.get_or_init(|| open().map(|fd| Arc::new(Notify(fd)))).as_ref()
    }

    fn questions(&self) -> Option<&SyncSender<Question>> {
        let start = || {
            let (sender, receiver) = sync_channel(MAX_PROBES);
            let tickets = Arc::clone(&self.tickets);
            let thread = std::thread::Builder::new().name("kvbm-lookups".into());
            thread.spawn(move || answer(&receiver, &tickets)).ok().map(|_| sender)
        };
        self.questions.get_or_init(start).as_ref()
    }

    /// Keeps what was found for `request`, and makes room among the older tickets.
    fn promise(
        &self,
        leader: &Leader,
        request: &str,
        key: Key,
        promise: PinnedParts,
        now: Instant,
    ) -> LookUp {
        let mut promise = promise;
        let mut tickets = self.tickets.lock();
        let ended = make_room(&mut tickets, leader, &mut promise, now);
        let answer = ready(&promise);
        if !promise.is_empty() {
            tickets.insert(request.to_owned(), Ticket::Promised { key, promise, since: now });
        }
        drop(tickets);
        // Pins end without the lock.
        drop(ended);
        answer
    }
}

/// Makes room for `promise`. Tickets end that are too old or too many, and those that pin too much
/// and were not asked for lately. What does not fit beside the others is taken from the promise.
/// All that ends is given back.
fn make_room(
    tickets: &mut HashMap<String, Ticket>,
    leader: &Leader,
    promise: &mut PinnedParts,
    now: Instant,
) -> (Vec<Ticket>, PinnedParts) {
    let mut promised: Vec<(Instant, String)> = Vec::new();
    let mut others = [0_u32; 3];
    for (request, ticket) in tickets.iter() {
        if let Ticket::Promised { promise, since, .. } = ticket {
            promised.push((*since, request.clone()));
            for (tier, count) in Tier::SLOTTED.into_iter().zip(&mut others) {
                *count += promise.count(tier) as u32;
            }
        }
    }
    promised.sort_unstable();
    let most = Tier::SLOTTED.map(|tier| leader.registry.capacity(tier).div_ceil(PINNED_SHARE));
    let new = Tier::SLOTTED.map(|tier| promise.count(tier) as u32);
    // The new one comes on top.
    let mut left = tickets.len() + 1;
    let mut ended = Vec::new();
    for (since, request) in promised {
        let pinned = others.iter().zip(new).map(|(others, new)| others + new);
        let pins_too_much = most.iter().zip(pinned).any(|(most, pinned)| pinned > *most);
        let age = now.saturating_duration_since(since);
        let makes_room = pins_too_much && age > SPARED;
        if !(age > TIME_TO_LIVE || makes_room || left > MAX_TICKETS) {
            continue;
        }
        if let Some(ticket) = tickets.remove(&request) {
            if let Ticket::Promised { promise, .. } = &ticket {
                for (tier, count) in Tier::SLOTTED.into_iter().zip(&mut others) {
                    *count = count.saturating_sub(promise.count(tier) as u32);
                }
            }
            left -= 1;
            ended.push(ticket);
        }
    }
    // One alone may pin more.
    let is_alone = others == [0; 3];
    let room = most.iter().zip(others).map(|(most, others)| most.saturating_sub(others));
    let mut room = room.map(|blocks| if is_alone { u32::MAX } else { blocks });
    let rest = promise.fit(std::array::from_fn(|_| room.next().unwrap_or(u32::MAX)));
    (ended, rest)
}

/// Asks volumes, one question after the other, until the manager is gone.
fn answer(questions: &Receiver<Question>, tickets: &Mutex<HashMap<String, Ticket>>) {
    for Question { request, key, hashes, origin, namespace, leader } in questions {
        let Some(leader) = leader.upgrade() else { return };
        let is_wanted = |tickets: &HashMap<String, Ticket>| matches!(tickets.get(&request), Some(Ticket::Probing(known)) if *known == key);
        if !is_wanted(&tickets.lock()) {
            continue;
        }
        let chain = BlockChain::of_run(namespace, origin, &hashes);
        let mut promise = if leader.has_groups() {
            PinnedParts::of_groups(&leader, chain, key.first, Probe::Wait).0
        } else {
            PinnedParts::of(&leader, leader.match_prefix(chain, Probe::Wait).0, key.first)
        };
        let mut tickets = tickets.lock();
        if is_wanted(&tickets) {
            let since = kvbm_plan::clock::now();
            let ended = make_room(&mut tickets, &leader, &mut promise, since);
            tickets.insert(request, Ticket::Promised { key, promise, since });
            drop(tickets);
            drop(ended);
        } else {
            drop(tickets);
            drop(promise);
        }
    }
}
