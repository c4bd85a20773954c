//! What a worker does with its volumes, without threads and without memory of its own: for
//! simulations, and for tests in which nothing may happen by itself.
//!
//! Names, cuts, requests of the leader, reading and writing are the worker's. Its caller has the
//! payloads.

use crate::config::VolumeTier;
use crate::cuts::cuts;
use crate::damaged_objects::DamagedObjects;
use crate::execute::{Names, ObjectForm, ObjectReader, ObjectWriter, ReadGroup};
use crate::volume_answers::{Asker, VolumeAnswers};
use kvbm_plan::{
    BlockIdentity, Failure, FailureKind, KeyNotice, NamespaceTag, VolumeAnswer, VolumeId, VolumeRequest,
    clock, deadline_after,
};
use kvbm_volume::{PayloadForm, StoredOrder, Volume};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// See the module.
pub struct SteppedVolumes {
    tier: VolumeTier,
    reader: ObjectReader,
    writer: ObjectWriter,
    answers: VolumeAnswers,
    forms: Vec<PayloadForm>,
}

/// What a request brought: its answer, and what the leader is told of keys.
pub type Answered = (Result<VolumeAnswer, Failure>, Vec<KeyNotice>);

/// Keeps what it is told.
#[derive(Default)]
struct Listener(Mutex<Vec<KeyNotice>>);

impl Asker for Listener {
    fn is_closing(&self) -> bool {
        false
    }

    fn keys_destroyed(&self, _: VolumeId, keys: &[KeyNotice]) {
        self.0.lock().extend_from_slice(keys);
    }
}

impl SteppedVolumes {
    /// The worker of a rank whose part of a head has `head_bytes` bytes in every group. `page`:
    /// objects that are listed and deleted at a time.
    pub fn new(tier: VolumeTier, namespace: NamespaceTag, head_bytes: usize, page: usize) -> Self {
        let damaged = Arc::<DamagedObjects>::default();
        let names = Names { namespace, tier: tier.clone() };
        let form = |heads| PayloadForm { order: StoredOrder::Universal, pieces: heads };
        let forms: Vec<PayloadForm> = tier.groups.iter().map(|group| form(group.slice.num_heads)).collect();
        let all_cuts: Vec<_> = tier.groups.iter().map(|group| cuts(group, false)).collect();
        let groups = tier.groups.iter().zip(&all_cuts).map(|(group, cuts)| {
            let (slice, bytes) = (group.slice, group.slice.num_heads as usize * head_bytes);
            ReadGroup::new(ObjectForm { slice, form: form(slice.num_heads), bytes }, cuts.clone())
        });
        Self {
            reader: ObjectReader::new(groups.collect(), names.clone(), Arc::clone(&damaged)),
            writer: ObjectWriter::new(names, Arc::clone(&damaged)),
            answers: VolumeAnswers::new(tier.clone(), all_cuts, damaged, namespace, page),
            tier,
            forms,
        }
    }

    /// Does what a request says, as the worker's threads do.
    pub fn answer(&self, volume: VolumeId, request: &VolumeRequest) -> Answered {
        let listener = Listener::default();
        let answer = self.answers.answer(volume, request, &listener);
        (answer, listener.0.into_inner())
    }

    /// Writes a block.
    ///
    /// # Errors
    /// What a report would say.
    pub fn put(&self, volume: VolumeId, identity: &BlockIdentity, payload: &[u8]) -> Result<(), Failure> {
        let form = *self.forms.get(usize::from(identity.group.0)).ok_or_else(no_group)?;
        let (volume, deadline) = self.volume(volume)?;
        let written = self.writer.write(&*volume, &[(*identity, form, payload)], deadline);
        written.into_iter().next().unwrap_or_else(|| Err(no_result()))
    }

    /// Reads a block.
    ///
    /// # Errors
    /// What a report would say.
    pub fn get(&self, volume: VolumeId, identity: &BlockIdentity) -> Result<Vec<u8>, Failure> {
        let group = usize::from(identity.group.0);
        self.forms.get(group).ok_or_else(no_group)?;
        let (volume, deadline) = self.volume(volume)?;
        let read = self.reader.read(&*volume, group, &[*identity], deadline);
        read.into_iter().next().unwrap_or_else(|| Err(no_result()))
    }

