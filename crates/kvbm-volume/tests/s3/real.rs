//! What real servers do.

use crate::server::Server;
use crate::{key, open, within};
use kvbm_volume::conformance::{self, Subject};
use kvbm_volume::{BlobKey, S3Volume, Volume, VolumeDescriptor, VolumeExt};
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
