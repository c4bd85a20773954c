//! A daemon takes the place of another one at the same socket, with its host memory.
//!
//! The old daemon ends its transfers, shuts its manager down, passes memory and index on, and ends.
//! The new one waits for that: what the old one still had open (a disk, the socket) is free then.

use crate::handover::{self, HandoverTerms, MAX_RANKS};
use crate::node::Node;
use crate::protocol::{MAX_NAME, Role, Terms, Welcome, encode};
use crate::shape::Difference;
use kvbm::KeptHost;
use kvbm::config::Config;
use kvbm::plan::deadline_after;
use kvbm_link::{AttachedSender, AttachedSession, Attachment, LineTimes, ProcessState, Welcomed};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time for transfers under way, once no new one starts.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Time for loads and saves in progress. No copy starts after it.
const POINT_TIME: Duration = Duration::from_secs(2);
/// Time for the disks, and for blocks that are on their way there.
const SHUTDOWN_TIME: Duration = Duration::from_secs(2);
/// The polling interval.
const TICK: Duration = Duration::from_millis(2);
/// The old daemon answers within this time.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// The old daemon has ended within this time.
const END_TIME: Duration = Duration::from_secs(60);
/// One look at a process.
const LOOK: Duration = Duration::from_millis(100);

/// Ends the daemon's service.
pub(crate) type Stop = Box<dyn Fn() + Send + Sync>;

/// Passes the host memory of `node` on. Nothing is served from then on.
pub(crate) fn hand_over(
    node: &Arc<Node>,
    terms: &Terms,
    out: &AttachedSender,
    stop: Stop,
) -> Result<Attachment, String> {
    check(node, terms)?;
    {
        let mut open = node.open.write();
        if !std::mem::replace(&mut *open, false) {
            return Err("another daemon takes its place already".into());
        }
    }
    let pid = out.pid();
    tracing::info!(target: "kvbm", pid, "another daemon takes the place of this one");
    if let Err(why) = drain(node) {
        *node.open.write() = true;
        return Err(why);
    }
    // From here on there is no way back.
    node.handed_over.store(true, Ordering::Release);
    let report = node.manager.shutdown(SHUTDOWN_TIME);
    if let Some(error) = &report.flush_error {
        tracing::warn!(target: "kvbm", %error, "what is on disk may not be durable");
    }
    let kept = node.manager.kept_host();
    let blocks = kept.first().map_or(0, |rank| rank.contents.len());
    let files = handover::pack(&kept).map_err(|error| format!("no index of host memory: {error}"));
    let session = Box::new(Handed { stop });
    let files = match files {
        Ok(files) => files,
        Err(why) => {
            session.end();
            return Err(why);
        }
    };
    tracing::info!(target: "kvbm", pid, blocks, "host memory is handed over");
    let namespace = *node.manager.namespace().tag().as_bytes();
    let welcome = encode(&Welcome { epoch: node.manager.epoch().0, namespace, memory: None });
    Ok(Attachment { welcome, files, session })
}

/// Whether the new daemon can serve from this one's memory.
fn check(node: &Node, terms: &Terms) -> Result<(), String> {
    let (theirs, ours) = (usize::from(terms.ranks), node.hosts.len());
    if theirs != ours || ours > MAX_RANKS {
        return Err(format!(
            "the new daemon has {theirs} ranks, this one {ours}, and at most {MAX_RANKS} are handed over: \
             stop this one, and start the new one without --take-over"
        ));
    }
    if terms.namespace != Some(*node.manager.namespace().tag().as_bytes()) {
        return Err(
            "the namespace differs (model, weights, dtype, page size, adapter, salt): checksums are bound to it; \
             stop this one, and start the new one without --take-over"
                .into(),
        );
    }
    match node.handover_terms.difference(terms) {
        None => Ok(()),
        Some(Difference { name, theirs, ours }) => Err(format!(
            "{name}: the new daemon has {theirs}, this one {ours}; leave it as it was, or stop this one and start the \
             new one without --take-over"
        )),
    }
}

/// Waits until no engine's process copies any more, and sees to it that none begins.
fn drain(node: &Node) -> Result<(), String> {
    let begun = Instant::now();
    let until = deadline_after(begun, DRAIN_TIME);
    // Saves that wait for a point of an engine's work: the engine may be idle for ever.
    let patience = deadline_after(begun, POINT_TIME);
    let is_waiting = || node.instances.all().iter().any(|instance| node.is_busy(instance.range));
    while Instant::now() < patience && is_waiting() {
        std::thread::sleep(TICK);
    }
    node.hold_copies(true);
    loop {
        let (_, loads) = node.manager.tickets().counts();
        let copying: Vec<_> = node.movers.iter().flat_map(|movers| movers.copying()).collect();
        if loads == 0 && copying.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            node.hold_copies(false);
            let pids = copying.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(format!(
                "{loads} loads are not over after {} s; processes that copy: {pids}. One that is stopped has to go on or \
                 to end first",
                DRAIN_TIME.as_secs()
            ));
        }
        std::thread::sleep(TICK);
    }
}

/// The line to the daemon that takes over: when it has ended, so does this daemon.
struct Handed {
    stop: Stop,
}

impl AttachedSession for Handed {
    fn take(&mut self, _bytes: &[u8]) -> Result<(), String> {
        Err("a daemon that takes over sends nothing".into())
    }

    fn end(self: Box<Self>) {
        (self.stop)();
    }
}

/// Takes the host memory of the daemon at `socket`, and returns when that has ended.
pub(crate) fn take_over(config: &Config, socket: &Path, times: LineTimes) -> Result<Vec<KeptHost>, String> {
    let HandoverTerms { model, host } = HandoverTerms::of(config).map_err(|error| error.to_string())?;
    let name = format!("daemon {}", std::process::id());
    debug_assert!(name.len() <= MAX_NAME);
    let terms = Terms {
        role: Role::Successor,
        engine: name,
        blocks: 0,
        ranks: u16::try_from(config.parallelism.tensor_parallel).unwrap_or(u16::MAX),
        namespace: Some(*config.namespace().tag().as_bytes()),
        model,
        host: Some(host),
        replicas: config.model.replicas,
    };
    let times = LineTimes { handshake: ANSWER_TIME, ..times };
    let mut welcomed = Welcomed::attach(socket, &encode(&terms), times).map_err(|error| error.to_string())?;
    let files = std::mem::take(&mut welcomed.files);
    let old = welcomed.sender();
    let [_, slots, _] = config.capacity_blocks();
    let kept = handover::unpack(files, slots, config.host.huge_pages);
    // The old daemon ends once this connection is closed.
    old.close();
    drop(welcomed);
    let until = deadline_after(Instant::now(), END_TIME);
    while old.process(LOOK) != ProcessState::Ended {
        if Instant::now() >= until {
            let (pid, seconds) = (old.pid(), END_TIME.as_secs());
            return Err(format!("process {pid} has handed over and has not ended after {seconds} s: end it"));
        }
    }
    kept
}
