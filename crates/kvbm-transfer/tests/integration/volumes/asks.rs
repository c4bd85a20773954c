//! What the leader asks about volumes, and what it orders.

use super::faulty::{Fault, Faulty};
use super::{SLICE, VOLUME, ask, down, failed, fill, key, opened, rig, rig_with, up};
use crate::support::{Rig, Shape, contiguous, identity, kinds, soon};
use kvbm_plan::{
    BlockIdentity, Command, FailureKind, NamespaceId, StoredBlock, VolumeAnswer, VolumePlace, VolumeRequest,
};
use kvbm_transfer::SubmitError;
use kvbm_volume::{BlobKey, BlobSlice, ObjectSeal, PayloadForm, PutRequest, StoredOrder, Volume};

#[test]
fn probes_and_removals_are_answered() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 3);
    rig.run(up(&rig, &[(1, 1), (2, 2), (3, 3)]));
    let probe = |token, names: &[u8]| {
        ask(&rig, token, VolumeRequest::Probe(names.iter().map(|&name| identity(name)).collect()))
    };
    assert_eq!(probe(1, &[1, 9, 3]), VolumeAnswer::Present(vec![true, false, true]));
    let discard = VolumeRequest::Discard(vec![identity(1), identity(9)]);
    assert_eq!(ask(&rig, 2, discard), VolumeAnswer::Removed(1));
    assert_eq!(probe(3, &[1, 2]), VolumeAnswer::Present(vec![false, true]));
    assert_eq!(ask(&rig, 4, VolumeRequest::Purge(Some(NamespaceId(77)))), VolumeAnswer::Removed(0));
    let list = |token, after| match ask(&rig, token, VolumeRequest::List(after)) {
        VolumeAnswer::Listed(blocks) => blocks,
        answer => panic!("{answer:?}"),
    };
    let named = |name| {
        let BlockIdentity { namespace, group, hash, .. } = identity(name);
        StoredBlock { namespace, group, hash }
    };
    let listed = list(20, None);
    assert!(listed.len() == 2 && [2, 3].map(named).iter().all(|block| listed.contains(block)), "{listed:?}");
    assert_eq!(list(21, Some(listed[0])), listed[1..]);
    assert_eq!(list(22, Some(listed[1])), []);
    volume.set(Fault::Refuses);
    assert!(matches!(probe(5, &[2]), VolumeAnswer::Failed(failure) if failure.kind == FailureKind::Io));
    volume.set(Fault::Panic);
    assert!(matches!(probe(6, &[2]), VolumeAnswer::Failed(failure) if failure.detail.contains("panicked")));
    volume.set(Fault::Nothing);
    assert_eq!(ask(&rig, 7, VolumeRequest::Purge(Some(identity(2).namespace))), VolumeAnswer::Removed(2));
    assert_eq!(probe(8, &[2, 3]), VolumeAnswer::Present(vec![false; 2]));
}

/// Mutation that makes it fail: `DiscardDamaged` removes what `Discard` does.
#[test]
fn of_a_damaged_block_what_is_sound_stays() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    // Another deployment has the heads of this rank in two objects.
    let theirs = |first_head| BlobKey { slice: BlobSlice { first_head, num_heads: 1, ..SLICE }, ..key(1) };
    let mut payload = Vec::new();
    let bytes = rig.read(&rig.g2, 1).len();
    volume.memory.tamper(&key(1), |object| payload = object[object.len() - bytes..].to_vec());
    let form = PayloadForm { order: StoredOrder::Universal, pieces: 1 };
    for (first_head, half) in (2..).zip(payload.chunks(bytes / 2)) {
        let put =
            [PutRequest { key: theirs(first_head), form, seal: ObjectSeal::default(), pieces: vec![half] }];
        volume.memory.put(&put, soon()).remove(0).expect("room");
    }
    let there = || {
        [key(1), theirs(2), theirs(3)]
            .map(|key| volume.memory.exists(&[key], soon()).remove(0).expect("memory"))
    };
    let discard = |token| ask(&rig, token, VolumeRequest::DiscardDamaged(vec![identity(1)]));
    assert_eq!(discard(1), VolumeAnswer::Removed(0), "nobody found anything damaged");
    let flip = |key| volume.memory.tamper(&key, |object| object[bytes / 2] ^= 1);
    assert!(flip(key(1)));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
    assert_eq!(discard(2), VolumeAnswer::Removed(1));
    assert_eq!(there(), [false, true, true]);
    // Again, of the same read: theirs are none of its business.
    assert_eq!(discard(3), VolumeAnswer::Removed(0));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [None], "from theirs");
    rig.assert_g1(9, 1);
    assert!(flip(theirs(3)));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
    assert_eq!(discard(4), VolumeAnswer::Removed(2), "with its other half");
    assert_eq!(there(), [false; 3]);
}

