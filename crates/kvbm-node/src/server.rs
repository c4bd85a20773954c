//! The daemon: one manager, whose G1 is the memory of all engines that attach.

use crate::calls::SchedulerSession;
use crate::error::DaemonError;
use crate::handover::{self, HandoverTerms};
use crate::instances::{EngineInstance, EngineInstances};
use crate::movers::{MoverNotice, MoverSession, RankMovers};
use crate::node::Node;
use crate::protocol::{MAX_NAME, Memory, Role, Terms, Welcome, decode, encode};
use crate::shape::{Difference, ModelShape};
use crate::slots;
use crate::successor;
use kvbm::config::{Capacity, Config};
use kvbm::{Engine, KeptHost, KvBlockManager, Movers, ShutdownReport};
use kvbm_link::{AttachListener, AttachService, AttachedSender, AttachedSession, Attachment, LineTimes};
use parking_lot::RwLock;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often a process that may still write to host memory is looked at.
const GONE_TICK: Duration = Duration::from_millis(50);
/// How often a process that keeps slots is named in the log.
const TELL: u32 = 200;

/// A node daemon. It keeps host memory, disks, volumes, registry and checksums; engines attach to
/// its socket, copy between their blocks and host memory themselves, and may come and go.
pub struct NodeServer {
    listener: Arc<AttachListener>,
    node: Arc<Node>,
}

/// An engine that is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedEngine {
    /// Its name.
    pub name: String,
    /// Its blocks on each rank.
    pub blocks: u32,
    /// Its processes.
    pub pids: Vec<i32>,
    /// Whether its scheduler is attached and all its movers can copy.
    pub ready: bool,
}

impl NodeServer {
    /// Builds the manager of `config`, whose `[device]` says nothing here, and listens at `socket`:
    /// a private socket, in a folder in which no other user writes. All engines together have
    /// `engine_blocks` blocks on each rank.
    ///
    /// # Errors
    /// [`DaemonError`] names the setting, the file or the socket.
    pub fn bind(
        config: &Config,
        socket: &Path,
        engine_blocks: u32,
        times: LineTimes,
    ) -> Result<Self, DaemonError> {
        Self::start(config, socket, engine_blocks, times, None)
    }

    /// Takes the place of the daemon that listens at `socket`, with its host memory and the blocks
    /// in it, and returns when that has ended. Its engines attach by themselves. Both have the same
    /// model, namespace, ranks, `host.capacity` and `transfer.staging`; all else may differ.
    ///
    /// # Errors
    /// [`DaemonError::TakeOver`]: nobody listens there, or the daemon refuses and serves on. Or it
    /// has handed over what this one cannot read, or did not end in time; the reason says so. A
    /// configuration, token, certificate or key that is wrong is found before the other one ends.
    /// Others: it has ended, and what was in its host memory alone is lost.
    pub fn take_over(
        config: &Config,
        socket: &Path,
        engine_blocks: u32,
        times: LineTimes,
    ) -> Result<Self, DaemonError> {
        // What is wrong here is found before the other daemon ends.
        let mut checked = config.clone();
        checked.device.capacity = Capacity::NONE;
        checked.validate().map_err(kvbm::BuildError::from)?;
        kvbm::check_files(&checked)?;
        let kept = successor::take_over(config, socket, times);
        let wrong = |reason| DaemonError::TakeOver { socket: socket.display().to_string(), reason };
        Self::start(config, socket, engine_blocks, times, Some(kept.map_err(wrong)?))
    }

