//! A volume in memory: for tests, and for trying G4 without a store.

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;

use crate::object::{open as open_object, seal};
use crate::volume::{in_time, until};
use crate::{
    BlobKey, BlobScope, GetRequest, PutRequest, RegistryError, Volume, VolumeDescriptor, VolumeError,
};

/// Objects in this process's memory, in the same form as in a directory. Gone when it is dropped.
#[derive(Debug)]
pub struct MemoryVolume {
    descriptor: VolumeDescriptor,
    objects: Mutex<Objects>,
}

#[derive(Debug, Default)]
struct Objects {
    by_key: HashMap<BlobKey, Vec<u8>>,
    used_bytes: u64,
}

impl MemoryVolume {
    /// An empty volume.
    pub fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        descriptor.validate()?;
        Ok(Self { descriptor, objects: Mutex::default() })
    }

    /// Changes the stored bytes of an object, header included, as a faulty store would; `false` if there is none.
    ///
    /// For failure tests.
    pub fn tamper(&self, key: &BlobKey, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut objects = self.objects.lock();
        let Some(mut object) = objects.by_key.remove(key) else {
            return false;
        };
        let before = object.len() as u64;
        change(&mut object);
        objects.used_bytes = objects.used_bytes - before + object.len() as u64;
        objects.by_key.insert(*key, object);
        true
    }

    fn get_object(&self, request: &mut GetRequest<'_>) -> Result<(), VolumeError> {
        let volume = self.descriptor.id;
        let key = request.key;
        let objects = self.objects.lock();
        let object = objects.by_key.get(&key).ok_or(VolumeError::NotFound { volume, key })?;
        open_object(volume, object, request)
    }

    fn put_object(&self, request: &PutRequest<'_>) -> Result<(), VolumeError> {
        let mut object = seal(self.descriptor.id, request, self.descriptor.alignment)?;
        for piece in &request.pieces {
            object.extend_from_slice(piece);
        }
        let needed = object.len() as u64;

        let mut objects = self.objects.lock();
        let replaced = objects.by_key.get(&request.key).map_or(0, |old| old.len() as u64);
        let others = objects.used_bytes - replaced;
        let free =
            self.descriptor.capacity_bytes.map_or(u64::MAX, |capacity| capacity.saturating_sub(others));
        if needed > free {
            return Err(VolumeError::Full { volume: self.descriptor.id, needed, free });
        }
        objects.used_bytes = others + needed;
        objects.by_key.insert(request.key, object);
        Ok(())
    }

    fn delete_object(&self, key: &BlobKey) -> bool {
        let mut objects = self.objects.lock();
        let Some(object) = objects.by_key.remove(key) else {
            return false;
        };
        objects.used_bytes -= object.len() as u64;
        true
    }

    fn expired(&self, operation: &'static str, key: BlobKey) -> VolumeError {
        VolumeError::DeadlineExceeded { volume: self.descriptor.id, operation, key }
    }
}

impl Volume for MemoryVolume {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.descriptor
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        until(
            requests,
            deadline,
            |request| self.expired("get", request.key),
            |request| self.get_object(request),
        )
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        until(
            requests,
            deadline,
            |request| self.expired("put", request.key),
            |request| self.put_object(request),
        )
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let exists = |key: &BlobKey| Ok(self.objects.lock().by_key.contains_key(key));
        until(keys, deadline, |key| self.expired("exists", **key), exists)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        until(keys, deadline, |key| self.expired("delete", **key), |key| Ok(self.delete_object(key)))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        in_time(self.descriptor.id, scope, deadline)?;
        let keys: Vec<BlobKey> = self.objects.lock().by_key.keys().copied().collect();
        let keys = keys.into_iter().filter(|key| scope.contains(key));
        let mut named: Vec<_> = keys.map(|key| (key.object_path(), key)).collect();
        named.sort_unstable();
        let after = after.map(BlobKey::object_path);
        let later = named.into_iter().filter(|(path, _)| after.as_ref().is_none_or(|after| path > after));
        Ok(later.map(|(_, key)| key).take(max).collect())
    }

    fn used_bytes(&self) -> Option<u64> {
        Some(self.objects.lock().used_bytes)
    }
}
