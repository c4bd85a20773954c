//! The worker as its leader sees it: commands in wire form, messages in wire form.

use crate::support::{Inbox, LAYERS, NAMESPACE, Rig, Shape, kinds, soon};
use kvbm_device::Event;
use kvbm_disk::Recovered;
use kvbm_layout::{AxisOrder, FullyContiguous, LayoutConfig};
use kvbm_plan::{
    BlockId, Command, Epoch, FailureKind, FlushOutcome, Gate, Message, Path, Priority, Rank, Tier,
    TransferPlan, wire,
};
use kvbm_storage::{BoundLayout, DeviceAllocator};
use kvbm_transfer::{DiskTier, PathConfig, Sink, SubmitError, TransferManager, WorkerConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

#[test]
fn a_plan_in_wire_form_is_answered_in_wire_form() {
    let rig = Rig::new();
    rig.fill_g1(2, 1);
    let plan = rig.plan(Path::G1_G2, &[(1, 2, 3)]);
    rig.send(&Command::Transfer(plan.clone()));
    let report = rig.inbox.report();
    assert_eq!(
        (report.plan_id, report.epoch, report.rank, report.path),
        (plan.plan_id, Epoch(5), Rank(1), Path::G1_G2)
    );
    assert_eq!(kinds(&report), [None]);
    rig.assert_g2(3, 1);
    rig.fill_g1(2, 9);
    rig.send(&Command::Transfer(plan.clone()));
    assert_eq!(rig.inbox.report(), report, "the same report, byte for byte");
    rig.assert_g2(3, 1);
    assert_eq!(rig.manager().execute(plan).unwrap().wait(soon()).unwrap().blocks, report.blocks);
}

#[test]
fn hostile_bytes_are_an_error_for_whoever_sent_them() {
    let rig = Rig::new();
    let good =
        wire::encode_command(&Command::Transfer(rig.plan(Path::G1_G2, &[(1, 0, 0), (2, 1, 1)]))).unwrap();
    assert!(matches!(rig.manager().submit(&[]), Err(SubmitError::Malformed(_))));
    for cut in 0..good.len() {
        assert!(matches!(rig.manager().submit(&good[..cut]), Err(SubmitError::Malformed(_))), "cut at {cut}");
    }
    for (at, bit) in (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << bit;
        // Whatever it says now, it is either refused here or answered like any plan.
        let _ = rig.manager().submit(&bytes);
    }
    rig.must(Path::G1_G2, &[(3, 4, 5)]);
    let stale = TransferPlan { epoch: Epoch(4), ..rig.plan(Path::G1_G2, &[(1, 0, 0)]) };
    let refused = rig.manager().submit(&wire::encode_command(&Command::Transfer(stale)).unwrap());
    assert!(matches!(refused, Err(SubmitError::StaleEpoch { .. })));
}

/// What an engine's side of the worker asks, with no word of the leader.
#[test]
fn whoever_writes_to_g1_waits_for_its_plans_and_learns_which_are_over() {
    let rig = Rig::new();
    rig.fill_g1(0, 1);
    let blocks = [BlockId(0), BlockId(5), BlockId(7)];
    rig.manager().wait_idle(&blocks, Instant::now()).expect("no plan");
    let down = TransferPlan { gate: Gate::Iteration(1), tag: 3, ..rig.plan(Path::G1_G2, &[(1, 0, 2)]) };
    let up = TransferPlan { after: vec![down.plan_id], tag: 4, ..rig.plan(Path::G2_G1, &[(1, 2, 5)]) };
    let other = rig.plan(Path::G1_G2, &[(9, 30, 4)]);
    for plan in [&down, &up, &other] {
        rig.send(&Command::Transfer((*plan).clone()));
    }
    assert_eq!(rig.inbox.report().plan_id, other.plan_id);
    let busy = rig.manager().wait_idle(&blocks, Instant::now()).unwrap_err();
    assert_eq!(busy.blocks, [BlockId(0), BlockId(5)], "slots 2 and 4 are of G2");
    assert!(busy.to_string().contains("2 blocks of G1 (0, 5)"), "{busy}");
    rig.manager().wait_idle(&[BlockId(2), BlockId(4)], Instant::now()).expect("other blocks");
    assert_eq!(rig.manager().drain_finished(), [], "none with a tag");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.manager().wait_idle(&blocks, soon()));
        rig.send(&Command::Advance { iteration: 1, layer: None });
        waiting.join().unwrap().expect("both plans end");
    });
    let finished = rig.manager().drain_finished();
    let seen: Vec<_> =
        finished.iter().map(|plan| (plan.tag, plan.plan_id, plan.arrived, plan.failed)).collect();
    assert_eq!(seen, [(3, down.plan_id, 1, 0), (4, up.plan_id, 1, 0)]);
    // A repeated plan is answered, and finishes once.
    rig.send(&Command::Transfer(up));
    assert_eq!(rig.manager().drain_finished(), []);
    assert_eq!(rig.manager().stats().finished_dropped, 0);
}

