//! Blocks that are put and got, and what is wrong with them.

use super::faulty::{Fault, Faulty};
use super::{down, failed, fill, key, rig, up};
use crate::support::{LAYERS, Shape, checksums, contiguous, kinds, model, soon};
use kvbm_layout::{AxisOrder, FullyContiguous};
use kvbm_plan::{Endpoint, FailureKind, Path, TransferPlan, VolumeId};
use kvbm_volume::Volume;
use std::sync::Arc;

#[test]
fn blocks_go_to_a_volume_and_come_back_to_another_layout() {
    let volume = Faulty::new(None);
    let writer = rig(&volume, Shape::default(), true);
    fill(&writer, 12);
    let all: Vec<(u8, u32)> = (1..=12).map(|name| (name, u32::from(name))).collect();
    let stored = writer.run(up(&writer, &all));
    assert_eq!(kinds(&stored), [None; 12]);
    assert_eq!(stored.bytes, 12 * writer.g2.bytes_per_block());
    drop(writer);

    // Whose host memory lies otherwise: the order in the store is neither's.
    let hnd = Arc::new(FullyContiguous::new(model(16), AxisOrder::Hnd).unwrap());
    let reader = rig(&volume, Shape { g2: hnd, g1: contiguous(16), ..Shape::default() }, true);
    let back: Vec<(u8, u32)> = (1..=12).map(|name| (name, 15 - u32::from(name))).collect();
    let read = reader.run(down(&reader, &back));
    assert_eq!(kinds(&read), [None; 12]);
    for (name, slot) in back {
        reader.assert_g1(slot, name);
    }
    // The checksum is computed anew, and the same as ever.
    let direct = reader.must(Path::G1_G2, &[(7, 8, 15)]);
    assert_eq!(checksums(&read)[6], checksums(&direct)[0]);
}

#[test]
fn heads_lie_one_after_the_other_in_an_object() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    let element = 2;
    let (tokens, heads, elems) = (4, 2, 24);
    let nhd = rig.read(&rig.g2, 1);
    let mut expected = Vec::new();
    for head in 0..heads {
        for layer_outer in 0..LAYERS as usize * 2 {
            for token in 0..tokens {
                let at = (((layer_outer * tokens) + token) * heads + head) * elems * element;
                expected.extend_from_slice(&nhd[at..at + elems * element]);
            }
        }
    }
    let mut payload = Vec::new();
    volume.memory.tamper(&key(1), |object| payload = object[object.len() - expected.len()..].to_vec());
    assert_eq!(payload, expected);
}

/// Mutation that makes it fail: `open` copies the payload without comparing its pieces.
#[test]
fn invariant_5_no_damaged_object_reaches_the_device() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    let mut other = Vec::new();
    assert!(volume.memory.tamper(&key(2), |object| other.clone_from(object)));
    let mut sound = Vec::new();
    assert!(volume.memory.tamper(&key(1), |object| sound.clone_from(object)));
    let half = sound.len() / 2;
    let untouched = rig.read(&rig.g1, 9);
    let damages: [(&str, Vec<u8>); 5] = [
        ("swapped", other),
        ("cut", sound[..half].to_vec()),
        ("grown", [&sound[..], &[0; 8]].concat()),
        ("flipped", sound.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == half)).collect()),
        ("empty", Vec::new()),
    ];
    for (what, damaged) in damages {
        volume.memory.tamper(&key(1), |object| object.clone_from(&damaged));
        // The sound one beside it arrives.
        assert_eq!(
            failed(&rig, down(&rig, &[(1, 9), (2, 10)])),
            [Some(FailureKind::Corrupt), None],
            "{what}"
        );
        rig.assert_g1(10, 2);
        assert_eq!(rig.read(&rig.g1, 9), untouched, "{what}: reached the device");
    }
    volume.memory.tamper(&key(1), |object| object.clone_from(&sound));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9), (3, 11)])), [None, Some(FailureKind::Missing)]);
}

#[test]
fn memory_that_changed_never_reaches_a_volume() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    rig.damage_g2(1);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [Some(FailureKind::Corrupt), None]);
    let there: Vec<bool> = volume.exists(&[key(1), key(2)], soon()).into_iter().map(Result::unwrap).collect();
    assert_eq!(there, [false, true]);
}

#[test]
fn every_fault_of_a_volume_is_a_failure_of_its_blocks() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    for (fault, kind) in [
        (Fault::Panic, FailureKind::Io),
        (Fault::Silent, FailureKind::Io),
        (Fault::Refuses, FailureKind::Io),
        (Fault::Late, FailureKind::Deadline),
    ] {
        volume.set(fault);
        assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [Some(kind); 2]);
        assert_eq!(failed(&rig, down(&rig, &[(1, 8), (2, 9)])), [Some(kind); 2]);
        volume.set(Fault::Nothing);
        assert_eq!(failed(&rig, down(&rig, &[(1, 8), (2, 9)])), [None; 2], "it works again");
    }
    let unknown = TransferPlan { src: Endpoint::Volume(VolumeId(9)), ..rig.plan(Path::G4_G1, &[(1, 0, 8)]) };
    assert_eq!(failed(&rig, unknown), [Some(FailureKind::Unsupported)]);
}

/// Mutation that makes it fail: `Hands::send` hands all blocks to one thread.
#[test]
fn blocks_of_a_plan_are_divided_among_idle_threads() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 3);
    volume.set(Fault::Pairs);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2), (3, 3)])), [None; 3]);
    *volume.calls.0.lock().expect("sound") = 0;
    assert_eq!(failed(&rig, down(&rig, &[(1, 9), (2, 10), (3, 11)])), [None; 3]);
    (1..=3).for_each(|name| rig.assert_g1(8 + u32::from(name), name));
}

#[test]
fn a_full_volume_says_so() {
    let volume = Faulty::new(Some(3000));
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    let found = failed(&rig, up(&rig, &[(1, 1), (2, 2)]));
    // Two threads put them: either may be first.
    let full = Some(FailureKind::Full);
    assert!([[None, full], [full, None]].iter().any(|expected| found == expected), "{found:?}");
}

#[test]
fn a_replica_leaves_the_writing_to_the_writer() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), false);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    assert!(!volume.exists(&[key(1)], soon())[0].as_ref().unwrap());
}
