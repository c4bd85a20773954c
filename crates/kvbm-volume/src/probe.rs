//! Whether a volume works: an object goes there and back.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, deadline_after};

use crate::{BlobKey, BlobScope, BlobSlice, StoreFacts, Volume, VolumeError, VolumeExt};

/// Bytes of the object.
const PAYLOAD: usize = 64 << 10;

/// What came of a [`probe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// What the volume knows of its store.
    pub facts: StoreFacts,
    /// How long each call took: `put`, `exists`, `get`, `list`, `delete`, of an object of 64 KiB.
    pub took: Vec<(&'static str, Duration)>,
}

/// Puts a small object on the volume, in a namespace that nobody else has, asks for it, reads it,
/// lists it and deletes it. As it removes what it left in any case, it may last up to the
/// descriptor's deadline longer than `deadline`.
///
/// # Errors
/// What the first call that failed said; an object that differs, or is not listed, is one too.
pub fn probe(volume: &dyn Volume, deadline: Instant) -> Result<Probe, VolumeError> {
    let key = nobodys_key();
    let written: Vec<u8> = (0..PAYLOAD).map(|at| (at % 251) as u8).collect();
    let mut took = Vec::new();
    let put = timed(&mut took, "put", || volume.put_one(&key, &written, deadline));
    let found = put.and_then(|()| look_for(volume, &key, deadline, &mut took));
    // Whatever was found, it must not stay; nor must what a put left that failed or was late.
    let cleaned = deadline.max(deadline_after(Instant::now(), volume.descriptor().deadline));
    let deleted = timed(&mut took, "delete", || volume.delete(&[key], cleaned).pop().unwrap_or(Ok(false)));
    found?;
    deleted?;
    Ok(Probe { facts: volume.facts(deadline), took })
}

fn look_for(
    volume: &dyn Volume,
    key: &BlobKey,
    deadline: Instant,
    took: &mut Vec<(&'static str, Duration)>,
) -> Result<(), VolumeError> {
    let lost = || VolumeError::NotFound { volume: volume.descriptor().id, key: *key };
    let there = |there: bool| if there { Ok(()) } else { Err(lost()) };
    let found =
        timed(took, "exists", || volume.exists(&[*key], deadline).pop().unwrap_or_else(|| Err(lost())));
    there(found?)?;
    // Compared with its checksum by the volume.
    timed(took, "get", || volume.get_one(key, PAYLOAD, deadline))?;
    let scope = BlobScope { namespace: key.namespace, label: None };
    let listed = timed(took, "list", || volume.list(&scope, None, 2, deadline))?;
    there(listed == [*key])
}

fn timed<T>(took: &mut Vec<(&'static str, Duration)>, call: &'static str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = work();
    took.push((call, begun.elapsed()));
    result
}

fn nobodys_key() -> BlobKey {
    let mut random = [0; 16];
    for half in random.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().build_hasher().finish().to_le_bytes());
    }
    BlobKey {
        namespace: NamespaceTag::from_bytes(random),
        label: NamespaceId(0),
        group: GroupId(0),
        hash: SequenceHash::from_bytes(random),
        slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
    }
}
