//! Planted faults: never served as good bytes, said with their place and reason, and no other block
//! suffers.

use crate::support::medium::DiskFault;
use crate::support::{Rig, Shape, detail, kinds, soon};
use kvbm_device::{Direction, Fault, FaultRule, OpKind};
use kvbm_plan::{BlockId, BlockOutcome, Command, FailureKind, FlushOutcome, Message, Path, PlanId};
use kvbm_transfer::{PathConfig, VerifyHost};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const EIGHT: [(u8, u32, u32); 8] =
    [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6), (7, 7, 7)];

/// Eight blocks in G1, and with `path` also further down.
fn filled(down_to_disk: bool, tune: impl FnOnce(&mut kvbm_transfer::WorkerConfig)) -> Rig {
    let rig = Rig::tuned(tune);
    for (name, slot, _) in EIGHT {
        rig.fill_g1(slot, name);
    }
    rig.must(Path::G1_G2, &EIGHT);
    if down_to_disk {
        rig.must(Path::G2_G3, &EIGHT);
    }
    rig
}

/// Byte offset of a slot in the slot file: slots of these small blocks are 4096 bytes apart.
pub(crate) fn slot_offset(slot: u64) -> u64 {
    slot * 4096
}

/// The engine's file, opened behind its back.
fn slot_file(rig: &Rig) -> std::fs::File {
    let path = rig.dir.path().join("slots.kvbm");
    std::fs::File::options().read(true).write(true).open(path).expect("the slot file")
}

fn flip_on_disk(rig: &Rig, slot: u64, byte: u64) {
    let file = slot_file(rig);
    let mut cell = [0_u8];
    file.read_exact_at(&mut cell, slot_offset(slot) + byte).expect("inside the file");
    cell[0] ^= 1;
    file.write_all_at(&cell, slot_offset(slot) + byte).expect("inside the file");
}

/// Mutation that makes it fail: `Copier::complete` counts a failed event as success.
#[test]
fn invariant_1_a_copy_that_fails_on_the_device_is_no_success_and_harms_no_other_block() {
    for fault in [Fault::Fail, Fault::FailHalfway] {
        let rig = filled(false, |worker| {
            worker.paths.g2_g1 = PathConfig { batch_blocks: 1, depth_blocks: 8, ..PathConfig::default() };
        });
        let rule = FaultRule::next(fault).of_kind(OpKind::Copy(Direction::HostToDevice)).after(2);
        let ticket = rig.device.faults().inject(rule);
        let back: Vec<_> = EIGHT.iter().map(|(name, slot, _)| (*name, *slot, slot + 8)).collect();
        let report = rig.go(Path::G2_G1, &back);
        ticket.wait_struck(soon()).unwrap();
        let failed: Vec<usize> = (0..8).filter(|index| !report.blocks[*index].is_done()).collect();
        assert_eq!(failed, [2], "{report:?}");
        assert_eq!(kinds(&report)[2], Some(FailureKind::Device));
        for words in ["path g2_g1", "slot 2 of G2", "slot 10 of G1", "stream g2_g1"] {
            assert!(detail(&report, 2).contains(words), "{}", detail(&report, 2));
        }
        for (name, _, slot) in back.iter().filter(|(name, ..)| *name != 2) {
            rig.assert_g1(*slot, *name);
        }
        assert_eq!(report.bytes, 7 * rig.g1.bytes_per_block());
        rig.must(Path::G2_G1, &[(2, 2, 10)]);
        rig.assert_g1(10, 2);
    }
}

#[test]
fn a_failed_batch_is_taken_apart() {
    let rig = filled(false, |_| {});
    rig.device.faults().inject(FaultRule::next(Fault::FailHalfway).on_stream("g1_g2"));
    let report = rig.go(Path::G1_G2, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8)));
    assert_eq!(kinds(&report), [None; 8], "the fault struck the batch; one by one all blocks pass");
    for (name, slot, _) in EIGHT {
        rig.assert_g2(slot + 8, name);
    }
}

#[test]
fn a_block_whose_offload_failed_cannot_be_read_from_its_slot() {
    let rig = filled(false, |_| {});
    let rule = || FaultRule::next(Fault::FailHalfway).on_stream("g1_g2");
    rig.device.faults().inject(rule());
    let report = rig.go(Path::G1_G2, &[(0, 0, 3)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Device)]);
    for name in [0, 3] {
        let report = rig.go(Path::G2_G1, &[(name, 3, 12)]);
        assert_eq!(kinds(&report), [Some(FailureKind::Missing)], "half of block 0 lies over block 3");
    }
}