#[test]
fn commands_open_gates_and_cancel() {
    let rig = Rig::new();
    rig.fill_g1(0, 1);
    let layer =
        TransferPlan { gate: Gate::Layer { iteration: 8, layer: 2 }, ..rig.plan(Path::G1_G2, &[(1, 0, 0)]) };
    let never = TransferPlan { gate: Gate::Iteration(99), ..rig.plan(Path::G1_G2, &[(1, 0, 1)]) };
    let after = TransferPlan { after: vec![layer.plan_id], ..rig.plan(Path::G2_G1, &[(1, 0, 5)]) };
    let doomed = TransferPlan { after: vec![never.plan_id], ..rig.plan(Path::G2_G1, &[(1, 1, 6)]) };
    for plan in [&after, &layer, &never, &doomed] {
        rig.send(&Command::Transfer((*plan).clone()));
    }
    let early = rig.inbox.report();
    assert_eq!(
        (early.plan_id, kinds(&early)),
        (after.plan_id, vec![Some(FailureKind::Predecessor)]),
        "sent too early"
    );
    let after = TransferPlan { plan_id: kvbm_plan::PlanId(50), ..after };
    rig.send(&Command::Transfer(after.clone()));
    rig.send(&Command::Advance { iteration: 8, layer: Some(1) });
    rig.send(&Command::Cancel { plan_id: never.plan_id });
    let reports = [rig.inbox.report(), rig.inbox.report()];
    assert_eq!(reports.each_ref().map(|report| report.plan_id), [never.plan_id, doomed.plan_id]);
    assert_eq!(kinds(&reports[0]), [Some(FailureKind::Cancelled)]);
    assert_eq!(kinds(&reports[1]), [Some(FailureKind::Predecessor)]);
    rig.send(&Command::Advance { iteration: 8, layer: Some(2) });
    let reports = [rig.inbox.report(), rig.inbox.report()];
    assert_eq!(reports.each_ref().map(|report| report.plan_id), [layer.plan_id, after.plan_id]);
    rig.assert_g1(5, 1);
}

#[test]
fn a_block_is_read_only_after_the_event_of_the_engine() {
    let rig = Rig::new();
    let (event, engine) = Event::completable();
    let gated = TransferPlan { gate: Gate::DeviceEvent(7), ..rig.plan(Path::G1_G2, &[(1, 0, 0)]) };
    let handle = rig.manager().execute(gated).unwrap();
    rig.manager().register_event(7, &event);
    rig.must(Path::G1_G2, &[(2, 1, 1)]);
    assert_eq!(handle.poll_report(), None);
    rig.fill_g1(0, 1);
    engine.complete(Ok(()));
    assert_eq!(kinds(&handle.wait(soon()).unwrap()), [None]);
    rig.assert_g2(0, 1);
    let (event, engine) = Event::completable();
    rig.manager().register_event(8, &event);
    let gated = TransferPlan { gate: Gate::DeviceEvent(8), ..rig.plan(Path::G1_G2, &[(1, 0, 2)]) };
    let handle = rig.manager().execute(gated).unwrap();
    drop(engine);
    assert_eq!(kinds(&handle.wait(soon()).unwrap()), [Some(FailureKind::Device)], "the engine went away");
}

