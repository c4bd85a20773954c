//! The conformance suite over the in-process agent, its faults, and what is its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbm_nixl::{
    AgentError, AgentFault, Descriptor, DescriptorList, InProcessAgent, InProcessNetwork, NixlEnabledStorage,
    RemoteAgent, RemoteRequest, SegmentKind, TransferDirection, conformance,
};
use kvbm_storage::{DiskStorage, Storage, StorageAllocator, StorageExt, SystemAllocator};

#[test]
fn the_in_process_agent_conforms() {
    let network = InProcessNetwork::new();
    conformance::run(&|name| Box::new(network.agent(name).expect("as set up")));
}

#[test]
fn names_are_unique_while_their_agent_lives() {
    let network = InProcessNetwork::new();
    let agent = network.agent("a").expect("as set up");
    let error = network.agent("a").unwrap_err();
    assert_eq!(error, AgentError::NameTaken { name: "a".into() });
    assert!(matches!(network.agent(""), Err(AgentError::Options(_))));
    drop(agent);
    network.agent("a").expect("as set up");
}

/// One agent that reads from the other: the reader, its memory, the holder.
struct Two {
    reader: InProcessAgent,
    holder: InProcessAgent,
    memory: [Arc<dyn Storage>; 2],
}

fn two(network: &InProcessNetwork) -> Two {
    let (reader, holder) =
        (network.agent("reader").expect("as set up"), network.agent("holder").expect("as set up"));
    let memory = [(); 2].map(|()| SystemAllocator::default().allocate(4096, 4096).expect("as set up"));
    Two { reader, holder, memory }
}

fn read(two: &Two, keep: Arc<()>) -> RemoteRequest {
    let list = |storage: &Arc<dyn Storage>| {
        let entries = vec![Descriptor::within(&**storage, 0, 4096).expect("as set up")];
        DescriptorList { kind: SegmentKind::of(&**storage).expect("as set up"), entries }
    };
    let (local, remote) = (list(&two.memory[0]), list(&two.memory[1]));
    let peer = two.holder.name().to_owned();
    RemoteRequest {
        direction: TransferDirection::Read,
        peer,
        local,
        remote,
        notification: None,
        keep: Box::new(keep),
    }
}

#[test]
fn a_transfer_that_hangs_ends_at_its_deadline_and_keeps_its_memory() {
    let two = two(&InProcessNetwork::new());
    let _ours = two.memory[0].nixl_register(&two.reader).expect("as set up");
    let _theirs = two.memory[1].nixl_register(&two.holder).expect("as set up");
    two.reader.add_peer(&two.holder.metadata().expect("as set up")).expect("as set up");
    let release = Arc::new(AtomicBool::new(false));
    two.holder.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));

    let claim = Arc::new(());
    // SAFETY: nobody else touches the storages.
    let mut transfer = unsafe { two.reader.start(read(&two, Arc::clone(&claim))) }.expect("as set up");
    let error = transfer.wait(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, AgentError::Deadline { bytes: 4096, .. }), "{error}");
    drop(transfer);
    two.reader.notifications().expect("as set up");
    assert_eq!(Arc::strong_count(&claim), 2, "the hardware may still write");
    release.store(true, Ordering::Release);
    two.reader.notifications().expect("as set up");
    assert_eq!(Arc::strong_count(&claim), 1, "now it cannot");
}

#[test]
fn failures_name_the_peer_and_the_bytes() {
    let two = two(&InProcessNetwork::new());
    let _ours = two.memory[0].nixl_register(&two.reader).expect("as set up");
    let theirs = two.memory[1].nixl_register(&two.holder).expect("as set up");
    two.reader.add_peer(&two.holder.metadata().expect("as set up")).expect("as set up");
    let attempt = || {
        // SAFETY: nobody else touches the storages.
        unsafe { two.reader.start(read(&two, Arc::default())) }?.wait(Instant::now() + Duration::from_secs(9))
    };
    for fault in [AgentFault::Fail, AgentFault::Refuse] {
        two.holder.set_fault(Some(fault));
        let error = attempt().unwrap_err().to_string();
        assert!(error.starts_with("a remote read of 4096 bytes with holder failed: "), "{error}");
    }
    two.holder.set_fault(None);
    attempt().expect("as set up");

    // Memory that is gone, although the reader still believes in it.
    drop(theirs);
    let error = attempt().unwrap_err();
    assert!(matches!(&error, AgentError::NotRegistered { agent, .. } if agent == "holder"), "{error}");
    // A holder that is gone.
    let Two { reader, holder, .. } = two;
    drop(holder);
    let error = reader.notify("holder", b"x").unwrap_err();
    assert!(matches!(error, AgentError::UnknownPeer { .. }), "{error}");
}

#[test]
fn files_are_read_and_written() {
    let folder = tempfile::tempdir().expect("as set up");
    let network = InProcessNetwork::new();
    let mut two = two(&network);
    let file: Arc<dyn Storage> =
        Arc::new(DiskStorage::create(&folder.path().join("slots"), 4096).expect("as set up"));
    // SAFETY: nobody else touches the file.
    unsafe { file.write_at(0, &[7; 4096]) }.expect("as set up");
    two.memory[1] = file;
    let _ours = two.memory[0].nixl_register(&two.reader).expect("as set up");
    let _theirs = two.memory[1].nixl_register(&two.holder).expect("as set up");
    two.reader.add_peer(&two.holder.metadata().expect("as set up")).expect("as set up");
    // SAFETY: nobody else touches the storages.
    let mut transfer = unsafe { two.reader.start(read(&two, Arc::default())) }.expect("as set up");
    transfer.wait(Instant::now() + Duration::from_secs(9)).expect("as set up");
    let mut bytes = [0; 4096];
    // SAFETY: the transfer is over.
    unsafe { two.memory[0].read_at(0, &mut bytes) }.expect("as set up");
    assert_eq!(bytes, [7; 4096]);
}

#[test]
fn hostile_metadata_is_refused() {
    let network = InProcessNetwork::new();
    let agent = network.agent("a").expect("as set up");
    let memory = SystemAllocator::default().allocate(4096, 4096).expect("as set up");
    let _registered = memory.nixl_register(&agent).expect("as set up");
    let good = agent.metadata().expect("as set up");
    for length in 0..good.len() {
        assert!(matches!(agent.add_peer(&good[..length]), Err(AgentError::Metadata { .. })), "{length}");
    }
    let mut many = good.clone();
    let count = good.len() - 25 - 4;
    many[count..count + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut kind = good.clone();
    kind[count + 4] = 9;
    let mut text = good.clone();
    text[9] = 0xff;
    for bad in [many, kind, text] {
        assert!(matches!(agent.add_peer(&bad), Err(AgentError::Metadata { .. })));
    }
}
