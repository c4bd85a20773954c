//! Engines that are attached. An instance of an engine begins with its first process and ends with
//! the first one that goes: its blocks of G1 are lost then, and nothing else.

use crate::movers::{MoverSession, Range};
use crate::points::Points;
use crate::protocol::{DaemonNotice, Role, Terms, encode};
use kvbm::Fence;
use kvbm::device::Event;
use kvbm::metrics::EngineCounts;
use kvbm_link::{AttachedSender, Lane};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The instances of all engines, and the ids of G1 that they share.
pub(crate) struct EngineInstances {
    /// Blocks of G1, of all engines together.
    blocks: u32,
    ranks: u16,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    by_engine: HashMap<String, Arc<EngineInstance>>,
    /// Blocks by the first one; also of instances that are over, while copies may touch them.
    taken: BTreeMap<u32, u32>,
    /// Of instances that are over.
    retired: Vec<Range>,
}

/// From the first process of an engine to the first one that goes.
pub(crate) struct EngineInstance {
    pub(crate) number: u64,
    pub(crate) engine: String,
    pub(crate) range: Range,
    members: Mutex<Members>,
    points: Mutex<Points>,
}

struct Members {
    scheduler: Option<AttachedSender>,
    movers: Vec<Option<Arc<MoverSession>>>,
    ready: Vec<bool>,
    sessions: usize,
    ended: bool,
}

impl EngineInstances {
    pub(crate) fn new(blocks: u32, ranks: u16) -> Self {
        Self { blocks, ranks, table: Mutex::default() }
    }

    /// The instance of the engine that a process with these terms belongs to; a new one where the
    /// engine has none. `is_busy` says of the blocks of an instance that is over whether copies may
    /// touch them.
    pub(crate) fn join(
        &self,
        terms: &Terms,
        is_busy: impl Fn(Range) -> bool,
    ) -> Result<Arc<EngineInstance>, String> {
        let Terms { engine, blocks, ranks, .. } = terms;
        if *ranks != self.ranks {
            return Err(format!("the engine has {ranks} ranks, the daemon serves {}", self.ranks));
        }
        let mut table = self.table.lock();
        if let Some(instance) = table.by_engine.get(engine) {
            if instance.range.blocks != *blocks {
                let known = instance.range.blocks;
                return Err(format!(
                    "engine {engine} has {known} blocks in another process, {blocks} in this"
                ));
            }
            return Ok(Arc::clone(instance));
        }
        let retired = std::mem::take(&mut table.retired);
        let (busy, free): (Vec<_>, Vec<_>) = retired.into_iter().partition(|range| is_busy(*range));
        table.retired = busy;
        for range in free {
            table.taken.remove(&range.first);
        }
        let range = table.take(*blocks, self.blocks).ok_or_else(|| {
            let taken: u64 = table.taken.values().map(|blocks| u64::from(*blocks)).sum();
            format!(
                "no room for {blocks} blocks: engines have {taken} of {} (node.engine_blocks)",
                self.blocks
            )
        })?;
        table.next += 1;
        let empty = Members {
            scheduler: None,
            movers: vec![None; usize::from(self.ranks)],
            ready: vec![false; usize::from(self.ranks)],
            sessions: 0,
            ended: false,
        };
        let instance = Arc::new(EngineInstance {
            number: table.next,
            engine: engine.clone(),
            range,
            members: Mutex::new(empty),
            points: Mutex::new(Points::new(self.ranks)),
        });
        table.by_engine.insert(engine.clone(), Arc::clone(&instance));
        Ok(instance)
    }

    /// The instance with this number, while it lasts.
    pub(crate) fn numbered(&self, number: u64) -> Option<Arc<EngineInstance>> {
        self.table.lock().by_engine.values().find(|instance| instance.number == number).cloned()
    }

    /// A session of `instance` ends: so does the instance. Whether it was the last session.
    pub(crate) fn leave(&self, instance: &Arc<EngineInstance>) -> bool {
        let mut table = self.table.lock();
        if table.by_engine.get(&instance.engine).is_some_and(|known| Arc::ptr_eq(known, instance)) {
            table.by_engine.remove(&instance.engine);
        }
        drop(table);
        instance.end()
    }

    /// Nobody uses the blocks of `instance` any more, but for copies that are still under way.
    pub(crate) fn retire(&self, instance: &EngineInstance) {
        self.table.lock().retired.push(instance.range);
    }