#[test]
fn the_disk_reports_what_it_holds_and_flushes_on_request() {
    let rig = Rig::new();
    let none = Message::Recovered {
        rank: Rank(1),
        tier: Tier::G3,
        blocks: Vec::new(),
        unusable: Vec::new(),
        last: true,
    };
    assert_eq!(rig.inbox.next(), none);
    assert_eq!(rig.inbox.next(), Message::Ready { rank: Rank(1), epoch: Epoch(5), volumes: false });
    for (name, slot) in [(1, 1), (2, 2), (3, 3)] {
        rig.fill_g1(slot, name);
    }
    rig.must(Path::G1_G2, &[(1, 1, 1), (2, 2, 2), (3, 3, 3)]);
    rig.must(Path::G2_G3, &[(1, 1, 4), (2, 2, 5), (3, 3, 6)]);
    rig.send(&Command::Release { tier: Tier::G3, blocks: vec![kvbm_plan::BlockId(5)] });
    rig.send(&Command::Flush { token: 77 });
    let Message::Flushed { rank, epoch, token, outcome } = rig.inbox.next() else { panic!("flushed") };
    assert_eq!((rank, epoch, token, outcome), (Rank(1), Epoch(5), 77, FlushOutcome::Durable { blocks: 2 }));

    rig.send(&Command::Forget { tier: Tier::G3, namespace: kvbm_plan::NamespaceId(2) });
    rig.send(&Command::Flush { token: 78 });
    let Message::Flushed { outcome, .. } = rig.inbox.next() else { panic!("flushed") };
    assert_eq!(outcome, FlushOutcome::Durable { blocks: 2 }, "of another namespace");

    let Rig { dir, manager, disk, medium, .. } = rig;
    disk.quarantine(&[kvbm_plan::BlockId(7)]);
    drop((manager, disk, medium));
    let rig = Rig::at(dir, Shape::default(), |_| {});
    let Message::Recovered { blocks, unusable, last: true, .. } = rig.inbox.next() else {
        panic!("recovered")
    };
    assert_eq!(unusable, [kvbm_plan::BlockId(7)]);
    let mut found: Vec<_> = blocks.iter().map(|found| (found.block.0, found.identity)).collect();
    // They come in the order in which they were written, and two threads wrote.
    found.sort_by_key(|(slot, _)| *slot);
    assert_eq!(found, [(4, crate::support::identity(1)), (6, crate::support::identity(3))]);
    rig.must(Path::G3_G1, &[(1, 4, 0), (3, 6, 1)]);
    rig.assert_g1(0, 1);
    rig.assert_g1(1, 3);

    assert!(matches!(rig.inbox.next(), Message::Ready { .. }));
    rig.send(&Command::Forget { tier: Tier::G3, namespace: crate::support::identity(1).namespace });
    rig.send(&Command::Flush { token: 79 });
    let Message::Flushed { outcome, .. } = rig.inbox.next() else { panic!("flushed") };
    assert_eq!(outcome, FlushOutcome::Durable { blocks: 0 });
    let report = rig.go(Path::G3_G1, &[(1, 4, 0)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Missing)]);
}

#[test]
fn commands_about_a_disk_need_a_disk() {
    let rig = Rig::tuned(|worker| {
        worker.g3 = None;
        worker.paths = kvbm_transfer::PathConfigs::all(PathConfig { threads: 3, ..PathConfig::default() });
    });
    for command in [
        Command::Flush { token: 1 },
        Command::Release { tier: Tier::G3, blocks: Vec::new() },
        Command::Forget { tier: Tier::G3, namespace: kvbm_plan::NamespaceId(1) },
    ] {
        let error = rig.manager().submit(&wire::encode_command(&command).unwrap()).unwrap_err();
        assert!(matches!(error, SubmitError::NoSuchTier { .. }), "{error}");
    }
    let report = rig.go(Path::G2_G3, &[(1, 0, 0)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Unsupported)]);
    assert!(crate::support::detail(&report, 0).contains("no G3"));
    rig.fill_g1(0, 1);
    rig.must(Path::G1_G2, &[(1, 0, 0)]);
}

#[test]
fn without_a_staging_ring_there_is_no_direct_way_up() {
    let rig = Rig::tuned(|worker| worker.staging_bytes = 0);
    let report = rig.go(Path::G3_G1, &[(1, 0, 0)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Unsupported)]);
    assert!(crate::support::detail(&report, 0).contains("staging_bytes"));
    assert_eq!(rig.manager().staging_bytes(), 0);
}

#[test]
fn urgent_plans_overtake_in_a_busy_queue() {
    let rig = Rig::tuned(|worker| {
        worker.paths.g1_g2 =
            PathConfig { queue_plans: 2, depth_blocks: 1, batch_blocks: 1, ..PathConfig::default() };
    });
    let stall = kvbm_device::FaultRule::next(kvbm_device::Fault::Stall).on_stream("g1_g2");
    let ticket = rig.device.faults().inject(stall);
    rig.send(&Command::Transfer(rig.plan(Path::G1_G2, &[(1, 0, 0)])));
    ticket.wait_struck(soon()).unwrap();
    for priority in [Priority::Background, Priority::Urgent, Priority::Urgent] {
        rig.send(&Command::Transfer(TransferPlan { priority, ..rig.plan(Path::G1_G2, &[(2, 1, 1)]) }));
    }
    let full = rig.inbox.report();
    assert_eq!((full.plan_id.0, kinds(&full)), (4, vec![Some(FailureKind::QueueFull)]), "answered at once");
    ticket.release();
    let order: Vec<u64> = (0..3).map(|_| rig.inbox.report().plan_id.0).collect();
    assert_eq!(order, [1, 3, 2]);
}

