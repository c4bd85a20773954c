//! What real servers do.

use crate::server::Server;
use crate::{key, open, within};
use kvbm_keys::OperatorKey;
use kvbm_volume::conformance::{self, Subject};
use kvbm_volume::{
    BlobKey, EncryptedVolume, S3Volume, Volume, VolumeDescriptor, VolumeEncryption, VolumeExt,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

struct InBucket {
    server: Server,
    opened: AtomicUsize,
}

impl Subject for InBucket {
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let uri = self.server.uri(&format!("volume-{number}"));
        Arc::new(S3Volume::open(VolumeDescriptor { uri, ..descriptor }).expect("the test's own set-up"))
    }

    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        let volume = format!("volume-{}", self.opened.load(Ordering::Relaxed));
        self.server.tamper(&format!("{volume}/{}", key.object_path()), change);
        true
    }
}

#[test]
fn real_servers_conform() {
    for server in Server::each() {
        conformance::check(&InBucket { server, opened: AtomicUsize::new(0) });
    }
}

/// Of two nodes that begin at once each reads what the other one wrote.
#[test]
fn encrypted_objects_are_read_by_another_node_until_they_are_forgotten() {
    for server in Server::each() {
        let operator = OperatorKey::parse(b"operator's key of this test: 32b").unwrap();
        let node = || {
            let store = open(server.uri("encrypted"), Duration::from_secs(20));
            let encryption = VolumeEncryption { key: operator.clone(), previous: None };
            EncryptedVolume::open(Arc::new(store), key(1).namespace, encryption).unwrap()
        };
        let nodes = [node(), node()];
        std::thread::scope(|threads| {
            for (number, node) in nodes.iter().enumerate() {
                threads
                    .spawn(move || node.put_one(&key(number as u8), b"keys and values", within(60)).unwrap());
            }
        });
        for node in &nodes {
            for number in 0..2 {
                assert_eq!(node.get_one(&key(number), 15, within(60)).unwrap(), b"keys and values");
            }
        }
        let mut stored = Vec::new();
        let name = format!("encrypted/{}", key(1).object_path());
        server.tamper(&name, &mut |object| stored.clone_from(object));
        assert!(stored.starts_with(b"kvbmblob\x03") && !stored.windows(8).any(|part| part == b"keys and"));
        let destroyed = nodes[0].destroy_keys(key(1).label, within(60)).unwrap();
        assert!(!destroyed.is_empty() && destroyed.iter().all(|(_, result)| result.is_ok()), "{destroyed:?}");
        let found = node().get_one(&key(1), 15, within(60)).unwrap_err();
        assert!(found.is_corrupt(), "{found}");
    }
}

/// What one node compresses is shorter in the store, and every node reads it, whatever its setting.
/// A damaged object is a miss.
#[cfg(feature = "compress")]
#[test]
fn compressed_objects_are_shorter_and_read_by_nodes_of_every_setting() {
    use kvbm_volume::{CompressedVolume, VolumeCompression};
    let payload: Vec<u8> =
        (0..60_000_u32).map(|at| if at % 2 == 0 { (at / 256) as u8 } else { 0x38 }).collect();
    for server in Server::each() {
        let node = |setting| {
            let store = open(server.uri("compressed"), Duration::from_secs(20));
            CompressedVolume::new(Arc::new(store), setting)
        };
        let settings = [VolumeCompression::Off, VolumeCompression::Zstd, VolumeCompression::Lz4];
        for (number, setting) in (0_u8..).zip(settings) {
            node(setting).put_one(&key(number), &payload, within(60)).unwrap();
            for reader in settings {
                let found = node(reader).get_one(&key(number), payload.len(), within(60)).unwrap();
                assert!(found == payload, "{setting:?} read with {reader:?}");
            }
            let name = format!("compressed/{}", key(number).object_path());
            let mut length = 0;
            server.tamper(&name, &mut |object| {
                length = object.len();
                let last = object.len() - 100;
                object[last] ^= 1;
            });
            assert_eq!(length < payload.len(), setting != VolumeCompression::Off, "{setting:?}");
            let damaged = node(setting).get_one(&key(number), payload.len(), within(60)).unwrap_err();
            assert!(damaged.is_miss(), "{setting:?}: {damaged}");
        }
    }
}

#[test]
fn large_objects_go_up_in_parts_and_are_remembered() {
    let payload: Vec<u8> = (0..13 << 20).map(|at: u32| (at % 251) as u8).collect();
    for server in Server::each() {
        open(server.uri("large"), Duration::from_secs(20)).put_one(&key(1), &payload, within(60)).unwrap();
        let again = open(server.uri("large"), Duration::from_secs(20));
        assert!(again.get_one(&key(1), payload.len(), within(60)).unwrap() == payload);
        let mut length = 0;
        let name = format!("large/{}", key(1).object_path());
        server.tamper(&name, &mut |object| length = object.len());
        assert!(length > payload.len(), "one object");
    }
}
