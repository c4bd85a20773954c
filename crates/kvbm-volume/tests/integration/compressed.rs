//! Compressed volumes: what lies in the store, who reads it, what hostile objects come to, and
//! when `auto` compresses.
#![cfg(feature = "compress")]

use crate::random::Random;
use kvbm_keys::{DeploymentKey, OperatorKey};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, CompressedVolume, DirectoryVolume, EncryptedVolume, GetRequest,
    MemoryVolume, ObjectCorruption, ObjectSeal, PayloadForm, PutRequest, StoredOrder, Volume,
    VolumeCompression, VolumeDescriptor, VolumeEncryption, VolumeError,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([0xa1; 16]);
const BYTES: usize = 3 * 5000;
const FORM: PayloadForm = PayloadForm { order: StoredOrder::Universal, pieces: 3 };

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NAMESPACE,
        label: NamespaceId(7),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 3 },
    }
}

/// Half-precision numbers of a few magnitudes.
fn content(number: u8, bytes: usize) -> Vec<u8> {
    let mut random = Random(u64::from(number) + 1);
    (0..bytes)
        .map(|at| if at % 2 == 0 { random.next() as u8 } else { 0x38 | random.next() as u8 & 0x83 })
        .collect()
}

fn memory() -> Arc<MemoryVolume> {
    Arc::new(MemoryVolume::open(VolumeDescriptor::new(VolumeId(1), "memory:")).unwrap())
}

fn encrypted(store: Arc<dyn Volume>) -> Arc<dyn Volume> {
    let key = OperatorKey::parse(&[&[7; 31][..], b"!"].concat()).unwrap();
    let encryption = VolumeEncryption { key, previous: None };
    Arc::new(EncryptedVolume::open(store, NAMESPACE, encryption).unwrap())
}

fn over(store: Arc<dyn Volume>, setting: VolumeCompression) -> CompressedVolume {
    CompressedVolume::new(store, setting)
}

fn put(volume: &dyn Volume, seal: &ObjectSeal, number: u8) {
    let bytes = content(number, BYTES);
    let (head, tail) = bytes.split_at(700);
    let request = PutRequest { key: key(number), form: FORM, seal: seal.clone(), pieces: vec![head, tail] };
    volume.put(&[request], soon()).remove(0).unwrap();
}

fn get(volume: &dyn Volume, seal: &ObjectSeal, number: u8) -> Result<Vec<u8>, VolumeError> {
    let mut bytes = vec![0; BYTES];
    let (head, tail) = bytes.split_at_mut(1234);
    let request =
        GetRequest { key: key(number), form: FORM, seal: seal.clone(), pieces: vec![head, &mut [], tail] };
    volume.get(&mut [request], soon()).remove(0).map(|()| bytes)
}

fn object(store: &MemoryVolume, number: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(store.tamper(&key(number), |object| bytes.clone_from(object)));
    bytes
}

