//! The disk tier over agents for files. Those of one process stand for NIXL's: they keep its rules,
//! and fail as it does.

use kvbm_disk::medium::{BlockFile, DirMedium, Medium, OpenFile};
use kvbm_disk::{
    DiskConfig, DiskEngine, EngineKind, EngineMode, IoBatch, IoMemory, OpError, OpOutcome, OpenError,
    OwnedBuffer, ReadTarget, SlotCorruption,
};
use kvbm_nixl::{AgentError, AgentFault, InProcessAgent, InProcessNetwork, RemoteAgent};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use kvbm_transfer::AgentIo;
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

const BLOCK: usize = 3 * 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory whose files are read and written through the page cache: agents of one process copy
/// through memory that direct I/O does not take.
#[derive(Debug)]
struct PageCached(DirMedium);

impl Medium for PageCached {
    fn location(&self) -> String {
        self.0.location()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        if how.direct { Err(io::ErrorKind::Unsupported.into()) } else { self.0.open(name, how) }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.0.sync_dir()
    }
}

/// Agents of one process, all that were made.
#[derive(Clone, Default)]
struct Agents {
    network: InProcessNetwork,
    made: Arc<Mutex<Vec<Weak<InProcessAgent>>>>,
    /// What becomes of their transfers.
    fault: Arc<Mutex<Option<AgentFault>>>,
    /// No more are made.
    refuses: Arc<AtomicBool>,
}

impl Agents {
    fn make(&self) -> Result<Arc<dyn RemoteAgent>, AgentError> {
        if self.refuses.load(Ordering::Acquire) {
            return Err(AgentError::Unavailable("there is no library".to_owned()));
        }
        let mut made = self.made.lock();
        let agent = Arc::new(self.network.agent(&format!("files-{}", made.len()))?);
        agent.set_fault(self.fault.lock().clone());
        made.push(Arc::downgrade(&agent));
        Ok(agent)
    }

    /// What becomes of transfers of all agents.
    fn set_fault(&self, fault: Option<&AgentFault>) {
        *self.fault.lock() = fault.cloned();
        self.made.lock().iter().filter_map(Weak::upgrade).for_each(|agent| agent.set_fault(fault.cloned()));
    }

    fn made(&self) -> usize {
        self.made.lock().len()
    }

    fn config(&self, dir: &Path, one_agent: bool) -> DiskConfig {
        let mut config = DiskConfig::new(dir, 8, BLOCK as u64, [3; 16]);
        (config.engine, config.threads) = (EngineMode::Custom, 2);
        let agents = self.clone();
        let make = Box::new(move || agents.make());
        config.slot_io = Some(Arc::new(AgentIo::new("agents", "agents of a test", one_agent, make)));
        config
    }

    fn open(&self, dir: &Path, one_agent: bool) -> DiskEngine {
        let medium = Arc::new(PageCached(DirMedium::lock(dir).unwrap()));
        DiskEngine::open_on(self.config(dir, one_agent), medium).unwrap().0
    }
}

fn identity(number: u32) -> BlockIdentity {
    let hash = SequenceHash::from_bytes(u128::from(number + 1).to_le_bytes());
    BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: number }
}

fn bytes_of(number: u32) -> Vec<u8> {
    (0..BLOCK as u32).map(|at| (at.wrapping_mul(number + 7) >> 3) as u8).collect()
}

/// Writes block `number` to the slot of its number.
fn write(engine: &DiskEngine, number: u32) -> OpOutcome {
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    let buffer = Arc::new(OwnedBuffer::from_slice(&bytes_of(number)));
    batch.write_buffer(BlockId(number), identity(number), &buffer);
    engine.submit(batch).unwrap();
    outcomes.recv_timeout(PATIENCE).unwrap().remove(0)
}

fn read(engine: &DiskEngine, number: u32) -> OpOutcome {
    let (target, outcomes) = start_read(engine, number);
    let outcome = outcomes.recv_timeout(PATIENCE).unwrap().remove(0)?;
    assert!(target.into_buffer().unwrap().as_slice() == bytes_of(number), "wrong bytes of block {number}");
    Ok(outcome)
}

fn start_read(engine: &DiskEngine, number: u32) -> (Arc<ReadTarget>, mpsc::Receiver<Vec<OpOutcome>>) {
    let (done, outcomes) = mpsc::channel();
    let target = ReadTarget::new(BLOCK);
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    assert!(batch.read_target(BlockId(number), identity(number), &target));
    engine.submit(batch).unwrap();
    (target, outcomes)
}

#[test]
fn blocks_go_through_an_agent_of_each_thread_or_one_for_all() {
    for (one_agent, wanted) in [(false, 2), (true, 1)] {
        let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
        let engine = agents.open(dir.path(), one_agent);
        let choice = engine.info().engine;
        assert_eq!((choice.kind, agents.made()), (EngineKind::Custom("agents"), wanted));
        assert!(choice.reason.starts_with("agents of a test, through the page cache"), "{}", choice.reason);
        (0..8).for_each(|number| assert!(write(&engine, number).is_ok()));
        (0..8).for_each(|number| assert!(read(&engine, number).is_ok()));
        assert_eq!(engine.stats().bounced, 16, "memory that is not registered");

        // From here on the memory of one buffer is known to all agents.
        let buffer = Arc::new(OwnedBuffer::from_slice(&bytes_of(3)));
        let start = NonNull::from(buffer.as_slice()).cast();
        // SAFETY: the memory stays allocated as long as its owner.
        engine.register_memory(unsafe { IoMemory::new(start, BLOCK, Arc::clone(&buffer) as _) });
        let (done, outcomes) = mpsc::channel();
        let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
        for slot in 0..8 {
            batch.write_buffer(BlockId(slot), identity(3), &buffer);
        }
        engine.submit(batch).unwrap();
        assert!(outcomes.recv_timeout(PATIENCE).unwrap().iter().all(Result::is_ok));
        assert_eq!((engine.stats().bounced, agents.made()), (16, wanted));
        assert_eq!(engine.info().engine.registered_bytes, BLOCK as u64);
    }
}

