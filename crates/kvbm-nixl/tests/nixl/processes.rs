//! Two processes.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_nixl::{
    Descriptor, DescriptorList, NixlAgent, NixlEnabledStorage, RemoteAgent, RemoteRequest, SegmentKind,
    TransferDirection,
};
use kvbm_storage::{Storage, StorageAllocator, StorageExt, SystemAllocator};

use crate::agent;

pub(crate) const BYTES: u64 = 64 << 20;
const ROLE: &str = "NIXL_TEST_ROLE";
const TEST: &str = "processes::another_process";

/// The other process: tells its metadata and address, and ends with its standard input.
#[test]
fn another_process() {
    if std::env::var(ROLE).is_err() {
        assert!(std::env::var(ROLE).is_err(), "only as the child of another test");
        return;
    }
    let agent = agent(&format!("holder-{}", std::process::id()));
    let memory = SystemAllocator::default().allocate(BYTES, 4096).expect("as set up");
    // SAFETY: nobody reads it yet.
    unsafe { memory.write_at(0, &pattern()) }.expect("as set up");
    let _registration = memory.nixl_register(&agent).expect("as set up");
    let metadata = agent.metadata().expect("as set up");
    let hex: Vec<String> = metadata.iter().map(|byte| format!("{byte:02x}")).collect();
    let metadata = hex.concat();
    println!("HOLDER {} {metadata}", memory.address());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("as set up");
}

pub(crate) struct Holder {
    child: Child,
    _stdin: ChildStdin,
    _stdout: BufReader<ChildStdout>,
    address: u64,
    pub(crate) metadata: Vec<u8>,
}

impl Holder {
    fn start() -> Self {
        Self::spawn(Command::new(std::env::current_exe().expect("this program")))
    }

    /// Runs this program, which `command` starts, as the other process.
    pub(crate) fn spawn(mut command: Command) -> Self {
        command.args(["--exact", TEST, "--nocapture"]).env(ROLE, "holder");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let stdin = child.stdin.take().expect("piped");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let line = loop {
            let mut line = String::new();
            assert!(stdout.read_line(&mut line).expect("text") > 0, "the other process ended");
            if let Some((_, rest)) = line.split_once("HOLDER ") {
                break rest.trim().to_owned();
            }
        };
        let (address, hex) = line.split_once(' ').expect("two words");
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        let metadata = (0..hex.len()).step_by(2).map(byte).collect();
        Self { child, _stdin: stdin, _stdout: stdout, address: address.parse().expect("a number"), metadata }
    }

    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ended");
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads all bytes of the other process into `memory`, and compares them.
pub(crate) fn read_all(agent: &NixlAgent, memory: &Arc<dyn Storage>, holder: &Holder) -> String {
    let peer = agent.add_peer(&holder.metadata).expect("as set up");
    // SAFETY: nobody else touches the memory of either side.
    unsafe { agent.start(read(agent, memory, holder, &peer)) }
        .expect("as set up")
        .wait(Instant::now() + Duration::from_secs(30))
        .expect("as set up");
    let mut bytes = vec![0; BYTES as usize];
    // SAFETY: the transfer is over.
    unsafe { memory.read_at(0, &mut bytes) }.expect("as set up");
    assert!(bytes == pattern(), "each byte arrived");
    peer
}

fn read(agent: &NixlAgent, memory: &Arc<dyn Storage>, holder: &Holder, peer: &str) -> RemoteRequest {
    let (piece, pieces) = (BYTES / 64, 64);
    let ours = (0..pieces).map(|at| Descriptor::within(&**memory, at * piece, piece).expect("as set up"));
    let theirs =
        (0..pieces).map(|at| Descriptor { address: holder.address + at * piece, bytes: piece, device_id: 0 });
    assert_ne!(agent.name(), peer);
    RemoteRequest {
        direction: TransferDirection::Read,
        peer: peer.to_owned(),
        local: DescriptorList { kind: SegmentKind::Dram, entries: ours.collect() },
        remote: DescriptorList { kind: SegmentKind::Dram, entries: theirs.collect() },
        notification: None,
        keep: Box::new(Arc::clone(memory)),
    }
}

#[test]
fn bytes_of_another_process_are_read_and_its_death_is_an_error() {
    let agent = agent("reader");
    let memory = SystemAllocator::default().allocate(BYTES, 4096).expect("as set up");
    let _registration = memory.nixl_register(&agent).expect("as set up");
    let mut holder = Holder::start();
    let peer = read_all(&agent, &memory, &holder);

    holder.kill();
    let began = Instant::now();
    // SAFETY: as above.
    let outcome = unsafe { agent.start(read(&agent, &memory, &holder, &peer)) }
        .and_then(|mut transfer| transfer.wait(Instant::now() + Duration::from_secs(5)));
    assert!(outcome.is_err(), "a dead process gives nothing");
    assert!(began.elapsed() < Duration::from_secs(20), "within the deadline");
    agent.forget_peer(&peer).expect("as set up");

    // Another one is not held up by it.
    let next = Holder::start();
    read_all(&agent, &memory, &next);
    std::io::stdout().flush().expect("as set up");
}

fn pattern() -> Vec<u8> {
    (0..BYTES / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}
