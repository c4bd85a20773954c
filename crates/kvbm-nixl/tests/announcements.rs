//! Announcements survive the journey; anything else is refused. A folder of them is its owner's.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, checksum};
use kvbm_keys::DeploymentKey;
use kvbm_nixl::{
    BlockSetRegistry, DirectoryError, FileDirectory, ImportError, Imported, LiveFiles, NodeAnnouncement,
    RegistryError,
};
use kvbm_plan::{Epoch, NodeId};
use proptest::prelude::*;

fn announcement(epoch: u64, sequence: u64) -> NodeAnnouncement {
    NodeAnnouncement {
        node: NodeId(7),
        epoch: Epoch(epoch),
        sequence,
        agent: "node-7".into(),
        agent_metadata: vec![0, 255, 3],
        sets: Vec::new(),
    }
}

fn encoded(announcement: &NodeAnnouncement) -> Vec<u8> {
    announcement.encode(None).expect("a sound announcement")
}

/// Puts the right checksum at the end, as a hostile node would.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.len() - 8;
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..body]);
    bytes[body..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn golden_bytes() {
    let mut expected = b"kvbmnode\x01\0\0\0\x07\0\0\0".to_vec();
    expected.extend(b"\x03\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0");
    expected.extend(b"\x06\0node-7\x03\0\0\0\x00\xff\x03");
    expected.extend([0; 8]);
    let expected = sealed(expected);
    assert_eq!(encoded(&announcement(3, 5)), expected);
    assert_eq!(NodeAnnouncement::decode(&expected, None), Ok(announcement(3, 5)));
}

#[test]
fn every_cut_and_every_flipped_bit_is_refused() {
    let bytes = encoded(&announcement(1, 1));
    for length in 0..bytes.len() {
        assert!(NodeAnnouncement::decode(&bytes[..length], None).is_err(), "{length}");
    }
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(NodeAnnouncement::decode(&damaged, None).is_err(), "bit {bit}");
    }
    let mut many = bytes;
    many[10..12].copy_from_slice(&300_u16.to_le_bytes());
    let error = NodeAnnouncement::decode(&sealed(many), None).expect_err("too many sets");
    assert!(matches!(error, ImportError::Field { field: "number of block sets", .. }), "{error}");
}

/// Who may write the folder knows all but the key.
#[test]
fn only_announcements_of_the_own_key_are_taken_and_every_change_of_one_is_refused() {
    let key = |secret: &[u8]| Some(DeploymentKey::from_secret(secret));
    let keys = [None, key(b"ours"), key(b"theirs")];
    for (at, written) in keys.iter().enumerate() {
        let bytes = announcement(1, 1).encode(written.as_ref()).expect("a sound announcement");
        for (other, reader) in keys.iter().enumerate() {
            match NodeAnnouncement::decode(&bytes, reader.as_ref()) {
                Ok(read) => assert!(at == other && read == announcement(1, 1)),
                Err(error) => assert!(at != other && matches!(error, ImportError::Key { .. }), "{error}"),
            }
        }
    }
    let ours = keys[1].as_ref();
    let bytes = announcement(1, 1).encode(ours).expect("a sound announcement");
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(NodeAnnouncement::decode(&changed, ours).is_err(), "bit {bit}");
        assert!(NodeAnnouncement::decode(&sealed(changed), ours).is_err(), "bit {bit}, with a CRC");
    }
    for length in 0..bytes.len() {
        assert!(NodeAnnouncement::decode(&bytes[..length], ours).is_err(), "{length}");
    }
    let error = NodeAnnouncement::decode(&sealed(encoded(&announcement(9, 9))), ours).expect_err("unsigned");
    assert!(error.to_string().contains("namespace.deployment_secret"), "{error}");
}