/// Mutation that makes it fail: `ReadClaim::verify` skips the comparison; `HostTier::read` skips
/// the identity; `DiskWrites` writes without the known checksum.
#[test]
fn invariant_5_a_damaged_swapped_or_stale_host_slot_is_never_served() {
    let rig = filled(false, |worker| worker.verify_host = VerifyHost::Always);
    rig.damage_g2(4);
    let report = rig.go(Path::G2_G1, &[(3, 3, 11), (4, 4, 12), (5, 5, 13)]);
    assert_eq!(kinds(&report), [None, Some(FailureKind::Corrupt), None]);
    assert!(detail(&report, 1).contains("slot 4 of G2") && detail(&report, 1).contains("checksum"));
    assert_eq!(
        kinds(&rig.go(Path::G2_G1, &[(4, 4, 12)])),
        [Some(FailureKind::Missing)],
        "and not a second time"
    );
    let swapped = rig.go(Path::G2_G1, &[(1, 2, 14), (2, 1, 15)]);
    assert_eq!(kinds(&swapped), [Some(FailureKind::Corrupt); 2]);
    assert!(detail(&swapped, 0).contains("stale or was swapped"));
    rig.damage_g2(6);
    let saved = rig.go(Path::G2_G3, &[(6, 6, 6), (7, 7, 7)]);
    assert_eq!(kinds(&saved), [Some(FailureKind::Corrupt), None], "damaged memory never reaches the disk");
    assert_eq!(rig.manager().stats().path(Path::G2_G1).unwrap().failed(FailureKind::Corrupt), 3);
    assert_eq!(rig.manager().stats().host_verified, 2);
}

#[test]
fn host_memory_is_verified_as_often_as_asked() {
    for (policy, verified) in [(VerifyHost::Never, 0), (VerifyHost::Sampled(4), 2), (VerifyHost::Always, 8)] {
        let rig = filled(false, |worker| worker.verify_host = policy);
        rig.must(Path::G2_G1, &EIGHT);
        assert_eq!(rig.manager().stats().host_verified, verified, "{policy:?}");
    }
}

/// Mutation that makes it fail: `DiskReads` finishes its claim although the read failed.
#[test]
fn invariant_5_a_bit_flip_on_disk_is_a_miss_on_both_ways_up() {
    for path in [Path::G3_G2, Path::G3_G1] {
        let rig = filled(true, |_| {});
        flip_on_disk(&rig, 2, 100);
        flip_on_disk(&rig, 5, 0);
        let report = rig.go(path, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8)));
        let corrupt = Some(FailureKind::Corrupt);
        assert_eq!(kinds(&report), [None, None, corrupt, None, None, corrupt, None, None]);
        assert!(detail(&report, 2).contains("slot 2"), "{}", detail(&report, 2));
        for (name, slot, _) in EIGHT.iter().filter(|(name, ..)| ![2, 5].contains(name)) {
            if path == Path::G3_G1 { rig.assert_g1(slot + 8, *name) } else { rig.assert_g2(slot + 8, *name) }
        }
        let again = rig.go(path, &[(2, 2, 10)]);
        assert!(!again.blocks[0].is_done(), "quarantined");
        if path == Path::G3_G2 {
            let up = rig.go(Path::G2_G1, &[(2, 10, 12)]);
            assert_eq!(kinds(&up), [Some(FailureKind::Missing)], "what was read into G2 is not there");
        }
    }
}

#[test]
fn invariant_5_two_swapped_slots_and_a_stale_one_are_found_on_disk() {
    let rig = filled(true, |_| {});
    let report = rig.go(Path::G3_G1, &[(1, 2, 9), (2, 1, 10), (3, 3, 11)]);
    assert_eq!(kinds(&report)[2], None);
    assert!(report.blocks[..2].iter().all(|block| !block.is_done()), "{report:?}");
    let file = slot_file(&rig);
    let mut other = vec![0; rig.g2.bytes_per_block() as usize];
    file.read_exact_at(&mut other, slot_offset(6)).unwrap();
    file.write_all_at(&other, slot_offset(5)).unwrap();
    let report = rig.go(Path::G3_G2, &[(5, 5, 13), (6, 6, 14)]);
    assert_eq!(kinds(&report), [Some(FailureKind::Corrupt), None]);
    assert_eq!(kinds(&rig.go(Path::G3_G2, &[(9, 12, 13)])), [Some(FailureKind::Missing)]);
}