fn reason(result: Result<Vec<u8>, VolumeError>) -> ObjectCorruption {
    match result {
        Err(error @ VolumeError::Corrupt { reason, .. }) => {
            assert!(error.is_miss(), "{error}");
            reason
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_are_shorter_and_are_read_with_every_setting_signature_and_encryption() {
    use VolumeCompression::{Auto, Lz4, Off, Zstd};
    let keyed = ObjectSeal::keyed(&DeploymentKey::from_secret(b"of the deployment"));
    for (seal, signed, encrypts) in
        [(ObjectSeal::default(), false, false), (keyed.clone(), true, false), (keyed, true, true)]
    {
        let store = memory();
        let below = || if encrypts { encrypted(store.clone()) } else { store.clone() };
        for (number, setting) in (0_u8..).zip([Off, Zstd, Lz4]) {
            let volume = over(below(), setting);
            put(&volume, &seal, number);
            let stored = object(&store, number);
            let version = 1 + u8::from(signed) + 2 * u8::from(encrypts);
            let is_shorter = setting != Off;
            assert_eq!(stored.len() < BYTES, is_shorter, "{setting:?}");
            assert_eq!(stored[8], version + 4 * u8::from(is_shorter), "{setting:?}");
            for reader in [Off, Zstd, Lz4, Auto] {
                let found = get(&over(below(), reader), &seal, number).unwrap();
                assert!(found == content(number, BYTES), "{setting:?} read with {reader:?}");
            }
            let stats = volume.compression().unwrap();
            assert_eq!((stats.written, stats.compresses), (BYTES as u64, setting != Off));
            assert_eq!(stats.written_stored < BYTES as u64, is_shorter);
        }
        // Who knows nothing of compression has a miss, and nobody reads one of another length.
        assert_eq!(reason(get(&*below(), &seal, 1)), ObjectCorruption::Compressed);
        let volume = over(below(), Zstd);
        let mut longer = vec![0; BYTES + 3];
        let request = GetRequest { key: key(1), form: FORM, seal: seal.clone(), pieces: vec![&mut longer] };
        assert!(volume.get(&mut [request], soon()).remove(0).unwrap_err().is_miss());
        let scope = BlobScope { namespace: NAMESPACE, label: None };
        assert_eq!(volume.list(&scope, None, 10, soon()).unwrap().len(), 3);
        assert!(volume.delete(&[key(1)], soon()).remove(0).unwrap());
        assert!(matches!(get(&volume, &seal, 1), Err(VolumeError::NotFound { .. })));
    }
}

#[test]
fn a_folder_has_shorter_objects_and_counts_them_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut descriptor = VolumeDescriptor::new(VolumeId(1), folder.path().display().to_string());
    descriptor.capacity_bytes = Some(1 << 20);
    descriptor.alignment = 512;
    let store: Arc<dyn Volume> = Arc::new(DirectoryVolume::open(descriptor).unwrap());
    let volume = over(store, VolumeCompression::Zstd);
    let seal = ObjectSeal::default();
    put(&volume, &seal, 1);
    assert!(volume.used_bytes().unwrap() < (BYTES * 9 / 10) as u64, "{:?}", volume.used_bytes());
    assert!(get(&volume, &seal, 1).unwrap() == content(1, BYTES));
}

/// As who can write the store without a key: all sums are made right after a change.
fn mend(object: &mut [u8]) {
    let crc = |parts: &[&[u8]]| {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &parts.concat()).to_le_bytes()
    };
    let head = 96 + 3 * 8;
    let (identity, payload) = (object[..88].to_vec(), object[head..].to_vec());
    for (index, piece) in payload.chunks_exact(payload.len() / 3).enumerate() {
        let sum = crc(&[&identity, &(index as u32).to_le_bytes(), piece]);
        object[96 + 8 * index..][..8].copy_from_slice(&sum);
    }
    let sum = crc(&[&identity, &object[96..head]]);
    object[88..96].copy_from_slice(&sum);
}

/// Mutation that makes it fail: the checksum of the content is not compared.
#[test]
fn no_changed_bit_is_served_and_none_makes_a_longer_block() {
    let (store, seal) = (memory(), ObjectSeal::default());
    let volume = over(store.clone(), VolumeCompression::Zstd);
    put(&volume, &seal, 1);
    let whole = object(&store, 1);
    let mut random = Random(3);
    let (mut frames, mut harmless) = (0, 0);
    for round in 0..3000 {
        let mut damaged = whole.clone();
        // Half of them in the header, the frame's own, and its lengths.
        let most = if round % 2 == 0 { 8 * (96 + 24 + 24 + 8) } else { 8 * whole.len() };
        let bit = random.below(most);
        damaged[bit / 8] ^= 1 << (bit % 8);
        let mends = round % 4 > 0;
        if mends {
            mend(&mut damaged);
        }
        store.tamper(&key(1), |object| object.clone_from(&damaged));
        match get(&volume, &seal, 1) {
            Ok(bytes) => {
                assert!(bytes == content(1, BYTES), "bit {bit}");
                harmless += 1;
            }
            Err(error) => {
                assert!(error.is_miss() && !error.to_string().is_empty(), "{error}");
                frames += usize::from(error.to_string().contains("its payload: "));
            }
        }
    }
    assert!(frames > 500 && harmless < 1000, "{frames} by the frame, {harmless} without effect");
}

/// A payload of zeros takes few bytes; what is asked for bounds what is made of them.
#[test]
fn a_frame_of_another_length_is_a_miss_by_name() {
    let (store, seal) = (memory(), ObjectSeal::default());
    let volume = over(store.clone(), VolumeCompression::Zstd);
    let zeros = vec![0; 1 << 24];
    let whole = PayloadForm { order: StoredOrder::Opaque, pieces: 1 };
    let request = PutRequest { key: key(1), form: whole, seal: seal.clone(), pieces: vec![&zeros] };
    volume.put(&[request], soon()).remove(0).unwrap();
    assert!(object(&store, 1).len() < 1 << 16);
    let mut bytes = vec![0; 1 << 16];
    let request = GetRequest { key: key(1), form: whole, seal, pieces: vec![&mut bytes] };
    let error = volume.get(&mut [request], soon()).remove(0).unwrap_err();
    assert!(error.is_miss() && error.to_string().contains("16777216 bytes, 65536 were asked for"), "{error}");
}

/// A store that takes a time for each byte.
struct Slow {
    inner: Arc<MemoryVolume>,
    each: Duration,
}

impl Slow {
    fn wait(&self, bytes: usize) {
        std::thread::sleep(self.each.mul_f64(bytes as f64));
    }
}

impl Volume for Slow {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.inner.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        self.inner.get(requests, deadline)
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        self.wait(requests.iter().flat_map(|request| &request.pieces).map(|piece| piece.len()).sum());
        self.inner.put(requests, deadline)
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

/// Whether blocks of a megabyte are compressed in the end, of a store of so many bytes a second.
fn chosen(bytes: &[u8], bytes_per_s: Option<f64>) -> bool {
    let each = bytes_per_s.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(1e6 / rate));
    // A microsecond a byte is the unit: durations have nanoseconds.
    let store = Slow { inner: memory(), each: each / 1_000_000 };
    let volume = over(Arc::new(store), VolumeCompression::Auto);
    for number in 0..24 {
        let form = PayloadForm { order: StoredOrder::Opaque, pieces: 1 };
        let request = PutRequest { key: key(number), form, seal: ObjectSeal::default(), pieces: vec![bytes] };
        volume.put(&[request], soon()).remove(0).unwrap();
    }
    volume.compression().unwrap().compresses
}

#[test]
fn auto_compresses_for_a_slow_store_and_not_for_memory() {
    // Far apart, so that a busy machine changes nothing: one takes next to no bytes and an eighth
    // of a second without compression, the other becomes a third shorter.
    assert!(chosen(&vec![0; 1 << 20], Some(8e6)), "8 MB/s");
    assert!(!chosen(&content(1, 1 << 20), None), "memory");
}