/// Mutations that make it fail: `Puts` leaves the note, or `Desk::discard` or `Desk::purge` do.
#[test]
fn what_was_removed_or_written_again_since_it_was_damaged_stays() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    let label = identity(1).namespace;
    let removals =
        [None, Some(VolumeRequest::Discard(vec![identity(1)])), Some(VolumeRequest::Purge(Some(label)))];
    for (token, removal) in (1..).step_by(2).zip(removals) {
        assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [None]);
        assert!(volume.memory.tamper(&key(1), |object| object[150] ^= 1));
        assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
        match removal {
            // Somebody else removed it, and this rank writes it.
            None => {
                volume.memory.delete(&[key(1)], soon());
                assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [None]);
            }
            // Here this rank did, and somebody else writes it.
            Some(removal) => {
                let mut sound = Vec::new();
                volume.memory.tamper(&key(1), |object| {
                    object[150] ^= 1;
                    sound.clone_from(object);
                });
                assert_eq!(ask(&rig, token, removal), VolumeAnswer::Removed(1));
                let bytes = rig.read(&rig.g2, 1).len();
                let form = PayloadForm { order: StoredOrder::Universal, pieces: SLICE.num_heads };
                let pieces = vec![&sound[sound.len() - bytes..]];
                let put = [PutRequest { key: key(1), form, seal: ObjectSeal::default(), pieces }];
                volume.memory.put(&put, soon()).remove(0).expect("room");
            }
        }
        let damaged = VolumeRequest::DiscardDamaged(vec![identity(1)]);
        assert_eq!(ask(&rig, token + 1, damaged), VolumeAnswer::Removed(0), "a late order");
        assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [None]);
    }
}

/// Mutations that make it fail: `Unregister` closes whatever has the id; or what was open as the
/// leader has it counts as opened for it.
#[test]
fn a_volume_of_the_ranks_own_is_not_the_leaders_to_close() {
    let volume = Faulty::new(None);
    let registry = opened(&volume);
    let rig = rig_with(&registry, Shape::default(), true);
    let own = VolumePlace::from(volume.descriptor());
    let other = VolumePlace { uri: "memory:other".into(), ..own.clone() };
    let refused = ask(&rig, 1, VolumeRequest::Register(other));
    assert!(
        matches!(&refused, VolumeAnswer::Failed(failure) if failure.detail.contains("already registered"))
    );
    assert_eq!(ask(&rig, 2, VolumeRequest::Unregister), VolumeAnswer::Done);
    let probe = |token| ask(&rig, token, VolumeRequest::Probe(vec![identity(1)]));
    assert_eq!(probe(3), VolumeAnswer::Present(vec![false]), "it is open still");
    // The same one: it was open before the leader spoke of it.
    assert_eq!(ask(&rig, 4, VolumeRequest::Register(own.clone())), VolumeAnswer::Done);
    assert_eq!(ask(&rig, 5, VolumeRequest::Unregister), VolumeAnswer::Done);
    assert_eq!(probe(6), VolumeAnswer::Present(vec![false]), "it is open still");
    // What the leader has opened, however often, is the leader's to close.
    registry.unregister_volume(VOLUME).expect("its own");
    for token in [7, 8] {
        let theirs = VolumePlace { uri: "memory:".into(), ..own.clone() };
        assert_eq!(ask(&rig, token, VolumeRequest::Register(theirs)), VolumeAnswer::Done);
    }
    assert_eq!(probe(9), VolumeAnswer::Present(vec![false]));
    assert_eq!(ask(&rig, 10, VolumeRequest::Unregister), VolumeAnswer::Done);
    assert!(matches!(probe(11), VolumeAnswer::Failed(failure) if failure.kind == FailureKind::Unsupported));
}

#[test]
fn a_worker_without_volumes_refuses() {
    let rig = Rig::with(Shape { g2: contiguous(16), ..Shape::default() }, |_| {});
    fill(&rig, 1);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [Some(FailureKind::Unsupported)]);
    let request = VolumeRequest::Purge(None);
    let command =
        kvbm_plan::wire::encode_command(&Command::Volume { token: 1, volume: VOLUME, request }).unwrap();
    assert!(matches!(rig.manager().submit(&command), Err(SubmitError::NoSuchTier { .. })));
}