#[test]
fn invariant_5_none_of_a_thousand_random_bit_flips_is_served() {
    let rig = Rig::with(Shape { disk_slots: 1000, ..Shape::default() }, |_| {});
    let bytes = rig.g1.bytes_per_block();
    let name = |slot: u32| (slot % 250) as u8;
    let rounds: Vec<Vec<(u8, u32, u32)>> = (0..1000_u32)
        .collect::<Vec<_>>()
        .chunks(16)
        .map(|slots| (0..16).zip(slots).map(|(host, slot)| (name(*slot), host, *slot)).collect())
        .collect();
    for moves in &rounds {
        for (name, host, _) in moves {
            rig.fill_g1(*host, *name);
        }
        rig.must(Path::G1_G2, &moves.iter().map(|(name, host, _)| (*name, *host, *host)).collect::<Vec<_>>());
        rig.must(Path::G2_G3, moves);
    }
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for slot in 0..1000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        flip_on_disk(&rig, slot, (random >> 33) % bytes);
    }
    for (round, moves) in rounds.iter().enumerate() {
        let path = if round % 2 == 0 { Path::G3_G1 } else { Path::G3_G2 };
        let report =
            rig.go(path, &moves.iter().map(|(name, host, slot)| (*name, *slot, *host)).collect::<Vec<_>>());
        assert_eq!(kinds(&report), vec![Some(FailureKind::Corrupt); moves.len()]);
    }
    assert_eq!(rig.disk.info().quarantined_slots, 1000);
}

#[test]
fn invariant_5_a_truncated_slot_file_is_a_miss() {
    let rig = filled(true, |_| {});
    slot_file(&rig).set_len(slot_offset(6)).expect("truncated");
    let report = rig.go(Path::G3_G1, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8)));
    let missing = Some(FailureKind::Missing);
    assert_eq!(kinds(&report), [None, None, None, None, None, None, missing, missing]);
    assert_eq!(rig.disk.info().quarantined_slots, 0);
    slot_file(&rig).set_len(slot_offset(5) + 100).expect("truncated");
    let report = rig.go(Path::G3_G2, &[(4, 4, 8), (5, 5, 9)]);
    assert!(report.blocks[0].is_done() && !report.blocks[1].is_done(), "{report:?}");
}

#[test]
fn an_error_of_the_disk_fails_the_block_and_names_it() {
    let rig = filled(true, |_| {});
    rig.medium.inject(DiskFault::FailRead(slot_offset(3)));
    rig.medium.inject(DiskFault::FailWrite(slot_offset(12)));
    for path in [Path::G3_G2, Path::G3_G1] {
        let report = rig.go(path, &[(2, 2, 10), (3, 3, 11), (4, 4, 12)]);
        assert_eq!(kinds(&report), [None, Some(FailureKind::Io), None]);
        assert!(detail(&report, 1).contains(&format!("path {path}")), "{}", detail(&report, 1));
    }
    let report = rig.go(Path::G2_G3, &[(0, 0, 11), (1, 1, 12), (5, 5, 13)]);
    assert_eq!(kinds(&report), [None, Some(FailureKind::Io), None]);
    rig.medium.clear();
    assert!(!rig.go(Path::G3_G2, &[(1, 12, 11)]).blocks[0].is_done(), "the failed write left no block");
    rig.must(Path::G3_G1, &[(3, 3, 11)]);
    rig.assert_g1(11, 3);
}

#[test]
fn a_stalled_disk_stops_neither_memory_paths_nor_deadlines() {
    let rig = filled(true, |worker| {
        worker.paths.g3_g2 = PathConfig { depth_blocks: 1, batch_blocks: 1, ..PathConfig::default() };
    });
    rig.medium.inject(DiskFault::StallRead(slot_offset(0)));
    let stalled = rig.manager().execute(rig.plan(Path::G3_G2, &[(0, 0, 8)])).unwrap();
    rig.medium.wait_stalled();
    let mut late = rig.plan(Path::G3_G2, &[(1, 1, 9)]);
    late.budget_ms = 5;
    assert_eq!(kinds(&rig.run(late)), [Some(FailureKind::PathBusy)]);
    rig.must(Path::G2_G1, &[(2, 2, 12)]);
    rig.assert_g1(12, 2);
    assert_eq!(stalled.poll_report(), None, "no report while the hardware has the block");
    rig.medium.clear();
    assert_eq!(kinds(&stalled.wait(soon()).unwrap()), [None]);
    rig.assert_g2(8, 0);
}

