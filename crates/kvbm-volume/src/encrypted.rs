//! A volume whose objects are encrypted before the store gets them.

use std::sync::Arc;
use std::time::Instant;

use kvbm_keys::MAX_ENCRYPTED_BYTES;
use kvbm_plan::{NamespaceId, NamespaceTag, VolumeDescriptor};

use crate::data_keys::{self, DataKeys, VolumeEncryption};
use crate::key_object::is_key_object;
use crate::seal::{CipherStamp, FoundStamp};
use crate::{
    BlobKey, BlobScope, DestroyedKey, GetRequest, ObjectCorruption, PayloadForm, PutRequest, StoreFacts,
    Volume, VolumeError, VolumeKeysError,
};

/// Encrypted bytes that one call of `put` holds at a time, and one object.
const MOST_SEALED: u64 = 32 << 20;

/// The objects of one deployment on another volume, encrypted with AES-256-GCM-SIV under data keys
/// that lie beside them. An object is bound to its key and form: under another name it does not
/// open.
///
/// Each call of `put` copies what it encrypts, 32 MiB and one object at a time; `get` decrypts
/// where the bytes go, or in a copy of one object.
pub struct EncryptedVolume {
    inner: Arc<dyn Volume>,
    keys: DataKeys,
}

impl EncryptedVolume {
    /// Looks what keys of the deployment are there.
    ///
    /// # Errors
    /// The deployment has objects that are not encrypted, or with another operator's key; the store
    /// does not answer, or cannot be written.
    pub fn open(
        inner: Arc<dyn Volume>,
        namespace: NamespaceTag,
        encryption: VolumeEncryption,
    ) -> Result<Self, VolumeKeysError> {
        let keys = DataKeys::open(&*inner, namespace, encryption)?;
        Ok(Self { inner, keys })
    }

    /// Whether a deployment has keys on a volume. It opens none of them, and writes nothing.
    ///
    /// # Errors
    /// The store failed.
    pub fn has_keys(volume: &dyn Volume, namespace: NamespaceTag) -> Result<bool, VolumeError> {
        data_keys::has_keys(volume, namespace)
    }

    /// New blocks get new data keys: of one namespace, or of all that have one. What is there stays
    /// readable. Other nodes use the new keys half a minute later. How many keys were made.
    ///
    /// # Errors
    /// The store failed: some keys may have been made.
    pub fn rotate(&self, label: Option<NamespaceId>) -> Result<u64, VolumeError> {
        self.keys.rotate(&*self.inner, label)
    }

    /// Encrypts one payload. With what its header has to say.
    fn seal(
        &self,
        request: &PutRequest<'_>,
        deadline: Instant,
    ) -> Result<(CipherStamp, Vec<u8>), VolumeError> {
        let key = request.key;
        if length_of(request) > MAX_ENCRYPTED_BYTES {
            let text = format!("more than {MAX_ENCRYPTED_BYTES} bytes cannot be encrypted");
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
            return Err(VolumeError::Io { volume: self.descriptor().id, operation: "put", key, source });
        }
        let data = self.keys.for_new(&*self.inner, key.label, deadline)?;
        let mut sealed = request.pieces.concat();
        let tag = data.key.seal(&name_of(&key, request.form, request.seal.is_framed()), &mut sealed);
        Ok((CipherStamp { key: data.id, tag }, sealed))
    }

    /// Decrypts what was read.
    fn open_payload(
        &self,
        request: &mut GetRequest<'_>,
        stamp: Option<CipherStamp>,
        deadline: Instant,
    ) -> Result<(), VolumeError> {
        let (volume, key) = (self.descriptor().id, request.key);
        let corrupt = |reason| VolumeError::Corrupt { volume, key, reason };
        // One that takes objects apart in its own way has not looked.
        let stamp = stamp.ok_or_else(|| corrupt(ObjectCorruption::Encryption { encrypted: false }))?;
        let data = self.keys.find(&*self.inner, key.label, stamp.key, deadline)?;
        let data = data.ok_or_else(|| corrupt(ObjectCorruption::NoKey(stamp.key)))?;
        let length = request.seal.frame_length();
        let name = name_of(&key, request.form, length.is_some());
        // Of a compressed payload the first bytes alone were read.
        let mut left = length.map_or(usize::MAX, |length| usize::try_from(length).unwrap_or(usize::MAX));
        let filled = request.pieces.iter_mut().map(|piece| {
            let now = piece.len().min(left);
            left -= now;
            &mut piece[..now]
        });
        let mut parts: Vec<&mut [u8]> = filled.filter(|part| !part.is_empty()).collect();
        let opened = match &mut parts[..] {
            [whole] => data.open(&name, whole, &stamp.tag),
            parts => {
                let mut whole = parts.concat();
                let opened = data.open(&name, &mut whole, &stamp.tag);
                let mut rest = &whole[..];
                for part in parts {
                    let (bytes, later) = rest.split_at(part.len());
                    part.copy_from_slice(bytes);
                    rest = later;
                }
                opened
            }
        };
        if opened { Ok(()) } else { Err(corrupt(ObjectCorruption::Tag(stamp.key))) }
    }
}