#[test]
fn a_registry_keeps_the_newest_life_of_each_node() {
    let registry = BlockSetRegistry::default();
    let import =
        |epoch, sequence| registry.import_remote_blockset(&encoded(&announcement(epoch, sequence)), None);
    assert_eq!(import(2, 1), Ok((NodeId(7), Imported::New)));
    assert_eq!(import(2, 1), Ok((NodeId(7), Imported::Known)));
    assert_eq!(import(2, 3), Ok((NodeId(7), Imported::Newer)));
    for (epoch, sequence) in [(2, 2), (1, 9)] {
        let error = import(epoch, sequence).expect_err("older");
        assert!(matches!(error, RegistryError::Stale { .. }), "{error}");
    }
    assert_eq!(import(3, 1), Ok((NodeId(7), Imported::Restarted)));
    assert!(!registry.remove(NodeId(7), Epoch(2)), "an older life says nothing about the newer one");
    assert!(registry.remove(NodeId(7), Epoch(3)) && registry.get(NodeId(7)).is_none());
}

#[test]
fn a_folder_is_private_and_holds_the_last_announcement_of_each_node() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("nodes");
    let directory = FileDirectory::open(&folder).expect("a new folder");
    assert_eq!(std::fs::metadata(&folder).expect("made").permissions().mode() & 0o777, 0o700);
    directory.publish(&announcement(1, 1), None).expect("published");
    directory.publish(&announcement(1, 2), None).expect("published again");
    std::fs::write(folder.join("notes.txt"), "not ours").expect("a file");
    let found = directory.announcements().expect("a list");
    assert_eq!(found, [("node-7.kvbm".to_owned(), encoded(&announcement(1, 2)))]);
    let mode = std::fs::metadata(folder.join("node-7.kvbm")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    directory.withdraw(NodeId(7)).expect("withdrawn");
    directory.withdraw(NodeId(7)).expect("it is gone already");
    assert!(directory.announcements().expect("a list").is_empty());

    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o770)).expect("a mode");
    let error = FileDirectory::open(&folder).expect_err("others may write there");
    assert!(matches!(error, DirectoryError::Open { mode: 0o770, .. }), "{error}");
}

/// Mutation that makes it fail: `LiveFiles` keeps every file.
#[test]
fn a_file_that_is_not_renewed_in_its_time_is_left_out_by_the_readers_clock() {
    let parent = tempfile::tempdir().expect("a folder");
    let directory = FileDirectory::open(&parent.path().join("nodes")).expect("a new folder");
    let bytes = encoded(&announcement(1, 1));
    let lease = Duration::from_secs(15);
    let renew = |count| directory.publish_for(NodeId(7), &bytes, count, lease).expect("published");
    let fixed = NodeAnnouncement { node: NodeId(8), ..announcement(1, 1) };
    directory.publish(&fixed, None).expect("published");
    let (mut live, start) = (LiveFiles::default(), Instant::now());
    let mut found = |seconds: std::ops::RangeInclusive<u64>| {
        let look = |second| {
            let now = start + Duration::from_secs(second);
            let found = live.announcements(&directory, NodeId(1), now).expect("a list");
            assert!(found.contains(&("node-8.kvbm".to_owned(), encoded(&fixed))), "it promises no renewal");
            found.contains(&("node-7.kvbm".to_owned(), bytes.clone()))
        };
        seconds.map(look).last().expect("a second")
    };
    renew(1);
    assert!(found(0..=14));
    renew(2);
    assert!(found(15..=29), "it counts from when the renewal was seen");
    // The same content again is no renewal, however young the file is.
    renew(2);
    assert!(!found(30..=31) && !found(1000..=1001), "its owner is gone");
    renew(3);
    assert!(found(1002..=1002), "it was stopped, and goes on");
    assert!(found(5000..=5000), "the reader stood still, and its owner may have, too");
    assert!(!found(5001..=5010), "it did not go on");
    // Another life of the node that has renewed as often.
    let next = encoded(&NodeAnnouncement { node: NodeId(7), ..announcement(2, 1) });
    directory.publish_for(NodeId(7), &next, 3, lease).expect("published");
    let names = |list: Vec<(String, Vec<u8>)>| list.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let at = |second| start + Duration::from_secs(second);
    let found = live.announcements(&directory, NodeId(1), at(5011)).expect("a list");
    assert_eq!(names(found), ["node-7.kvbm", "node-8.kvbm"]);
    // A node sees its own file however old it is.
    for second in 5012..5040 {
        let found = live.announcements(&directory, NodeId(7), at(second)).expect("a list");
        assert_eq!(names(found), ["node-7.kvbm", "node-8.kvbm"]);
    }
    renew(3);
    // What is read without a clock is all that lies there, without the renewals.
    let all = directory.announcements().expect("a list");
    assert_eq!(all, [("node-7.kvbm".to_owned(), bytes.clone()), ("node-8.kvbm".to_owned(), encoded(&fixed))]);
    // A reader that starts now cannot know that a file is old: it waits as long as any.
    let mut new = LiveFiles::default();
    let looks = [0, 5, 10, 15]
        .map(|second| new.announcements(&directory, NodeId(1), at(second)).expect("a list").len());
    assert_eq!(looks, [2, 2, 2, 1]);
}

