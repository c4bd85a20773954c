//! A store of a given bandwidth, and what `volumes.compress` makes of it.

use anyhow::{Context, Result};
use kvbm::plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeDescriptor, VolumeId};
use kvbm::volumes::{
    BlobKey, BlobScope, BlobSlice, CompressedVolume, GetRequest, MemoryVolume, ObjectSeal, PayloadForm,
    PutRequest, Volume, VolumeCompression, VolumeError,
};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of a call, about.
const CALL: usize = 4 << 20;
/// Times that all blocks are written and read; what the last one took counts, so that `auto` has
/// tried both ways.
const PASSES: usize = 4;

/// One bandwidth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LinkRow {
    /// `link`.
    pub(super) name: &'static str,
    /// The store takes and gives so much, in 10^6 bytes a second.
    pub(super) link_mb_per_s: u32,
    /// Whether `auto` compresses in the end.
    pub(super) auto_compresses: bool,
    /// Bytes of blocks a second, in 10^9: off, zstd, auto.
    pub(super) write_gb_per_s: [f64; 3],
    /// The same of reading.
    pub(super) read_gb_per_s: [f64; 3],
}

/// Writes and reads all blocks, one call after the other on one core, with each setting.
pub(super) fn measure(blocks: &[&[u8]], link_mb_per_s: u32) -> Result<LinkRow> {
    let settings = [VolumeCompression::Off, VolumeCompression::Zstd, VolumeCompression::Auto];
    let mut row = LinkRow {
        name: "link",
        link_mb_per_s,
        auto_compresses: false,
        write_gb_per_s: [0.0; 3],
        read_gb_per_s: [0.0; 3],
    };
    for (at, setting) in settings.into_iter().enumerate() {
        let inner = MemoryVolume::open(VolumeDescriptor::new(VolumeId(0), "memory:"))?;
        let store = Link { inner, nanos_each: 1e3 / f64::from(link_mb_per_s) };
        let volume = CompressedVolume::new(Arc::new(store), setting);
        for _ in 0..PASSES {
            [row.write_gb_per_s[at], row.read_gb_per_s[at]] = pass(&volume, blocks)?;
        }
        if setting == VolumeCompression::Auto {
            row.auto_compresses = volume.compression().context("no statistics")?.compresses;
        }
    }
    Ok(row)
}

fn pass(volume: &dyn Volume, blocks: &[&[u8]]) -> Result<[f64; 2]> {
    let deadline = Instant::now() + PATIENCE;
    let numbered: Vec<_> = (0_u64..).zip(blocks).collect();
    let calls = numbered.chunks(CALL.div_ceil(blocks[0].len()));
    let (form, seal) = (PayloadForm::default(), ObjectSeal::default());
    let (mut written, mut read) = (Duration::ZERO, Duration::ZERO);
    for call in calls {
        let mut requests = Vec::new();
        for (number, block) in call {
            requests.push(PutRequest { key: key(*number), form, seal: seal.clone(), pieces: vec![**block] });
        }
        let began = Instant::now();
        volume.put(&requests, deadline).into_iter().collect::<Result<(), VolumeError>>()?;
        written += began.elapsed();
        let mut buffers: Vec<Vec<u8>> = call.iter().map(|(_, block)| vec![0; block.len()]).collect();
        let mut requests = Vec::new();
        for ((number, _), buffer) in call.iter().zip(&mut buffers) {
            requests.push(GetRequest { key: key(*number), form, seal: seal.clone(), pieces: vec![buffer] });
        }
        let began = Instant::now();
        volume.get(&mut requests, deadline).into_iter().collect::<Result<(), VolumeError>>()?;
        read += began.elapsed();
    }
    let bytes = (blocks.len() * blocks[0].len()) as f64;
    Ok([written, read].map(|time| bytes / time.as_secs_f64() / 1e9))
}

fn key(number: u64) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0; 16]),
        label: NamespaceId(0),
        group: GroupId(0),
        hash: SequenceHash::from_bytes(u128::from(number).to_le_bytes()),
        slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
    }
}

/// Memory that a call reaches over a link: it takes the time of the bytes that pass, or that of the
/// copy where this is longer.
struct Link {
    inner: MemoryVolume,
    nanos_each: f64,
}

impl Link {
    fn wait(&self, began: Instant, bytes: u64) {
        let over = Duration::from_nanos((bytes as f64 * self.nanos_each) as u64);
        std::thread::sleep(over.saturating_sub(began.elapsed()));
    }

    /// Bytes of an object that is there.
    fn stored(&self, key: &BlobKey) -> u64 {
        let mut bytes = 0;
        self.inner.tamper(key, |object| bytes = object.len() as u64);
        bytes
    }
}

impl Volume for Link {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.inner.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let began = Instant::now();
        let results = self.inner.get(requests, deadline);
        self.wait(began, requests.iter().map(|request| self.stored(&request.key)).sum());
        results
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let began = Instant::now();
        let results = self.inner.put(requests, deadline);
        let pieces = requests.iter().flat_map(|request| &request.pieces);
        self.wait(began, pieces.map(|piece| piece.len() as u64).sum());
        results
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.exists(keys, deadline)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.delete(keys, deadline)
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        self.inner.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.inner.used_bytes()
    }
}