/// What an encrypted payload is bound to.
fn name_of(key: &BlobKey, form: PayloadForm, is_framed: bool) -> Vec<u8> {
    let BlobKey { namespace, label, group, hash, slice } = key;
    let mut name = [&namespace.as_bytes()[..], hash.as_bytes()].concat();
    let slice = [slice.first_layer, slice.num_layers, slice.first_head, slice.num_heads];
    let form = [label.0, group.0.into(), form.order as u32, form.pieces];
    for word in slice.into_iter().chain(form).chain(is_framed.then_some(1)) {
        name.extend_from_slice(&word.to_le_bytes());
    }
    name
}

fn length_of(request: &PutRequest<'_>) -> u64 {
    request.pieces.iter().map(|piece| piece.len() as u64).sum()
}

impl Volume for EncryptedVolume {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.inner.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        self.keys.look_if_due(&*self.inner, deadline);
        let stamps: Vec<FoundStamp> = requests.iter().map(|_| FoundStamp::default()).collect();
        let sealed = |(request, found): (&mut GetRequest<'_>, &FoundStamp)| -> _ {
            (request.key, request.form, request.seal.finding(found))
        };
        let about: Vec<_> = requests.iter_mut().zip(&stamps).map(sealed).collect();
        let mut inner: Vec<GetRequest<'_>> = requests
            .iter_mut()
            .zip(about)
            .map(|(request, (key, form, seal))| {
                let pieces = request.pieces.iter_mut().map(|piece| &mut **piece).collect();
                GetRequest { key, form, seal, pieces }
            })
            .collect();
        let results = self.inner.get(&mut inner, deadline);
        drop(inner);
        let open =
            |((request, stamp), result): ((&mut GetRequest<'_>, FoundStamp), Result<(), VolumeError>)| {
                result?;
                self.open_payload(request, stamp.get().copied(), deadline)
            };
        requests.iter_mut().zip(stamps).zip(results).map(open).collect()
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        self.keys.look_if_due(&*self.inner, deadline);
        let mut results = Vec::with_capacity(requests.len());
        let mut rest = requests;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |request: &&PutRequest<'_>| {
                bytes += length_of(request);
                bytes <= MOST_SEALED
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            let sealed: Vec<_> = now.iter().map(|request| self.seal(request, deadline)).collect();
            let inner: Vec<PutRequest<'_>> = now
                .iter()
                .zip(&sealed)
                .filter_map(|(request, sealed)| {
                    let (stamp, bytes) = sealed.as_ref().ok()?;
                    let PutRequest { key, form, .. } = *request;
                    Some(PutRequest { key, form, seal: request.seal.stamped(*stamp), pieces: vec![bytes] })
                })
                .collect();
            let mut put = self.inner.put(&inner, deadline).into_iter();
            drop(inner);
            let silent = |key| {
                let source = std::io::Error::other("the volume gave no result");
                VolumeError::Io { volume: self.descriptor().id, operation: "put", key, source }
            };
            results.extend(now.iter().zip(sealed).map(|(request, sealed)| {
                sealed.and_then(|_| put.next().unwrap_or_else(|| Err(silent(request.key))))
            }));
        }
        results
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.exists(keys, deadline)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.delete(keys, deadline)
    }

    /// Blocks alone: objects of keys are the last ones.
    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        let mut listed = self.inner.list(scope, after, max, deadline)?;
        listed.retain(|key| !is_key_object(key));
        Ok(listed)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.inner.used_bytes()
    }

    fn facts(&self, deadline: Instant) -> StoreFacts {
        self.inner.facts(deadline)
    }

    fn destroy_keys(&self, label: NamespaceId, deadline: Instant) -> Result<Vec<DestroyedKey>, VolumeError> {
        self.keys.destroy(&*self.inner, label, deadline)
    }
}
