//! Volumes in an S3 server whose objects NIXL's real back end OBJ moves. `TEST_MOTO_SERVER` and
//! `TEST_S3_SERVER` name servers; the last takes no signatures from here, so the first counts.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
#[allow(dead_code, reason = "each test binary uses a part of this")]
#[path = "../../../kvbm-volume/tests/s3/server.rs"]
mod server;
#[path = "../support/mod.rs"]
mod support;

use crate::server::{Kind, Server};
use crate::support::{namespace, serve, tokens, unlimited};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig};
use kvbm::{KvBlockManager, Owned, VolumeDescriptor, VolumeId};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash};
use kvbm_volume::conformance::{self, Subject};
use kvbm_volume::{
    BlobKey, BlobSlice, GetRequest, ObjectSeal, PayloadForm, PutRequest, Volume, VolumeError, VolumeExt,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn moto() -> Option<Server> {
    Server::each().into_iter().find(|server| server.kind == Kind::Memory)
}

/// The URI of a volume whose objects NIXL moves.
fn through_nixl(server: &Server, prefix: &str) -> String {
    format!("{}&transport=nixl", server.uri(prefix).replace("&anonymous=false", ""))
}

fn open(uri: String, deadline: Duration) -> Arc<dyn Volume> {
    let descriptor = VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(3), uri) };
    kvbm::volume_registry(&Config::default()).register_volume(descriptor).unwrap()
}

fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xaa; 16]),
        label: NamespaceId(1),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    }
}

/// A payload of its own length for each number, from 64 KiB on.
fn payload(number: u8) -> Vec<u8> {
    let length = 65_536 + usize::from(number) * 40_961;
    (0..length as u32).map(|at| (at.wrapping_mul(u32::from(number) * 2 + 1) >> 4) as u8).collect()
}

struct InBucket {
    server: Server,
    opened: AtomicUsize,
}

impl Subject for InBucket {
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let uri = through_nixl(&self.server, &format!("volume-{number}"));
        let registry = kvbm::volume_registry(&Config::default());
        registry.register_volume(VolumeDescriptor { uri, ..descriptor }).unwrap()
    }

    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        let volume = format!("volume-{}", self.opened.load(Ordering::Relaxed));
        self.server.tamper(&format!("{volume}/{}", key.object_path()), change);
        true
    }
}

#[test]
fn a_volume_through_nixl_conforms() {
    let Some(server) = moto() else { return };
    conformance::check(&InBucket { server, opened: AtomicUsize::new(0) });
}

/// Many at a time, of many lengths; damaged, missing and foreign ones between them.
#[test]
fn large_objects_are_written_and_read_through_nixl() {
    const OBJECTS: u8 = 40;
    let Some(server) = moto() else { return };
    let volume = open(through_nixl(&server, "large"), Duration::from_secs(30));
    let payloads: Vec<_> = (0..OBJECTS).map(payload).collect();
    let put = |(number, payload): (u8, &Vec<u8>)| -> Result<(), VolumeError> {
        volume.put_one(&key(number), payload, within(60))
    };
    let (form, seal) = (PayloadForm::default(), ObjectSeal::default());
    let puts: Vec<_> = (0..)
        .zip(&payloads)
        .map(|(number, payload)| PutRequest {
            key: key(number),
            form,
            seal: seal.clone(),
            pieces: payload.chunks(9_999).collect(),
        })
        .collect();
    assert!(volume.put(&puts, within(60)).iter().all(Result::is_ok));
    // Two that are damaged: a bit, and a shorter object.
    let name = |number: u8| format!("large/{}", key(number).object_path());
    server.tamper(&name(7), &mut |object| *object.last_mut().unwrap() ^= 1);
    server.tamper(&name(8), &mut |object| object.truncate(70_000));
    let mut buffers: Vec<Vec<u8>> = (0..=OBJECTS).map(|number| vec![0; payload(number).len()]).collect();
    let mut gets: Vec<_> = (0..)
        .zip(&mut buffers)
        .map(|(number, buffer)| GetRequest {
            key: key(number),
            form,
            seal: seal.clone(),
            pieces: buffer.chunks_mut(30_000).collect(),
        })
        .collect();
    let got = volume.get(&mut gets, within(60));
    drop(gets);
    for (number, result) in (0..).zip(got) {
        match number {
            7 | 8 => assert!(result.unwrap_err().is_corrupt(), "object {number}"),
            OBJECTS => assert!(matches!(result, Err(VolumeError::NotFound { .. })), "{result:?}"),
            _ => {
                result.unwrap();
                assert!(buffers[usize::from(number)] == payloads[usize::from(number)], "object {number}");
            }
        }
    }
    // What was found to be damaged is replaced; a client without NIXL reads all.
    (0..).zip(&payloads).for_each(|object| put(object).unwrap());
    let plain = open(server.uri("large"), Duration::from_secs(30));
    for (number, payload) in (0..).zip(&payloads) {
        assert!(plain.get_one(&key(number), payload.len(), within(60)).unwrap() == *payload);
        assert!(volume.get_one(&key(number), payload.len(), within(60)).unwrap() == *payload);
    }
    assert!(volume.delete(&[key(0)], within(60)).remove(0).unwrap());
    let gone = volume.get_one(&key(0), payloads[0].len(), within(60));
    assert!(matches!(gone, Err(VolumeError::NotFound { .. })), "{gone:?}");
}