#[test]
fn a_flush_of_a_disk_that_does_not_sync_is_given_up_in_time() {
    let rig = filled(true, |worker| worker.flush_deadline = Duration::from_millis(30));
    rig.medium.inject(DiskFault::StallSync);
    let writing = rig.manager().execute(rig.plan(Path::G2_G3, &[(5, 5, 9)])).unwrap();
    rig.medium.wait_stalled();
    rig.send(&Command::Flush { token: 8 });
    let flushed = || loop {
        if let Message::Flushed { token, outcome, .. } = rig.inbox.next() {
            return (token, outcome);
        }
    };
    let (token, outcome) = flushed();
    let FlushOutcome::Failed(failure) = outcome else { panic!("{outcome:?}") };
    assert_eq!((token, failure.kind), (8, FailureKind::Deadline), "{failure}");
    rig.medium.clear();
    assert_eq!(kinds(&writing.wait(soon()).unwrap()), [None]);
    // So short a deadline may strike a sound disk as well, on a busy machine.
    let until = soon();
    for token in 9.. {
        rig.send(&Command::Flush { token });
        let (answered, outcome) = flushed();
        assert_eq!(answered, token);
        if matches!(outcome, FlushOutcome::Durable { .. }) {
            break;
        }
        assert!(Instant::now() < until, "{outcome:?}");
    }
}

/// Mutation that makes it fail: `DiskCarrier::complete` tells `Busy` like any failure.
#[test]
fn a_write_to_a_slot_that_is_written_again_waits_and_others_do_not() {
    let rig = filled(true, |_| {});
    rig.medium.inject(DiskFault::FailSync);
    rig.medium.inject(DiskFault::StallRead(slot_offset(9)));
    rig.must(Path::G2_G3, &[(5, 5, 9)]);
    // Its sync has failed, and the engine looks at what it wrote.
    rig.medium.wait_stalled();
    // On a busy machine a short budget passes before the write has started.
    let mut ended = (0..8).map(|doubled| {
        let mut late = rig.plan(Path::G2_G3, &[(6, 6, 9)]);
        late.budget_ms = 20 << doubled;
        kinds(&rig.run(late))
    });
    let started = ended.find(|kinds| *kinds != [Some(FailureKind::PathBusy)]);
    assert_eq!(started, Some(vec![Some(FailureKind::Deadline)]), "not for ever");
    let waits = rig.manager().execute(rig.plan(Path::G2_G3, &[(6, 6, 9)])).unwrap();
    rig.must(Path::G2_G3, &[(7, 7, 10)]);
    assert_eq!(waits.poll_report(), None, "it is not told that the slot is busy");
    rig.medium.clear();
    assert_eq!(kinds(&waits.wait(soon()).unwrap()), [None]);
    rig.must(Path::G3_G2, &[(6, 9, 12)]);
    rig.assert_g2(12, 6);
}

