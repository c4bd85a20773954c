//! Each pitfall of NIXL 1.5 that was seen has a guard, and each guard a test.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_nixl::{
    AgentError, BackendOptions, Descriptor, DescriptorList, FileBackend, NixlAgent, NixlEnabledStorage,
    NixlOptions, RemoteAgent, RemoteRequest, SegmentKind, TransferDirection,
};
use kvbm_storage::{DiskStorage, Storage, StorageAllocator, StorageExt, SystemAllocator};

use crate::agent;

/// Runs one test of this program alone, in a process of its own with these variables.
fn alone(test: &str, variables: &[(&str, &str)]) -> std::process::Output {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", test, "--test-threads", "1", "--nocapture"]).env("NIXL_TEST_ALONE", test);
    command.envs(variables.iter().copied()).output().expect("it can be started")
}

fn is_alone(test: &str) -> bool {
    std::env::var("NIXL_TEST_ALONE").is_ok_and(|name| name == test)
}

#[test]
fn a_missing_library_is_an_error_and_no_abort() {
    let mut options = NixlOptions::new("no-library");
    options.library = Some("/no/such/libnixl_capi.so".into());
    let error = NixlAgent::new(&options).unwrap_err().to_string();
    assert!(error.contains("pip install --no-deps nixl-cu12"), "{error}");
}