/// A server that hangs or is gone: errors within the deadline, and the volume goes on after it.
#[test]
fn a_server_that_hangs_or_is_gone_is_an_error_in_time() {
    let Some(mut server) = moto() else { return };
    let volume = open(through_nixl(&server, "hangs"), Duration::from_secs(5));
    let payload = payload(3);
    volume.put_one(&key(3), &payload, within(30)).unwrap();
    let fails = |what: &str| {
        for write in [false, true] {
            let (begun, deadline) = (Instant::now(), within(2));
            let result = if write {
                volume.put_one(&key(4), &payload, deadline)
            } else {
                volume.get_one(&key(3), payload.len(), deadline).map(drop)
            };
            let error = result.unwrap_err();
            assert!(!error.is_miss(), "{what}: {error}");
            assert!(begun.elapsed() < Duration::from_secs(6), "{what}: {:?}", begun.elapsed());
        }
    };
    server.signal("STOP");
    fails("stopped");
    server.signal("CONT");
    assert!(volume.get_one(&key(3), payload.len(), within(30)).unwrap() == payload);
    server.stop();
    fails("gone");
    server.start_again();
    volume.put_one(&key(5), &payload, within(30)).unwrap();
    assert!(volume.get_one(&key(5), payload.len(), within(30)).unwrap() == payload);
}

/// Blocks of 128 KiB of two ranks go to the bucket and come back from there, in another life and
/// without NIXL, too.
#[test]
fn a_manager_keeps_blocks_in_a_bucket_through_nixl() {
    const BLOCKS: u32 = 12;
    let Some(server) = moto() else { return };
    let model = ModelConfig { num_layers: 16, num_kv_heads: 2, head_dim: 128, ..ModelConfig::default() };
    let open = |uri: String| {
        KvBlockManager::<Owned>::builder()
            .model(model.clone())
            .namespace(namespace())
            .device(Blocks(24))
            .host(Blocks(48))
            .volume(uri)
            .tensor_parallel(2)
            .configure(|config| {
                unlimited(config);
                config.volumes.recheck = Duration::from_millis(1);
                config.device.layout = LayoutKind::FullyContiguous;
            })
            .build()
            .unwrap()
    };
    let manager = open(through_nixl(&server, "blocks"));
    let sequence = tokens(&manager, 1, BLOCKS);
    assert_eq!(serve(&manager, &sequence), 0);
    manager.wait_offloads(within(60));
    drop(manager);
    for uri in [through_nixl(&server, "blocks"), server.uri("blocks")] {
        let manager = open(uri);
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "every byte is compared");
    }
}

#[test]
fn what_nixl_cannot_do_is_refused_with_the_option() {
    let refused = |options: &str, library: Option<&str>| {
        let mut config = Config::default();
        config.remote.library = library.map(Into::into);
        let uri = format!("s3://bucket/p?endpoint=http://127.0.0.1:9&transport=nixl{options}");
        let opened = kvbm::volume_registry(&config).register_volume(VolumeDescriptor::new(VolumeId(3), uri));
        opened.map(drop).unwrap_err().to_string()
    };
    let error = refused("&anonymous=true", None);
    assert!(error.contains("option transport=nixl: NIXL signs its requests"), "{error}");
    let error = refused("", Some("/no/such/libnixl_capi.so"));
    assert!(error.contains("option transport=nixl") && error.contains("pip install --no-deps"), "{error}");
}