/// Mutations that make them fail: `DiskCarrier::retry_waiting` takes all for due; or it does not
/// look whether the worker closes.
#[test]
fn a_write_that_waits_for_its_slot_is_tried_now_and_then_and_ends_with_the_worker() {
    let rig = filled(true, |_| {});
    rig.medium.inject(DiskFault::FailSync);
    rig.medium.inject(DiskFault::StallRead(slot_offset(9)));
    rig.must(Path::G2_G3, &[(5, 5, 9)]);
    rig.medium.wait_stalled();
    let (began, refused) = (Instant::now(), rig.disk.stats().refused);
    let waits = rig.manager().execute(rig.plan(Path::G2_G3, &[(6, 6, 9)])).unwrap();
    let tries = || rig.disk.stats().refused - refused;
    while tries() < 5 {
        assert!(began.elapsed() < Duration::from_secs(30), "it is not tried");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Two milliseconds lie between two of them.
    let (tries, most) = (tries(), began.elapsed().as_millis() as u64 / 2 + 1);
    assert!(tries <= most, "tried {tries} times of at most {most}");
    drop(rig.manager().shutdown(Instant::now() + Duration::from_millis(1)));
    assert_eq!(kinds(&waits.wait(soon()).unwrap()), [Some(FailureKind::ShuttingDown)]);
    rig.medium.clear();
}

/// Mutation that makes it fail: `renew::some` tells nobody.
#[test]
fn a_block_that_the_disk_gives_up_is_reported() {
    let rig = filled(true, |_| {});
    rig.medium.inject(DiskFault::FailSync);
    rig.medium.inject(DiskFault::FailRead(slot_offset(9)));
    rig.must(Path::G2_G3, &[(5, 5, 9)]);
    let (slot, identity, failure) = loop {
        if let Message::Damaged { block, identity, failure, .. } = rig.inbox.next() {
            break (block, identity, failure);
        }
    };
    assert_eq!((slot.0, identity, failure.kind), (9, crate::support::identity(5), FailureKind::Missing));
    assert!(failure.detail.contains("durable"), "{failure}");
    rig.medium.clear();
}

/// Mutation that makes it fail: `HostTier::write` ignores readers.
#[test]
fn invariant_3_a_started_transfer_owns_its_ends_until_the_hardware_is_done() {
    let rig = filled(false, |_| {});
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g2_g1"));
    let started = rig.manager().execute(rig.plan(Path::G2_G1, &[(1, 1, 9)])).unwrap();
    let started_id = started.plan_id();
    ticket.wait_struck(soon()).unwrap();
    started.cancel();
    let overwrite = rig.go(Path::G1_G2, &[(2, 2, 1)]);
    assert_eq!(kinds(&overwrite), [Some(FailureKind::QueueFull)], "its source is not overwritten");
    assert!(detail(&overwrite, 0).contains("in use"));
    assert_eq!(started.poll_report(), None, "cancelling a started transfer changes nothing");
    drop(started);
    assert_eq!(rig.manager().stats().path(Path::G2_G1).unwrap().running_plans, 1, "dropping it detaches it");
    ticket.release();
    let mut again = rig.plan(Path::G2_G1, &[(1, 1, 9)]);
    again.plan_id = started_id;
    assert_eq!(kinds(&rig.run(again)), [None], "the same report, when it is over");
    rig.assert_g1(9, 1);
    assert_eq!(rig.manager().stats().path(Path::G2_G1).unwrap().blocks, 1);
}

/// Mutation that makes it fail: `TransferHandle::drop` does not cancel.
#[test]
fn invariant_3_dropping_an_unstarted_transfer_cancels_it() {
    let rig = filled(false, |worker| {
        worker.paths.g2_g1 = PathConfig { depth_blocks: 1, batch_blocks: 1, ..PathConfig::default() };
    });
    let before = rig.read(&rig.g1, 10);
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g2_g1"));
    let running = rig.manager().execute(rig.plan(Path::G2_G1, &[(1, 1, 9)])).unwrap();
    ticket.wait_struck(soon()).unwrap();
    drop(rig.manager().execute(rig.plan(Path::G2_G1, &[(2, 2, 10)])).unwrap());
    rig.manager().execute(rig.plan(Path::G2_G1, &[(3, 3, 11)])).unwrap().detach();
    ticket.release();
    running.wait(soon()).unwrap();
    rig.must(Path::G2_G1, &[(4, 4, 12)]);
    let stats = *rig.manager().stats().path(Path::G2_G1).unwrap();
    assert_eq!((stats.blocks, stats.failed(FailureKind::Cancelled)), (3, 1));
    assert_eq!(rig.read(&rig.g1, 10), before);
    rig.assert_g1(11, 3);
}

/// Mutation that makes it fail: `TransferManager::drop` waits without its deadline.
#[test]
fn invariant_3_dropping_the_worker_with_work_in_flight_neither_hangs_nor_frees_memory() {
    let mut rig = filled(false, |worker| worker.drop_deadline = Duration::from_millis(20));
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g2_g1"));
    let handle = rig.manager().execute(rig.plan(Path::G2_G1, &[(1, 1, 9)])).unwrap();
    ticket.wait_struck(soon()).unwrap();
    let manager = rig.manager.take();
    let (dropped, end) = crossbeam_channel::bounded(1);
    let dropping = std::thread::spawn(move || {
        drop(manager);
        dropped.send(())
    });
    assert_eq!(end.recv_deadline(soon()), Ok(()), "the drop ends while the device still stalls");
    assert!(dropping.join().is_ok());
    assert_eq!(handle.poll_report(), None, "not over, so not reported");
    ticket.release();
    assert_eq!(kinds(&handle.wait(soon()).unwrap()), [None]);
    rig.assert_g1(9, 1);
}

/// Mutation that makes it fail: the deadline is `Instant::now() + drop_deadline`, which panics.
#[test]
fn invariant_6_no_drop_deadline_is_too_long() {
    let mut rig = filled(false, |worker| worker.drop_deadline = Duration::MAX);
    rig.must(Path::G2_G1, &[(1, 1, 9)]);
    drop(rig.manager.take());
    rig.assert_g1(9, 1);
}

#[test]
fn shutdown_waits_for_started_plans_and_answers_queued_ones() {
    let mut rig = filled(false, |worker| {
        worker.paths.g1_g2 = PathConfig { depth_blocks: 1, batch_blocks: 1, ..PathConfig::default() };
    });
    let ticket = rig.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("g1_g2"));
    let started = rig.manager().execute(rig.plan(Path::G1_G2, &[(0, 0, 8), (1, 1, 9)])).unwrap();
    ticket.wait_struck(soon()).unwrap();
    let queued = rig.manager().execute(rig.plan(Path::G1_G2, &[(2, 2, 10)])).unwrap();
    let manager = rig.manager.take().unwrap();
    assert_eq!(manager.shutdown(Instant::now()).map_err(|error| error.running), Err(1), "the started one");
    let stopping = std::thread::spawn(move || manager.shutdown(soon()));
    assert_eq!(kinds(&queued.wait(soon()).unwrap()), [Some(FailureKind::ShuttingDown)]);
    assert_eq!(started.poll_report(), None);
    ticket.release();
    stopping.join().unwrap().unwrap();
    assert_eq!(kinds(&started.wait(Instant::now()).unwrap()), [None, None]);
    rig.assert_g2(9, 1);
}