/// A sink that panics, is slow, and submits commands itself.
#[test]
fn the_sink_may_misbehave() {
    let rig = Rig::new();
    let inbox = Inbox::new();
    let (calls, forward) = (Arc::new(AtomicU64::new(0)), inbox.sink());
    let counted = Arc::clone(&calls);
    let sink: Sink = Arc::new(move |bytes| {
        let is_report = matches!(wire::decode_message(&bytes), Ok(Message::Transfer(_)));
        assert!(
            !is_report || counted.fetch_add(1, Ordering::Relaxed) > 0,
            "the first report is lost to a panic"
        );
        forward(bytes);
    });
    let mut config = WorkerConfig::new(Rank(0), Epoch(5), NAMESPACE);
    config.g1 = Some(rig.g1.clone());
    config.g2 = Some(rig.g2.clone());
    config.device = Some(Arc::new(rig.device.clone()));
    let manager = TransferManager::start(config, sink).unwrap();
    let go = |slot, name| {
        rig.fill_g1(slot, name);
        let plan = Command::Transfer(rig.plan(Path::G1_G2, &[(name, slot, slot)]));
        manager.submit(&wire::encode_command(&plan).unwrap()).unwrap();
    };
    go(0, 1);
    // Plans end in any order: the second starts when the report of the first is lost.
    let until = soon();
    while manager.stats().sink_panics == 0 {
        assert!(std::time::Instant::now() < until, "the first plan is never reported");
        std::thread::yield_now();
    }
    go(1, 2);
    assert_eq!(inbox.report().plan_id.0, 2);
    assert_eq!(manager.stats().sink_panics, 1);
    manager.shutdown(soon()).unwrap();
}

type Tune = fn(&mut WorkerConfig, &Rig);

#[test]
fn a_worker_that_cannot_work_does_not_start() {
    let rig = Rig::new();
    let sink = Inbox::new().sink();
    let broken: [(&str, Tune); 11] = [
        ("threads = 0", |config, _| config.paths.g1_g2.threads = 0),
        ("depth_blocks = 4", |config, _| {
            config.paths.g2_g1 = PathConfig { depth_blocks: 4, ..PathConfig::default() }
        }),
        ("queue_blocks = 9", |config, _| config.paths.g2_g3.queue_blocks = 9),
        ("Sampled(0)", |config, _| config.verify_host = kvbm_transfer::VerifyHost::Sampled(0)),
        ("must be host memory", |config, rig| config.g2 = Some(rig.g1.clone())),
        ("device = none", |config, _| config.device = None),
        ("num_layers", |config, rig| {
            let shallow = LayoutConfig { num_layers: LAYERS - 1, ..crate::support::model(4) };
            let shallow = Arc::new(FullyContiguous::new(shallow, AxisOrder::Nhd).expect("a layout"));
            let memory = DeviceAllocator::new(Arc::new(rig.device.clone()));
            config.g1 = Some(BoundLayout::allocate(shallow, &memory).expect("memory"));
        }),
        ("needs g2", |config, rig| {
            (config.g2, config.g3) =
                (None, Some(DiskTier { engine: Arc::clone(&rig.disk), recovered: Recovered::default() }));
        }),
        ("2 disk_shapes", |config, rig| {
            (config.g2, config.disk_shapes) = (None, vec![crate::support::contiguous(1); 2]);
            config.g3 = Some(DiskTier { engine: Arc::clone(&rig.disk), recovered: Recovered::default() });
        }),
        ("g2 has the shapes", |config, _| config.disk_shapes = vec![crate::support::contiguous(1)]),
        ("must be the tag that g3 was opened with", |config, rig| {
            config.namespace = [1; 16];
            config.g3 = Some(DiskTier { engine: Arc::clone(&rig.disk), recovered: Recovered::default() });
        }),
    ];
    for (names, tune) in broken {
        let mut config = WorkerConfig::new(Rank(0), Epoch(1), NAMESPACE);
        config.device = Some(Arc::new(rig.device.clone()));
        config.g1 = Some(rig.g1.clone());
        config.g2 = Some(rig.g2.clone());
        tune(&mut config, &rig);
        let error = TransferManager::start(config, Arc::clone(&sink)).unwrap_err().to_string();
        assert!(error.contains(names), "{error}");
    }
}