    /// A process was refused after it had joined: an instance without processes is none.
    pub(crate) fn forget_if_empty(&self, instance: &Arc<EngineInstance>) {
        let mut table = self.table.lock();
        let is_empty = instance.members.lock().sessions == 0;
        if is_empty && table.by_engine.get(&instance.engine).is_some_and(|known| Arc::ptr_eq(known, instance))
        {
            table.by_engine.remove(&instance.engine);
            table.taken.remove(&instance.range.first);
        }
    }

    /// How many engines are attached.
    pub(crate) fn counts(&self) -> EngineCounts {
        let mut counts = EngineCounts::default();
        for instance in self.all() {
            *if instance.is_ready() { &mut counts.ready } else { &mut counts.attaching } += 1;
        }
        counts
    }

    /// Engines that are attached.
    pub(crate) fn all(&self) -> Vec<Arc<EngineInstance>> {
        self.table.lock().by_engine.values().cloned().collect()
    }
}

impl Table {
    /// The first gap of so many blocks.
    fn take(&mut self, blocks: u32, all: u32) -> Option<Range> {
        let mut first = 0;
        for (taken, count) in &self.taken {
            if taken - first >= blocks {
                break;
            }
            first = taken + count;
        }
        if blocks == 0 || all.saturating_sub(first) < blocks {
            return None;
        }
        self.taken.insert(first, blocks);
        Some(Range { first, blocks })
    }
}

impl EngineInstance {
    /// What the manager knows a request by.
    pub(crate) fn request(&self, name: &str) -> String {
        format!("{}/{name}", self.number)
    }

    /// The number of the instance, and the engine's own name of a request.
    pub(crate) fn split(request: &str) -> Option<(u64, &str)> {
        let (number, name) = request.split_once('/')?;
        Some((number.parse().ok()?, name))
    }

    /// Takes a process in; `mover` where it is one.
    pub(crate) fn enter(
        &self,
        role: Role,
        out: &AttachedSender,
        mover: Option<&Arc<MoverSession>>,
    ) -> Result<(), String> {
        let mut members = self.members.lock();
        let taken = |pid: i32| format!("engine {}: process {pid} is there already, as {role:?}", self.engine);
        if members.ended {
            return Err(format!("engine {} is being detached: try again", self.engine));
        }
        match role {
            Role::Scheduler => {
                if let Some(known) = &members.scheduler {
                    return Err(taken(known.pid()));
                }
                members.scheduler = Some(out.clone());
            }
            Role::Mover(rank) => {
                let place = members.movers.get_mut(usize::from(rank));
                let place = place.ok_or_else(|| format!("there is no rank {rank}"))?;
                if let Some(known) = place {
                    return Err(taken(known.pid()));
                }
                *place = mover.cloned();
            }
            Role::Left(_) | Role::Successor => return Err("only engines enter".into()),
        }
        members.sessions += 1;
        let scheduler = members.newly_ready();
        drop(members);
        notify_ready(scheduler);
        Ok(())
    }

    /// The mover of `rank` can copy from now on.
    pub(crate) fn mover_ready(&self, rank: u16) {
        let mut members = self.members.lock();
        if let Some(ready) = members.ready.get_mut(usize::from(rank)) {
            *ready = true;
        }
        let scheduler = members.newly_ready();
        drop(members);
        notify_ready(scheduler);
    }

    /// Whether movers of all ranks can copy.
    pub(crate) fn can_copy(&self) -> bool {
        let members = self.members.lock();
        !members.ended && members.ready.iter().all(|ready| *ready)
    }

    /// Whether its scheduler is there, and movers of all ranks can copy.
    pub(crate) fn is_ready(&self) -> bool {
        let members = self.members.lock();
        !members.ended && members.newly_ready().is_some()
    }

    /// What the manager calls a point of the engine's work; none where nothing has to wait.
    pub(crate) fn fence(
        &self,
        number: u64,
        register: impl FnOnce(&[Event]) -> Result<Fence, String>,
    ) -> Result<Option<Fence>, String> {
        let mut displaced = Vec::new();
        let fence = self.points.lock().fence(number, &mut displaced, register);
        // Without the lock: what waits for them fails on this thread.
        drop(displaced);
        fence
    }

    /// The engine has passed a point of its work on this rank.
    pub(crate) fn passed(&self, rank: u16, number: u64) {
        let passed = self.points.lock().passed(rank, number);
        // Without the lock: copies start on this thread.
        for point in passed {
            point.complete(Ok(()));
        }
    }