/// Mutation that makes it fail: a file that cannot be read is as good as gone.
#[test]
fn a_file_that_cannot_be_read_for_a_moment_is_not_gone() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("nodes");
    let directory = FileDirectory::open(&folder).expect("a new folder");
    let bytes = encoded(&announcement(1, 1));
    directory.publish_for(NodeId(7), &bytes, 1, Duration::from_secs(15)).expect("published");
    let (mut live, start) = (LiveFiles::default(), Instant::now());
    let mut found = |second| {
        let now = start + Duration::from_secs(second);
        live.announcements(&directory, NodeId(1), now).expect("a list").len()
    };
    assert_eq!(found(0), 1);
    // A folder in its place: opening it works, reading fails.
    std::fs::remove_file(folder.join("node-7.kvbm")).expect("removed");
    std::fs::create_dir(folder.join("node-7.kvbm")).expect("a folder");
    assert_eq!([1, 2, 3].map(&mut found), [1; 3], "what was read before");
    assert_eq!([8, 13, 18].map(&mut found), [1, 1, 0], "until its time is over");
    std::fs::remove_dir(folder.join("node-7.kvbm")).expect("removed");
    assert_eq!(found(19), 0);
}

#[test]
fn what_is_no_renewal_stays_a_part_of_the_file() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("nodes");
    let directory = FileDirectory::open(&folder).expect("a new folder");
    for content in [&b""[..], b"kvbmlife", b"kvbmlife\x01\0\0\0\0\0\0\0\x01\0\0", &[0; 20]] {
        std::fs::write(folder.join("node-1.kvbm"), content).expect("a file");
        let found =
            LiveFiles::default().announcements(&directory, NodeId(2), Instant::now()).expect("a list");
        assert_eq!(found, [("node-1.kvbm".to_owned(), content.to_vec())]);
    }
    directory.publish_for(NodeId(1), b"any", 0x0201, Duration::from_millis(0x0605)).expect("published");
    let golden = b"anykvbmlife\x01\x02\0\0\0\0\0\0\x05\x06\0\0";
    assert_eq!(std::fs::read(folder.join("node-1.kvbm")).expect("a file"), golden);
}

proptest! {
    #[test]
    fn sealed_mutations_never_panic_and_have_one_form(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = encoded(&announcement(1, 1));
        let body = bytes.len() - 8;
        for (at, value) in changes {
            bytes[at.index(body)] = value;
        }
        let bytes = sealed(bytes);
        if let Ok(read) = NodeAnnouncement::decode(&bytes, None) {
            prop_assert_eq!(encoded(&read), bytes);
        }
    }
}
