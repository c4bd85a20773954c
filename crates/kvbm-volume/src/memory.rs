//! A volume in memory: for tests, and for trying G4 without a store.

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;

use crate::object::{open as open_object, seal};
use crate::quota::Quota;
use crate::volume::{check, in_time};
use crate::{
    BlobKey, BlobScope, GetRequest, PutRequest, RegistryError, Volume, VolumeDescriptor, VolumeError,
    one_by_one,
};

/// Objects in this process's memory, in the same form as in a directory. Gone when it is dropped.
#[derive(Debug)]
pub struct MemoryVolume {
    descriptor: VolumeDescriptor,
    objects: Mutex<HashMap<BlobKey, Vec<u8>>>,
    quota: Quota,
}

impl MemoryVolume {
    /// An empty volume.
    ///
    /// # Errors
    /// [`RegistryError::Descriptor`]: a field with a value that cannot be.
    pub fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        check(&descriptor)?;
        Ok(Self { descriptor, objects: Mutex::default(), quota: Quota::default() })
    }

    /// Changes the stored bytes of an object, header included, as a faulty store would; `false` if
    /// there is none. What it takes of the capacity stays.
    ///
    /// For failure tests.
    pub fn tamper(&self, key: &BlobKey, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        self.objects.lock().get_mut(key).map(change).is_some()
    }

    fn get_object(&self, request: &mut GetRequest<'_>) -> Result<(), VolumeError> {
        let volume = self.descriptor.id;
        let key = request.key;
        let objects = self.objects.lock();
        let object = objects.get(&key).ok_or(VolumeError::NotFound { volume, key })?;
        open_object(volume, object, request)
    }

    fn put_object(&self, request: &PutRequest<'_>) -> Result<(), VolumeError> {
        let mut object = seal(self.descriptor.id, request, self.descriptor.alignment)?;
        for piece in &request.pieces {
            object.extend_from_slice(piece);
        }
        let mut objects = self.objects.lock();
        let replaced = objects.get(&request.key).map_or(0, |old| old.len() as u64);
        self.quota.reserve(&self.descriptor, &request.key, object.len() as u64, replaced)?;
        self.quota.release(&request.key, replaced);
        objects.insert(request.key, object);
        Ok(())
    }

    fn delete_object(&self, key: &BlobKey) -> bool {
        let removed = self.objects.lock().remove(key);
        if let Some(object) = &removed {
            self.quota.release(key, object.len() as u64);
        }
        removed.is_some()
    }
}

impl Volume for MemoryVolume {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.descriptor
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        one_by_one(volume, "get", requests, deadline, |request| self.get_object(request))
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        one_by_one(volume, "put", requests, deadline, |request| self.put_object(request))
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let exists = |key: &BlobKey| Ok(self.objects.lock().contains_key(key));
        one_by_one(self.descriptor.id, "exists", keys, deadline, exists)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        one_by_one(self.descriptor.id, "delete", keys, deadline, |key| Ok(self.delete_object(key)))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        in_time(self.descriptor.id, scope, deadline)?;
        let keys: Vec<BlobKey> = self.objects.lock().keys().copied().collect();
        let keys = keys.into_iter().filter(|key| scope.contains(key));
        let mut named: Vec<_> = keys.map(|key| (key.object_path(), key)).collect();
        named.sort_unstable();
        let after = after.map(BlobKey::object_path);
        let later = named.into_iter().filter(|(path, _)| after.as_ref().is_none_or(|after| path > after));
        Ok(later.map(|(_, key)| key).take(max).collect())
    }

    fn used_bytes(&self) -> Option<u64> {
        Some(self.quota.used())
    }
}
