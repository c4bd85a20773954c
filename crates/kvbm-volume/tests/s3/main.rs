//! S3-compatible stores: real servers (programs named by `TEST_S3_SERVER` and `TEST_MOTO_SERVER`),
//! and fake ones that fail in every way.
#![cfg(feature = "s3")]

mod conditions;
mod failing;
mod fake;
mod killed;
#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
mod real;
mod server;
mod transport;

use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobSlice, ObjectSeal, PayloadForm, PutRequest, S3Volume, VolumeDescriptor, object,
};
use std::time::{Duration, Instant};

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xaa; 16]),
        label: NamespaceId(1),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    }
}

fn open(uri: String, deadline: Duration) -> S3Volume {
    S3Volume::open(VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(3), uri) })
        .expect("the test's own set-up")
}

fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

/// An object as it lies in a store.
fn object_of(number: u8, payload: &[u8]) -> Vec<u8> {
    let request = PutRequest {
        key: key(number),
        form: PayloadForm::default(),
        seal: ObjectSeal::default(),
        pieces: vec![payload],
    };
    let mut object = object::seal(VolumeId(3), &request, 1).expect("the test's own set-up");
    object.extend_from_slice(payload);
    object
}