    fn volume(&self, volume: VolumeId) -> Result<(Arc<dyn Volume>, Instant), Failure> {
        let volume = self.tier.registry.get(volume);
        let volume = volume.map_err(|error| Failure::new(FailureKind::Unsupported, error.to_string()))?;
        let deadline = deadline_after(clock::now(), volume.descriptor().deadline);
        Ok((volume, deadline))
    }
}

fn no_group() -> Failure {
    Failure::new(FailureKind::Unsupported, "the model has no such group")
}

fn no_result() -> Failure {
    Failure::new(FailureKind::Io, "the volume gave no result")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::VolumeGroup;
    use kvbm_keys::OperatorKey;
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash, VolumePlace};
    use kvbm_volume::{
        BlobKey, BlobSlice, MemoryVolume, ObjectSeal, RegistryError, VolumeCompression, VolumeDescriptor,
        VolumeEncryption, VolumeRegistry, VolumeTerms,
    };
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    const TAG: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
    const VOLUME: VolumeId = VolumeId(3);

    fn block(label: u32, number: u8) -> BlockIdentity {
        BlockIdentity {
            namespace: NamespaceId(label),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([number; 16]),
            parent: None,
            position: 0,
        }
    }

    /// Two ranks over one store, which the leader has both open.
    fn ranks() -> (Arc<MemoryVolume>, Vec<SteppedVolumes>) {
        let descriptor = VolumeDescriptor::new(VOLUME, "memory:");
        let store = Arc::new(MemoryVolume::open(descriptor.clone()).expect("a descriptor that can be"));
        let rank = |rank: u32| {
            let shared = Arc::clone(&store);
            let open = move |_| Ok(Arc::clone(&shared) as Arc<dyn Volume>);
            let registry = Arc::new(VolumeRegistry::new().with_scheme("memory", Box::new(open)));
            let slice = BlobSlice { first_layer: 0, num_layers: 2, first_head: 2 * rank, num_heads: 2 };
            let groups = vec![VolumeGroup { slice, heads: 4 }];
            let (writes, share, seal) = (true, (rank, 2), ObjectSeal::default());
            let tier = VolumeTier { registry, groups, writes, share, seal, threads: 1 };
            let worker = SteppedVolumes::new(tier, TAG, 8, 2);
            assert!(
                worker.get(VOLUME, &block(1, 0)).is_err_and(|error| error.kind == FailureKind::Unsupported)
            );
            let (opened, _) = worker.answer(VOLUME, &VolumeRequest::Register(VolumePlace::from(&descriptor)));
            assert_eq!(opened, Ok(VolumeAnswer::Done));
            worker
        };
        let ranks = vec![rank(0), rank(1)];
        (store, ranks)
    }

    /// Mutations that make it fail: `purge` or `list` of `volume_answers` ends at a whole page.
    #[test]
    fn each_rank_removes_its_own_objects_page_by_page() {
        let (_, ranks) = ranks();
        for number in 0..7 {
            for (rank, worker) in ranks.iter().enumerate() {
                worker.put(VOLUME, &block(1, number), &[number + 10 * rank as u8; 16]).expect("room");
            }
        }
        ranks[0].put(VOLUME, &block(2, 0), &[1; 16]).expect("room");
        assert_eq!(ranks[1].get(VOLUME, &block(1, 3)), Ok(vec![13; 16]));
        let (mut listed, mut after) = (0, None);
        while let (Ok(VolumeAnswer::Listed(blocks)), _) = ranks[1].answer(VOLUME, &VolumeRequest::List(after))
            && let Some(last) = blocks.last()
        {
            (listed, after) = (listed + blocks.len(), Some(*last));
        }
        assert_eq!(listed, 7);
        let purge = VolumeRequest::Purge(Some(NamespaceId(1)));
        assert_eq!(ranks[0].answer(VOLUME, &purge).0, Ok(VolumeAnswer::Removed(7)));
        for number in 0..7 {
            let found = ranks[0].get(VOLUME, &block(1, number));
            assert!(found.is_err_and(|failure| failure.kind == FailureKind::Missing));
            assert!(ranks[1].get(VOLUME, &block(1, number)).is_ok());
        }
        assert!(ranks[0].get(VOLUME, &block(2, 0)).is_ok());
    }

    /// Mutation that makes it fail: `read` of `ObjectReader` notes no damage.
    #[test]
    fn only_what_a_read_found_damaged_is_removed_as_damaged() {
        let (store, ranks) = ranks();
        let worker = &ranks[0];
        for number in [1, 2] {
            worker.put(VOLUME, &block(1, number), &[number; 16]).expect("room");
            let slice = BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 2 };
            let key = BlobKey::of(TAG, &block(1, number), slice);
            // The end of the payload.
            assert!(store.tamper(&key, |object| *object.last_mut().expect("bytes") ^= 1));
        }
        let discard = VolumeRequest::DiscardDamaged(vec![block(1, 1), block(1, 2)]);
        assert_eq!(worker.answer(VOLUME, &discard).0, Ok(VolumeAnswer::Removed(0)), "nobody has read them");
        let found = worker.get(VOLUME, &block(1, 1));
        assert!(found.is_err_and(|failure| failure.kind == FailureKind::Corrupt));
        assert_eq!(worker.answer(VOLUME, &discard).0, Ok(VolumeAnswer::Removed(1)));
    }

    /// Mutation that makes it fail: `read` of `ObjectReader` notes what `is_corrupt` says.
    #[test]
    fn an_object_of_a_newer_version_is_a_miss_and_stays() {
        let (store, ranks) = ranks();
        let worker = &ranks[0];
        worker.put(VOLUME, &block(1, 1), &[1; 16]).expect("room");
        let slice = BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 2 };
        let key = BlobKey::of(TAG, &block(1, 1), slice);
        // The version stands behind the eight bytes of the magic number.
        assert!(store.tamper(&key, |object| object[8] = 99));
        let found = worker.get(VOLUME, &block(1, 1)).unwrap_err();
        assert!(found.kind == FailureKind::Corrupt && found.detail.contains("version 99"), "{found}");
        let discard = VolumeRequest::DiscardDamaged(vec![block(1, 1)]);
        assert_eq!(worker.answer(VOLUME, &discard).0, Ok(VolumeAnswer::Removed(0)));
        assert!(store.tamper(&key, |object| object[8] = 1));
        assert_eq!(worker.get(VOLUME, &block(1, 1)), Ok(vec![1; 16]), "its own build reads it");
    }

    /// Mutation that makes it fail: `is_store_failure` knows `RegistryError::Open` alone.
    #[test]
    fn a_store_that_does_not_tell_its_keys_may_be_opened_later_and_one_of_other_keys_may_not() {
        let descriptor = VolumeDescriptor::new(VOLUME, "memory:");
        let store = Arc::new(MemoryVolume::open(descriptor.clone()).expect("a descriptor that can be"));
        let is_away = Arc::new(AtomicBool::new(false));
        let worker = |byte| {
            let (store, is_away) = (Arc::clone(&store), Arc::clone(&is_away));
            let open = move |descriptor| -> Result<Arc<dyn Volume>, RegistryError> {
                if is_away.load(Ordering::Relaxed) {
                    // Every call of it is late.
                    let deadline = Duration::from_nanos(1);
                    return Ok(Arc::new(MemoryVolume::open(VolumeDescriptor { deadline, ..descriptor })?));
                }
                Ok(Arc::clone(&store) as Arc<dyn Volume>)
            };
            let key = OperatorKey::parse(&[&[byte; 31][..], &[0]].concat()).expect("32 bytes");
            let encryption = Some(VolumeEncryption { key, previous: None });
            let compression = VolumeCompression::Off;
            let terms = VolumeTerms { namespace: TAG, encryption, compression, lossy: None };
            let registry = VolumeRegistry::new().with_scheme("memory", Box::new(open)).for_deployment(terms);
            let registry = Arc::new(registry.expect("nothing is registered"));
            let slice = BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 };
            let groups = vec![VolumeGroup { slice, heads: 1 }];
            let (writes, share, seal) = (true, (0, 1), ObjectSeal::default());
            let tier = VolumeTier { registry, groups, writes, share, seal, threads: 1 };
            SteppedVolumes::new(tier, TAG, 8, 2)
        };
        let open = |worker: &SteppedVolumes| {
            let request = VolumeRequest::Register(VolumePlace::from(&descriptor));
            worker.answer(VOLUME, &request).0.map_err(|failure| failure.kind)
        };
        let (ours, other) = (worker(1), worker(2));
        is_away.store(true, Ordering::Relaxed);
        assert_eq!(open(&ours), Err(FailureKind::Io), "it may be there later");
        is_away.store(false, Ordering::Relaxed);
        assert_eq!(open(&ours), Ok(VolumeAnswer::Done));
        assert_eq!(open(&other), Err(FailureKind::Unsupported), "it has the keys of another operator");
    }
}
