//! A volume that does what is wrong.

use super::VOLUME;
use crate::support::soon;
use kvbm_plan::VolumeId;
use kvbm_volume::{
    BlobKey, BlobScope, GetRequest, MemoryVolume, PutRequest, Volume, VolumeDescriptor, VolumeError,
};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// What a volume does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Nothing,
    /// Panics.
    Panic,
    /// Gives no results.
    Silent,
    /// Answers after its deadline.
    Late,
    /// The store refuses.
    Refuses,
    /// Serves nobody until two calls are there.
    Pairs,
    /// Calls do not return while this lasts.
    Hangs,
}

const FAULTS: [Fault; 7] =
    [Fault::Nothing, Fault::Panic, Fault::Silent, Fault::Late, Fault::Refuses, Fault::Pairs, Fault::Hangs];

/// A memory volume with faults.
pub(crate) struct Faulty {
    pub(crate) memory: MemoryVolume,
    fault: AtomicU8,
    pub(crate) calls: (Mutex<usize>, Condvar),
}

impl Faulty {
    pub(crate) fn new(capacity_bytes: Option<u64>) -> Arc<Self> {
        Self::of(VOLUME, capacity_bytes)
    }

    pub(crate) fn of(id: VolumeId, capacity_bytes: Option<u64>) -> Arc<Self> {
        let deadline = Duration::from_secs(60);
        let descriptor =
            VolumeDescriptor { capacity_bytes, deadline, ..VolumeDescriptor::new(id, "memory:") };
        let memory = MemoryVolume::open(descriptor).expect("the test's own set-up");
        Arc::new(Self { memory, fault: AtomicU8::new(0), calls: Default::default() })
    }

    pub(crate) fn set(&self, fault: Fault) {
        let number = FAULTS.iter().position(|known| *known == fault).expect("the test's own set-up");
        self.fault.store(number as u8, Ordering::Relaxed);
    }

    fn results<T>(
        &self,
        operation: &'static str,
        keys: Vec<BlobKey>,
        work: impl FnOnce() -> Vec<Result<T, VolumeError>>,
    ) -> Vec<Result<T, VolumeError>> {
        let fault = || FAULTS[usize::from(self.fault.load(Ordering::Relaxed))];
        match fault() {
            Fault::Nothing => work(),
            Fault::Hangs => {
                let until = soon();
                while fault() == Fault::Hangs {
                    assert!(Instant::now() < until, "the test's own end");
                    std::thread::sleep(Duration::from_millis(1));
                }
                work()
            }
            Fault::Panic => panic!("planted"),
            Fault::Pairs => {
                let (calls, changed) = &self.calls;
                let mut calls = calls.lock().expect("sound");
                *calls += 1;
                changed.notify_all();
                let (calls, waited) = changed
                    .wait_timeout_while(calls, Duration::from_secs(30), |calls| *calls < 2)
                    .expect("sound");
                assert!(!waited.timed_out(), "alone");
                drop(calls);
                work()
            }
            Fault::Silent => Vec::new(),
            Fault::Late => keys
                .into_iter()
                .map(|key| Err(VolumeError::DeadlineExceeded { volume: VOLUME, operation, key }))
                .collect(),
            Fault::Refuses => keys
                .into_iter()
                .map(|key| {
                    let source = std::io::Error::other("connection refused");
                    Err(VolumeError::Io { volume: VOLUME, operation, key, source })
                })
                .collect(),
        }
    }
}

impl Volume for Faulty {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.memory.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys = requests.iter().map(|request| request.key).collect();
        self.results("get", keys, || self.memory.get(requests, deadline))
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys = requests.iter().map(|request| request.key).collect();
        self.results("put", keys, || self.memory.put(requests, deadline))
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.results("exists", keys.to_vec(), || self.memory.exists(keys, deadline))
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.results("delete", keys.to_vec(), || self.memory.delete(keys, deadline))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        self.memory.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.memory.used_bytes()
    }
}