    fn start(
        config: &Config,
        socket: &Path,
        engine_blocks: u32,
        times: LineTimes,
        kept: Option<Vec<KeptHost>>,
    ) -> Result<Self, DaemonError> {
        let ranks = config.parallelism.tensor_parallel as usize;
        let movers: Vec<_> = (0..ranks).map(|_| Arc::<RankMovers>::default()).collect();
        let each = movers.iter().map(|movers| Arc::clone(movers) as Arc<dyn Movers>);
        let builder = KvBlockManager::<Engine>::builder().config(config.clone());
        let builder = builder.engine_movers(engine_blocks, each);
        let manager = match kept {
            Some(kept) => builder.keep_host(kept).build()?,
            None => builder.build()?,
        };
        let hosts: Vec<_> = manager.workers().iter().filter_map(|worker| worker.shared().cloned()).collect();
        let listener = AttachListener::bind(socket, times)?;
        let instances = Arc::new(EngineInstances::new(engine_blocks, ranks as u16));
        let stopping = Arc::default();
        let handover_terms = HandoverTerms::of(config).map_err(kvbm::BuildError::from)?;
        let kinds = handover::kinds_of(config);
        let (open, handed_over) = (RwLock::new(true), AtomicBool::new(false));
        let node =
            Node { manager, movers, hosts, instances, kinds, stopping, open, handover_terms, handed_over };
        let counted = Arc::clone(&node.instances);
        node.manager.metrics().count_engines_by(move || counted.counts());
        Ok(Self { listener: Arc::new(listener), node: Arc::new(node) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        self.listener.path()
    }

    /// The manager: for its status, metrics and events.
    pub fn manager(&self) -> &KvBlockManager<Engine> {
        &self.node.manager
    }

    /// The pages that host memory has, in words.
    pub fn host_pages(&self) -> String {
        self.node.hosts.first().map_or_else(String::new, |host| host.memory.pages().to_string())
    }

    /// Engines that are attached.
    pub fn engines(&self) -> Vec<AttachedEngine> {
        engines(&self.node)
    }

    /// What lists the engines that are attached, for as long as the daemon lives.
    pub fn engine_list(&self) -> impl Fn() -> Vec<AttachedEngine> + Send + Sync + use<> {
        let node = Arc::downgrade(&self.node);
        move || node.upgrade().map(|node| engines(&node)).unwrap_or_default()
    }

    /// Serves engines until it is stopped. Their lines are closed when it returns.
    pub fn serve(&self) {
        let service: Arc<dyn AttachService> =
            Arc::new(Service { node: Arc::clone(&self.node), listener: Arc::downgrade(&self.listener) });
        std::thread::scope(|scope| {
            scope.spawn(|| self.node.report_finished_loads());
            self.listener.serve(&service);
            self.node.stopping.store(true, Ordering::Release);
        });
    }

    /// Ends [`serve`](Self::serve) when it is called, from any thread.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        let (stop, stopping) = (self.listener.stopper(), Arc::clone(&self.node.stopping));
        move || {
            stopping.store(true, Ordering::Release);
            stop();
        }
    }

    /// Whether another daemon has taken its place: [`serve`](Self::serve) has returned, or is about
    /// to, and host memory lives on.
    pub fn is_handed_over(&self) -> bool {
        self.node.handed_over.load(Ordering::Acquire)
    }

    /// Saves what time allows, once nobody is served any more.
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        self.node.manager.shutdown(timeout)
    }
}

fn engines(node: &Node) -> Vec<AttachedEngine> {
    let engine = |instance: &Arc<EngineInstance>| AttachedEngine {
        name: instance.engine.clone(),
        blocks: instance.range.blocks,
        pids: instance.pids(),
        ready: instance.is_ready(),
    };
    node.instances.all().iter().map(engine).collect()
}

/// Admits the processes that attach.
struct Service {
    node: Arc<Node>,
    listener: Weak<AttachListener>,
}

impl Service {
    fn admit(&self, terms: &Terms, out: &AttachedSender) -> Result<Attachment, String> {
        if terms.engine.is_empty() || terms.engine.len() > MAX_NAME {
            return Err(format!("an engine's name has 1 to {MAX_NAME} bytes, not {}", terms.engine.len()));
        }
        if terms.role == Role::Successor {
            return successor::hand_over(&self.node, terms, out, self.stop());
        }
        if let Role::Left(rank) = terms.role {
            if let Some(movers) = self.node.movers.get(usize::from(rank)) {
                movers.attached_anew(&terms.engine, out.pid());
            }
            return Ok(Attachment {
                welcome: Vec::new(),
                files: Vec::new(),
                session: Box::new(EndedSession),
            });
        }
        if self.node.manager.is_draining() {
            return Err("it is drained: attach to the daemon that comes after it".into());
        }
        if !*self.node.open.read() {
            return Err("another daemon takes its place: try again".into());
        }
        let tag = *self.node.manager.namespace().tag().as_bytes();
        if terms.namespace.is_some_and(|theirs| theirs != tag) {
            return Err("the namespace differs (model, weights, dtype, page size, adapter, salt): configure both alike".into());
        }
        let welcome =
            Welcome { epoch: self.node.manager.epoch().0, namespace: tag, memory: self.memory(terms)? };
        let instance = self.node.instances.join(terms, |range| self.node.is_busy(range))?;
        let session: Result<(Box<dyn AttachedSession>, Vec<_>), String> = match terms.role {
            Role::Scheduler => instance.enter(terms.role, out, None).map(|()| {
                let session =
                    SchedulerSession::new(Arc::clone(&self.node), Arc::clone(&instance), out.clone());
                (Box::new(session) as Box<dyn AttachedSession>, Vec::new())
            }),
            Role::Mover(rank) => self.attach_mover(&instance, rank, out),
            Role::Left(_) | Role::Successor => Err("only engines have a session".into()),
        };
        match session {
            Ok((session, files)) => {
                let (engine, pid) = (&instance.engine, out.pid());
                tracing::info!(engine, pid, role = ?terms.role, "a process is attached");
                Ok(Attachment { welcome: encode(&welcome), files, session })
            }
            Err(reason) => {
                self.node.instances.forget_if_empty(&instance);
                Err(reason)
            }
        }
    }