#[test]
fn what_is_no_library_of_nixl_is_named() {
    const TEST: &str = "pitfalls::what_is_no_library_of_nixl_is_named";
    if !is_alone(TEST) {
        let output = alone(TEST, &[]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let folder = tempfile::tempdir().expect("as set up");
    let text = folder.path().join("libnixl_capi.so");
    std::fs::write(&text, "not a library").expect("as set up");
    let error = |library: &std::path::Path| {
        let options = NixlOptions { library: Some(library.to_owned()), ..NixlOptions::new("wrong") };
        NixlAgent::new(&options).unwrap_err().to_string()
    };
    assert!(error(&text).contains("cannot be loaded"), "{}", error(&text));
    // A library, but not this one.
    let other = crate::library().with_file_name("libserdes.so");
    assert!(error(&other).contains("has no nixl_capi_create_configured_agent"), "{}", error(&other));
}

/// UCX installs handlers, for SIGHUP too.
#[test]
fn signal_handlers_stay_the_programs() {
    const TEST: &str = "pitfalls::signal_handlers_stay_the_programs";
    if !is_alone(TEST) {
        let output = alone(TEST, &[]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let caught = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("as set up");
        status.lines().find(|line| line.starts_with("SigCgt")).expect("as set up").to_owned()
    };
    let before = caught();
    let agent = agent("signals");
    let memory = SystemAllocator::default().allocate(4096, 4096).expect("as set up");
    let _registration = memory.nixl_register(&agent).expect("as set up");
    assert_eq!(caught(), before, "handlers of signals changed");
}

#[test]
fn an_unreadable_home_is_named() {
    const TEST: &str = "pitfalls::an_unreadable_home_is_named";
    if !is_alone(TEST) {
        let output = alone(TEST, &[("HOME", "/no/such/home")]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    match agent("home").metadata() {
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("HOME=/no/such/home cannot be read"), "{text}");
        }
        // NIXL gets along without it: then its back end works, and there is nothing to name.
        Ok(metadata) => {
            let reader = crate::agent("home-reader");
            let name = reader.add_peer(&metadata).expect("an agent without a home is a peer as any other");
            assert_eq!(name, "home");
        }
    }
}

#[test]
fn transports_without_tcp_are_refused_before_they_fail() {
    const TEST: &str = "pitfalls::transports_without_tcp_are_refused_before_they_fail";
    if !is_alone(TEST) {
        let output = alone(TEST, &[("UCX_TLS", "sm")]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let error = NixlAgent::new(&NixlOptions::new("no-tcp")).unwrap_err().to_string();
    assert!(error.contains("UCX_TLS is \"sm\"; UCX needs tcp"), "{error}");
}

/// Errors carry NIXL's status and our memory.
#[test]
fn errors_say_which_call_and_what_it_was_about() {
    let agent = agent("errors");
    let memory = SystemAllocator::default().allocate(4096, 4096).expect("as set up");
    let _registration = memory.nixl_register(&agent).expect("as set up");
    let list = |address| {
        let entries = vec![Descriptor { address, bytes: 4096, device_id: 0 }];
        DescriptorList { kind: SegmentKind::Dram, entries }
    };
    let attempt = |peer: &str, remote| {
        let request = RemoteRequest {
            direction: TransferDirection::Read,
            peer: peer.into(),
            local: list(memory.address()),
            remote: list(remote),
            notification: None,
            keep: Box::new(()),
        };
        // SAFETY: nobody else touches the storage; nothing starts.
        unsafe { agent.start(request) }.map(|_| ()).unwrap_err()
    };
    let unknown = attempt("nobody", memory.address());
    assert_eq!(unknown, AgentError::UnknownPeer { agent: "errors".into(), peer: "nobody".into() });
    let other = crate::agent("errors-other");
    let elsewhere = SystemAllocator::default().allocate(4096, 4096).expect("as set up");
    let _other_registration = elsewhere.nixl_register(&other).expect("as set up");
    agent.add_peer(&other.metadata().expect("as set up")).expect("as set up");
    let text = attempt("errors-other", 4096).to_string();
    assert!(text.starts_with("agent errors: create_xfer_req failed with "), "{text}");
    assert!(text.contains("remote read of 1 ranges with errors-other"), "{text}");
}

#[test]
fn files_need_their_back_end_and_move_through_it() {
    let folder = tempfile::tempdir().expect("as set up");
    let file: Arc<dyn Storage> =
        Arc::new(DiskStorage::create(&folder.path().join("slots"), 1 << 20).expect("as set up"));
    let error = file.nixl_register(&agent("no-files")).unwrap_err();
    assert!(matches!(error, AgentError::Unsupported { .. }), "{error}");

    let agent = NixlAgent::new(&NixlOptions { files: Some(FileBackend::Posix), ..NixlOptions::new("files") })
        .expect("as set up");
    let memory = SystemAllocator::default().allocate(1 << 20, 4096).expect("as set up");
    // SAFETY: nobody else touches the storages of this test.
    unsafe { memory.write_at(0, &vec![0x5a; 1 << 20]) }.expect("as set up");
    let _registrations =
        (memory.nixl_register(&agent).expect("as set up"), file.nixl_register(&agent).expect("as set up"));
    let list = |storage: &Arc<dyn Storage>| {
        let ranges = (0..4).map(|at| Descriptor::within(&**storage, at << 18, 1 << 18).expect("as set up"));
        DescriptorList { kind: SegmentKind::of(&**storage).expect("as set up"), entries: ranges.collect() }
    };
    let request = RemoteRequest {
        direction: TransferDirection::Write,
        peer: agent.name().into(),
        local: list(&memory),
        remote: list(&file),
        notification: None,
        keep: Box::new(()),
    };
    // SAFETY: nobody else touches the storages of this test.
    let mut transfer = unsafe { agent.start(request) }.expect("as set up");
    transfer.wait(Instant::now() + Duration::from_secs(30)).expect("as set up");
    assert!(std::fs::read(folder.path().join("slots")).expect("as set up") == vec![0x5a; 1 << 20]);
}

/// An agent for files alone needs nothing of UCX: no tcp, no home.
#[test]
fn an_agent_without_peers_moves_files_and_nothing_else() {
    const TEST: &str = "pitfalls::an_agent_without_peers_moves_files_and_nothing_else";
    if !is_alone(TEST) {
        let output = alone(TEST, &[("UCX_TLS", "sm"), ("HOME", "/no/such/home")]);
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let options = NixlOptions {
        files: Some(FileBackend::Posix),
        peers: false,
        backends: vec![BackendOptions {
            name: "POSIX".to_owned(),
            parameters: vec![("ios_pool_size".to_owned(), "64".to_owned())],
        }],
        ..NixlOptions::new("files-alone")
    };
    let agent = NixlAgent::new(&options).expect("as set up");
    let folder = tempfile::tempdir().expect("as set up");
    let file: Arc<dyn Storage> =
        Arc::new(DiskStorage::create(&folder.path().join("slots"), 8192).expect("as set up"));
    let memory = SystemAllocator::default().allocate(8192, 4096).expect("as set up");
    let _registrations = [&memory, &file].map(|storage| storage.nixl_register(&agent).expect("as set up"));
    for refused in [agent.metadata().map(drop), agent.notifications().map(drop)] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("an agent without peers") && error.contains("NixlOptions::peers"), "{error}");
    }
    let none =
        NixlAgent::new(&NixlOptions { peers: false, ..NixlOptions::new("nothing") }).expect("as set up");
    let error = memory.nixl_register(&none).unwrap_err();
    assert!(matches!(error, AgentError::Unsupported { .. }), "{error}");
}