/// After a failure the thread's agent is gone, and the next request has another.
#[test]
fn a_transfer_that_fails_fails_one_block_and_takes_its_agent_away() {
    let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
    let engine = agents.open(dir.path(), false);
    assert!(write(&engine, 1).is_ok());
    for fault in [AgentFault::Fail, AgentFault::Refuse] {
        let before = agents.made();
        agents.set_fault(Some(&fault));
        let error = write(&engine, 2).unwrap_err();
        assert!(matches!(&error, OpError::Io { op: "write", .. }), "{error}");
        let error = read(&engine, 1).unwrap_err();
        assert!(matches!(&error, OpError::Io { op: "read", .. }), "{error}");
        agents.set_fault(None);
        assert!(read(&engine, 1).is_ok() && write(&engine, 2).is_ok());
        assert!(matches!(read(&engine, 5), Err(OpError::Missing { .. })));
        // Two threads; each has dropped at least one agent, or none and the other both.
        assert!((1..=4).contains(&(agents.made() - before)), "{} agents", agents.made());
    }
    // No other agent can be made: an error, and no panic.
    agents.set_fault(Some(&AgentFault::Fail));
    agents.refuses.store(true, Ordering::Release);
    let errors: Vec<_> = (0..4).map(|_| read(&engine, 1).unwrap_err().to_string()).collect();
    assert!(errors.iter().any(|error| error.contains("there is no library")), "{errors:?}");
    agents.refuses.store(false, Ordering::Release);
    agents.set_fault(None);
    assert!((0..4).all(|_| read(&engine, 1).is_ok()));
}

/// One agent for all threads: it goes on.
#[test]
fn a_shared_agent_outlives_a_failure() {
    let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
    let engine = agents.open(dir.path(), true);
    assert!(write(&engine, 1).is_ok());
    agents.set_fault(Some(&AgentFault::Fail));
    assert!(matches!(read(&engine, 1), Err(OpError::Io { .. })));
    agents.set_fault(None);
    assert!(read(&engine, 1).is_ok());
    assert_eq!(agents.made(), 1);
}

/// Mutation that makes it fail: `FileAgent::transfer` gives up after some looks.
#[test]
fn a_transfer_that_does_not_end_keeps_its_memory() {
    let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
    let engine = agents.open(dir.path(), false);
    assert!(write(&engine, 1).is_ok() && write(&engine, 2).is_ok());
    let release = Arc::new(AtomicBool::new(false));
    agents.set_fault(Some(&AgentFault::Hang { release: Arc::clone(&release) }));
    let (target, outcomes) = start_read(&engine, 1);
    assert!(outcomes.recv_timeout(Duration::from_millis(200)).is_err());
    agents.set_fault(None);
    assert!(read(&engine, 2).is_ok(), "the other thread goes on");
    let target = target.into_buffer().unwrap_err();
    assert!(!engine.shutdown(Duration::from_millis(20)));
    release.store(true, Ordering::Release);
    let outcome = outcomes.recv_timeout(PATIENCE).unwrap().remove(0);
    assert!(matches!(&outcome, Err(OpError::Io { .. })), "{outcome:?}");
    assert!(target.into_buffer().is_ok(), "its memory is free");
}

#[test]
fn bytes_that_changed_and_files_that_were_cut_are_noticed() {
    let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
    let engine = agents.open(dir.path(), false);
    (0..8).for_each(|number| assert!(write(&engine, number).is_ok()));
    let slots = std::fs::OpenOptions::new().write(true).open(dir.path().join("slots.kvbm")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&slots, b"other bytes", 2 * BLOCK as u64 + 99).unwrap();
    let error = read(&engine, 2).unwrap_err();
    assert!(matches!(&error, OpError::Corrupt { cause: SlotCorruption::Checksum { .. }, .. }), "{error}");
    slots.set_len(5 * BLOCK as u64 + 5000).unwrap();
    let error = read(&engine, 5).unwrap_err();
    let cause = SlotCorruption::ShortFile { missing: BLOCK as u64 - 5000 };
    assert!(matches!(&error, OpError::Corrupt { cause: found, .. } if *found == cause), "{error}");
    assert!((3..5).all(|number| read(&engine, number).is_ok()));
}

#[test]
fn without_an_agent_the_directory_does_not_open() {
    let (agents, dir) = (Agents::default(), tempfile::tempdir().unwrap());
    agents.refuses.store(true, Ordering::Release);
    for one_agent in [false, true] {
        let error = DiskEngine::open(agents.config(dir.path(), one_agent)).unwrap_err();
        assert!(matches!(error, OpenError::NoEngine { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("the engine agents is not possible here: agents of a test: "), "{error}");
        assert!(error.contains("there is no library"), "{error}");
    }
}
