//! The contract of a blob store.

use std::path::PathBuf;
use std::time::Instant;

use kvbm_keys::KeyId;
use kvbm_plan::{NamespaceId, VolumeDescriptor, VolumeId, clock};

use crate::object::MAX_ALIGNMENT;
use crate::{
    BlobKey, BlobScope, CompressionStats, GetRequest, ObjectSeal, PayloadForm, PutRequest, RegistryError,
    VolumeError,
};

/// A key that was to be destroyed, and what came of that.
pub type DestroyedKey = (KeyId, Result<(), VolumeError>);

/// What a descriptor says must make sense.
pub(crate) fn check(descriptor: &VolumeDescriptor) -> Result<(), RegistryError> {
    let VolumeDescriptor { id, alignment, deadline, .. } = *descriptor;
    let refuse = |field, value, rule| Err(RegistryError::Descriptor { id, field, value, rule });
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return refuse("alignment", alignment.to_string(), "a power of two from 1 to 1048576 bytes");
    }
    if deadline.is_zero() || deadline > VolumeDescriptor::MAX_DEADLINE {
        return refuse("deadline", format!("{deadline:?}"), "longer than zero, at most an hour");
    }
    Ok(())
}

/// A blob store: the least an implementer has to write. [`VolumeExt`] has the conveniences,
/// [`crate::conformance`] the tests.
///
/// Calls block and come from many threads at once. Each gives one result per request, in order; one
/// request's failure does not touch the others. When `deadline` passes, requests whose turn has not
/// come get [`DeadlineExceeded`](VolumeError::DeadlineExceeded); a store that can abort an
/// operation in progress does so. [`one_by_one`](crate::one_by_one) is all that for a store that
/// takes one object at a time.
pub trait Volume: Send + Sync {
    /// What the volume was registered with.
    fn descriptor(&self) -> &VolumeDescriptor;

    /// Reads blobs, each verified against its key, length and checksum before `Ok`.
    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>>;

    /// Writes blobs. An object appears whole or not at all, and survives power loss after `Ok` if
    /// the store can do that. Writing an object again leaves it whole, whatever was there: objects
    /// of a key are equal, so one that is whole may stay, and retries are harmless.
    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>>;

    /// Whether objects are there: a hint, for `get` may still fail.
    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>>;

    /// Deletes objects; `false` where there was none.
    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>>;

    /// Objects of `scope` whose [path](BlobKey::object_path) comes after that of `after`, in the
    /// order of paths, at most `max`; fewer where there are no more. What else lies in the store is
    /// left out.
    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError>;

    /// Bytes that objects take by the volume's own count, headers included; `None` if it does not
    /// count.
    fn used_bytes(&self) -> Option<u64>;

    /// What the store is, tried out where need be, for `kvbm doctor`. What a trial left is removed
    /// after it, so this may last up to the descriptor's deadline longer than `deadline`.
    fn facts(&self, _deadline: Instant) -> StoreFacts {
        StoreFacts::default()
    }

    /// Destroys the data keys of a namespace, where objects are encrypted
    /// ([`EncryptedVolume`](crate::EncryptedVolume)); for each key what came of it. A store has
    /// nothing to do.
    ///
    /// # Errors
    /// It is not known which keys there are; nothing that is known here can be read any more.
    fn destroy_keys(
        &self,
        _label: NamespaceId,
        _deadline: Instant,
    ) -> Result<Vec<DestroyedKey>, VolumeError> {
        Ok(Vec::new())
    }

    /// What compression did, where objects can be compressed. A store has nothing to say.
    fn compression(&self) -> Option<CompressionStats> {
        None
    }
}

/// What a volume knows of its store; `None` for what it does not know, or what makes no sense
/// there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreFacts {
    /// The folder of this machine in which objects lie.
    pub folder: Option<PathBuf>,
    /// Whether the store can be told to write an object only where there is none.
    pub conditional_puts: Option<bool>,
}

/// Conveniences over [`Volume`].
pub trait VolumeExt: Volume {
    /// Reads one blob of `length` bytes, in one opaque piece, summed without a key.
    fn get_one(&self, key: &BlobKey, length: usize, deadline: Instant) -> Result<Vec<u8>, VolumeError> {
        let mut payload = vec![0; length];
        let mut request = [GetRequest {
            key: *key,
            form: PayloadForm::default(),
            seal: ObjectSeal::default(),
            pieces: vec![&mut payload],
        }];
        only(self.get(&mut request, deadline), self.descriptor().id, "get", key)?;
        Ok(payload)
    }

    /// Writes one blob, in one opaque piece, summed without a key.
    fn put_one(&self, key: &BlobKey, payload: &[u8], deadline: Instant) -> Result<(), VolumeError> {
        let request = [PutRequest {
            key: *key,
            form: PayloadForm::default(),
            seal: ObjectSeal::default(),
            pieces: vec![payload],
        }];
        only(self.put(&request, deadline), self.descriptor().id, "put", key)
    }
}

impl<V: Volume + ?Sized> VolumeExt for V {}

/// The only result of a batch of one. An implementation that gives none has broken the contract.
fn only<T>(
    results: Vec<Result<T, VolumeError>>,
    volume: VolumeId,
    operation: &'static str,
    key: &BlobKey,
) -> Result<T, VolumeError> {
    results.into_iter().next().unwrap_or_else(|| {
        let source = std::io::Error::other("the volume gave no result");
        Err(VolumeError::Io { volume, operation, key: *key, source })
    })
}

/// Whether a listing may still begin.
pub(crate) fn in_time(volume: VolumeId, scope: &BlobScope, deadline: Instant) -> Result<(), VolumeError> {
    if clock::now() < deadline {
        return Ok(());
    }
    let source = std::io::Error::new(std::io::ErrorKind::TimedOut, "the deadline passed; give more time");
    Err(VolumeError::List { volume, scope: *scope, source })
}