    /// Sends a notice to the scheduler. Whether it was taken.
    pub(crate) fn notify(&self, notice: &DaemonNotice) -> bool {
        let scheduler = self.members.lock().scheduler.clone();
        let Some(scheduler) = scheduler else { return false };
        let sent = scheduler.send(Lane::Bulk, &encode(notice));
        if let Err(error) = &sent {
            // It would wait for that for ever: its next instance begins without it.
            tracing::warn!(engine = self.engine, %error, "the result of a load was not delivered to an engine");
            scheduler.close();
        }
        sent.is_ok()
    }

    /// Processes of the engine: the scheduler's, then those of movers.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let members = self.members.lock();
        let movers = members.movers.iter().flatten().map(|mover| mover.pid());
        members.scheduler.iter().map(AttachedSender::pid).chain(movers).collect()
    }

    /// A session ends, and with it all others. Whether it was the last.
    fn end(&self) -> bool {
        let mut members = self.members.lock();
        members.sessions = members.sessions.saturating_sub(1);
        let is_last = members.sessions == 0;
        let others = (!std::mem::replace(&mut members.ended, true))
            .then(|| (members.scheduler.take(), std::mem::take(&mut members.movers)));
        drop(members);
        let waiting = self.points.lock().give_up();
        drop(waiting);
        if let Some((scheduler, movers)) = others {
            scheduler.iter().for_each(AttachedSender::close);
            movers.iter().flatten().for_each(|mover| mover.close());
        }
        is_last
    }
}

impl Members {
    /// The scheduler, where movers of all ranks can copy.
    fn newly_ready(&self) -> Option<AttachedSender> {
        let can_copy = self.ready.iter().all(|ready| *ready);
        self.scheduler.clone().filter(|_| can_copy)
    }
}

/// Notifies a scheduler that movers of all ranks can copy.
fn notify_ready(scheduler: Option<AttachedSender>) {
    if let Some(scheduler) = scheduler {
        // A line that has ended is noticed by its session.
        let _ended = scheduler.send(Lane::Bulk, &encode(&DaemonNotice::Movers(true)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::ModelShape;

    fn terms(engine: &str, blocks: u32) -> Terms {
        let engine = engine.to_owned();
        Terms {
            role: Role::Scheduler,
            engine,
            blocks,
            ranks: 1,
            namespace: None,
            model: ModelShape::default(),
            host: None,
            replicas: 1,
        }
    }

    #[test]
    fn engines_have_blocks_of_their_own_and_those_of_the_dead_are_reused_when_nothing_is_at_them() {
        let instances = EngineInstances::new(100, 1);
        let join = |engine: &str, blocks| instances.join(&terms(engine, blocks), |range| range.first == 0);
        let first = join("a", 40).unwrap();
        let second = join("b", 40).unwrap();
        assert_eq!((first.range.first, second.range.first), (0, 40));
        assert!(Arc::ptr_eq(&first, &join("a", 40).unwrap()), "all processes of an engine share a instance");
        assert!(join("a", 41).err().unwrap().contains("40 blocks in another process"));
        assert!(join("c", 40).err().unwrap().contains("no room for 40 blocks: engines have 80 of 100"));
        assert!(instances.leave(&second) && instances.leave(&first));
        instances.retire(&second);
        instances.retire(&first);
        assert_eq!(join("c", 60).unwrap().range.first, 40, "copies are still at the first");
        assert!(instances.numbered(first.number).is_none());
        assert!(join("d", 0).is_err());
        let wrong = Terms { ranks: 2, ..terms("e", 1) };
        assert!(instances.join(&wrong, |_| false).err().unwrap().contains("2 ranks"));
    }

    #[test]
    fn whatever_waited_for_a_point_that_makes_room_may_use_the_life() {
        let instance = EngineInstances::new(1, 1).join(&terms("a", 1), |_| false).unwrap();
        let (results, failed) = std::sync::mpsc::channel();
        for number in 1..=2000 {
            let (own, results) = (Arc::downgrade(&instance), results.clone());
            let _refused = instance.fence(number, |events| {
                events[0].on_complete(move |result| {
                    own.upgrade().iter().for_each(|instance| instance.passed(0, 0));
                    let _ = results.send(result.is_err());
                });
                Err("not registered".into())
            });
        }
        assert!(failed.try_iter().all(|is_failure| is_failure), "no point was passed");
        instance.passed(0, 2000);
        drop(results);
        assert_eq!(failed.iter().filter(|is_failure| !is_failure).count(), 1024);
    }

    #[test]
    fn a_request_keeps_its_name() {
        assert_eq!(EngineInstance::split("7/chat/1"), Some((7, "chat/1")));
        assert_eq!(EngineInstance::split("chat"), None);
    }
}