    /// Ends the daemon's service.
    fn stop(&self) -> successor::Stop {
        let (listener, stopping) = (Weak::clone(&self.listener), Arc::clone(&self.node.stopping));
        Box::new(move || {
            stopping.store(true, Ordering::Release);
            if let Some(listener) = listener.upgrade() {
                listener.stopper()();
            }
        })
    }

    /// Whether an engine with these terms serves this model, and the memory that it maps.
    fn memory(&self, terms: &Terms) -> Result<Option<Memory>, String> {
        let host = match terms.role {
            Role::Mover(rank) => {
                let host = self.node.hosts.get(usize::from(rank));
                Some(host.ok_or_else(|| format!("there is no rank {rank}"))?)
            }
            _ => None,
        };
        let blocks = host.iter().flat_map(|host| &host.slots).map(|slots| slots.layout().config());
        let ours = ModelShape::new(&self.node.kinds, blocks);
        if let Some(Difference { name, theirs, ours }) = terms.model.difference(&ours) {
            return Err(format!(
                "{name}: the engine has {theirs}, the daemon has {ours}; start both for the same model"
            ));
        }
        // Fewer replicas than here: some ranks would get the bytes of others.
        let (theirs, ours) = (terms.replicas, self.node.manager.config().model.replicas);
        if theirs < ours {
            return Err(format!(
                "ranks with the same bytes (model.replicas): the engine has {theirs}, the daemon has {ours}; start both for \
                 the same model"
            ));
        }
        host.map(slots::describe).transpose()
    }

    fn attach_mover(
        &self,
        instance: &Arc<EngineInstance>,
        rank: u16,
        out: &AttachedSender,
    ) -> Result<(Box<dyn AttachedSession>, Vec<rustix::fd::OwnedFd>), String> {
        let (movers, host) = (&self.node.movers[usize::from(rank)], &self.node.hosts[usize::from(rank)]);
        let file = rustix::io::fcntl_dupfd_cloexec(host.memory.file(), 0);
        let file = file.map_err(|error| format!("no descriptor for the memory: {error}"))?;
        let session = Arc::new(MoverSession::new(instance.engine.clone(), instance.range, out.clone()));
        instance.enter(Role::Mover(rank), out, Some(&session))?;
        movers.attached_anew(&instance.engine, out.pid());
        movers.add(&session);
        let session =
            MoverLine { node: Arc::clone(&self.node), instance: Arc::clone(instance), rank, session };
        Ok((Box::new(session), vec![file]))
    }
}

impl AttachService for Service {
    fn attach(&self, terms: &[u8], out: AttachedSender) -> Result<Attachment, String> {
        if self.node.stopping.load(Ordering::Acquire) {
            return Err("it is shutting down: try again when it is back".into());
        }
        self.admit(&decode::<Terms>(terms)?, &out)
    }
}

/// The line of a process that has left: nothing follows.
struct EndedSession;

impl AttachedSession for EndedSession {
    fn take(&mut self, _bytes: &[u8]) -> Result<(), String> {
        Err("a process that has left sends nothing".into())
    }

    fn end(self: Box<Self>) {}
}

/// The line to a mover.
struct MoverLine {
    node: Arc<Node>,
    instance: Arc<EngineInstance>,
    rank: u16,
    session: Arc<MoverSession>,
}

impl AttachedSession for MoverLine {
    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        match self.session.take(bytes)? {
            MoverNotice::Nothing => {}
            MoverNotice::Ready => self.instance.mover_ready(self.rank),
            MoverNotice::Passed(number) => self.instance.passed(self.rank, number),
        }
        Ok(())
    }

    fn end(self: Box<Self>) {
        let Self { node, instance, rank, session } = *self;
        session.closed();
        node.leave(&instance);
        // Slots that the process may still write are not reused before it is known not to.
        let mut looks = 0_u32;
        while !session.look_if_over() && !node.stopping.load(Ordering::Acquire) {
            if looks.is_multiple_of(TELL) {
                let (engine, pid) = (&instance.engine, session.pid());
                tracing::warn!(engine, pid, "a process keeps slots of host memory that it may still write");
            }
            looks += 1;
            std::thread::sleep(GONE_TICK);
        }
        node.movers[usize::from(rank)].remove(&session);
    }
}