#[test]
fn a_dead_stream_is_replaced_for_the_next_plan() {
    let rig = filled(false, |_| {});
    for round in 0..3 {
        rig.device.faults().inject(FaultRule::next(Fault::Fail).on_stream("g2_g1"));
        let report = rig.go(Path::G2_G1, &[(round, u32::from(round), 9)]);
        assert_eq!(kinds(&report), [Some(FailureKind::Device)]);
        rig.must(Path::G2_G1, &[(round, u32::from(round), 9)]);
        rig.assert_g1(9, round);
    }
}

#[test]
fn a_device_fault_between_staging_ring_and_g1_gives_the_slot_back() {
    let rig = filled(true, |worker| worker.staging_bytes = 1);
    for round in 0..3 {
        rig.device.faults().inject(FaultRule::next(Fault::FailHalfway).on_stream("g3_g1"));
        let report = rig.go(Path::G3_G1, &[(round, u32::from(round), 9)]);
        assert_eq!(kinds(&report), [Some(FailureKind::Device)]);
    }
    rig.must(Path::G3_G1, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8)));
    for (name, slot, _) in EIGHT {
        rig.assert_g1(slot + 8, name);
    }
}

#[test]
fn a_shut_disk_engine_fails_blocks_and_nothing_hangs() {
    let rig = filled(true, |_| {});
    assert!(rig.disk.shutdown(Duration::from_secs(30)));
    for path in [Path::G2_G3, Path::G3_G2, Path::G3_G1] {
        assert_eq!(kinds(&rig.go(path, &[(1, 1, 9)])), [Some(FailureKind::ShuttingDown)], "{path}");
    }
    rig.must(Path::G2_G1, &[(1, 1, 9)]);
}

#[test]
fn a_released_slot_is_a_miss() {
    let rig = filled(true, |_| {});
    rig.send(&kvbm_plan::Command::Release { tier: kvbm_plan::Tier::G3, blocks: vec![BlockId(2)] });
    let report = rig.go(Path::G3_G1, &[(1, 1, 9), (2, 2, 10)]);
    assert_eq!(kinds(&report), [None, Some(FailureKind::Missing)]);
}

#[test]
fn a_tiny_disk_queue_is_waited_for() {
    let shape = Shape { disk_queue: 2, ..Shape::default() };
    let rig = Rig::with(shape, |_| {});
    for (name, slot, _) in EIGHT {
        rig.fill_g1(slot, name);
    }
    rig.must(Path::G1_G2, &EIGHT);
    rig.must(Path::G2_G3, &EIGHT);
    let direct = rig
        .manager()
        .execute(rig.plan(Path::G3_G1, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8))))
        .unwrap();
    rig.must(Path::G3_G2, &EIGHT.map(|(name, slot, _)| (name, slot, slot + 8)));
    assert!(direct.wait(soon()).unwrap().blocks.iter().all(BlockOutcome::is_done));
    assert_eq!(direct.plan_id(), PlanId(3));
}
