//! What lies under the volumes of all ranks: one [`MemoryVolume`], with faults.

use kvbm_plan::VolumeDescriptor;
use kvbm_volume::{
    BlobKey, BlobScope, GetRequest, MemoryVolume, ObjectSeal, PayloadForm, PutRequest, RegistryError, Volume,
    VolumeError, object,
};
use parking_lot::Mutex;
use std::io::ErrorKind;
use std::time::Instant;

/// What goes wrong with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It finds no room.
    NoRoom,
    /// It fails and writes nothing.
    Fails,
    /// It fails and has written all the same.
    FailsLater,
    /// It fails and lands later.
    Lands,
}

/// What happened to an object.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    /// It was written, and takes so many bytes.
    Put(BlobKey, u64),
    /// There was no room for so many bytes.
    NoRoom(BlobKey, u64),
    Deleted(BlobKey),
}

/// A write that lands later: what a volume was told to write.
pub(crate) struct LateWrite {
    key: BlobKey,
    form: PayloadForm,
    seal: ObjectSeal,
    payload: Vec<u8>,
}

/// See the module.
pub(super) struct Medium {
    memory: MemoryVolume,
    state: Mutex<MediumState>,
}

#[derive(Default)]
struct MediumState {
    fault: Option<Fault>,
    /// So many listings and deletions succeed, and then one fails.
    fails_after: Option<usize>,
    changes: Vec<Change>,
    late: Vec<LateWrite>,
}

impl Medium {
    pub(super) fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        Ok(Self { memory: MemoryVolume::open(descriptor)?, state: Mutex::default() })
    }

    /// What is wrong with writes from now on.
    pub(super) fn set_fault(&self, fault: Option<Fault>) {
        self.state.lock().fault = fault;
    }

    /// So many listings and deletions succeed from now on, and then one fails.
    pub(super) fn fail_after(&self, calls: Option<usize>) {
        self.state.lock().fails_after = calls;
    }

    pub(super) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut self.state.lock().changes)
    }

    pub(super) fn take_late(&self) -> Vec<LateWrite> {
        std::mem::take(&mut self.state.lock().late)
    }

    /// A late write lands.
    pub(super) fn land(&self, late: &LateWrite, deadline: Instant) {
        let LateWrite { key, form, ref seal, ref payload } = *late;
        let request = PutRequest { key, form, seal: seal.clone(), pieces: vec![payload] };
        // Who wrote it has long been told that it failed.
        let _nobody_waits = self.write(&request, deadline);
    }

    /// The bytes of an object.
    pub(super) fn copy(&self, key: &BlobKey) -> Option<Vec<u8>> {
        let mut copy = None;
        self.memory.tamper(key, |object| copy = Some(object.clone()));
        copy
    }

    /// Changes the bytes of an object, not their number.
    pub(super) fn tamper(&self, key: &BlobKey, change: impl FnOnce(&mut [u8])) {
        self.memory.tamper(key, |object| change(object));
    }

    /// Somebody puts back an object that he had copied. Whether there was room.
    pub(super) fn restore(&self, key: BlobKey, bytes: &[u8], deadline: Instant) -> bool {
        let head = object::HEADER_BYTES + 8;
        let pieces = vec![bytes.get(head..).unwrap_or_default()];
        let request = PutRequest { key, form: PayloadForm::default(), seal: ObjectSeal::default(), pieces };
        let is_put = self.memory.put(&[request], deadline).iter().all(Result::is_ok);
        is_put && self.memory.tamper(&key, |object| *object = bytes.to_vec())
    }

    /// It is removed again.
    pub(super) fn drop_restored(&self, key: BlobKey, deadline: Instant) {
        let _there = self.memory.delete(&[key], deadline);
    }

    fn failure(&self, operation: &'static str, key: BlobKey, kind: ErrorKind) -> VolumeError {
        let volume = self.memory.descriptor().id;
        VolumeError::Io { volume, operation, key, source: kind.into() }
    }

    fn note(&self, change: Change) {
        self.state.lock().changes.push(change);
    }

    /// Whether this call fails.
    fn fails(&self) -> bool {
        let mut state = self.state.lock();
        state.fails_after = match state.fails_after {
            None => return false,
            Some(0) => None,
            Some(calls) => Some(calls - 1),
        };
        state.fails_after.is_none()
    }

    fn write(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<(), VolumeError> {
        let one = PutRequest { pieces: request.pieces.clone(), seal: request.seal.clone(), ..*request };
        let result = self.memory.put(&[one], deadline).into_iter().next().unwrap_or(Ok(()));
        match &result {
            Ok(()) => {
                let mut bytes = 0;
                self.memory.tamper(&request.key, |object| bytes = object.len() as u64);
                self.note(Change::Put(request.key, bytes));
            }
            Err(VolumeError::Full { needed, .. }) => self.note(Change::NoRoom(request.key, *needed)),
            Err(_) => {}
        }
        result
    }

    fn put_one(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<(), VolumeError> {
        let failure = |kind| self.failure("put", request.key, kind);
        let fault = self.state.lock().fault;
        match fault {
            None => self.write(request, deadline),
            Some(Fault::NoRoom) => Err(failure(ErrorKind::StorageFull)),
            Some(Fault::Fails) => Err(failure(ErrorKind::ConnectionReset)),
            Some(Fault::FailsLater) => {
                self.write(request, deadline)?;
                Err(failure(ErrorKind::ConnectionReset))
            }
            Some(Fault::Lands) => {
                let PutRequest { key, form, ref seal, ref pieces } = *request;
                let late = LateWrite { key, form, seal: seal.clone(), payload: pieces.concat() };
                self.state.lock().late.push(late);
                Err(failure(ErrorKind::TimedOut))
            }
        }
    }
}

impl Volume for Medium {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.memory.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        self.memory.get(requests, deadline)
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        requests.iter().map(|request| self.put_one(request, deadline)).collect()
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.memory.exists(keys, deadline)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let mut results = Vec::with_capacity(keys.len());
        for key in keys {
            if self.fails() {
                results.push(Err(self.failure("delete", *key, ErrorKind::ConnectionReset)));
                continue;
            }
            let deleted = self.memory.delete(&[*key], deadline);
            if deleted.iter().any(|deleted| matches!(deleted, Ok(true))) {
                self.note(Change::Deleted(*key));
            }
            results.extend(deleted);
        }
        results
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        if self.fails() {
            let (volume, source) = (self.descriptor().id, ErrorKind::ConnectionReset.into());
            return Err(VolumeError::List { volume, scope: *scope, source });
        }
        self.memory.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.memory.used_bytes()
    }
}

/// Whether an object holds a data key and no block.
pub(super) fn holds_key(key: &BlobKey) -> bool {
    key.group.0 == u16::MAX
}
