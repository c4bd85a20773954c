//! Device memory, ours and the engine's.
#![cfg(not(miri))] // the emulated device's memfd does not exist there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{Device, DeviceError, EmulatedConfig, EmulatedDevice};
use kvbm_storage::{DeviceId, DeviceStorage, Owner, Storage, StorageError, StorageKind};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn device() -> Arc<dyn Device> {
    let config = EmulatedConfig { memory_bytes: 1 << 20, id: DeviceId(3), ..EmulatedConfig::default() };
    Arc::new(EmulatedDevice::new(config).expect("address space"))
}

#[test]
fn owned_memory_comes_and_goes() {
    let device = device();
    let storage = DeviceStorage::new(&*device, 4096, 4096).expect("memory");
    assert_eq!(
        (storage.kind(), storage.device(), storage.is_external()),
        (StorageKind::Device, Some(DeviceId(3)), false)
    );
    let stream = device.create_stream("s").expect("stream");
    storage.upload(&*stream, 100, b"keys", soon()).expect("copied");
    assert_eq!(storage.download(&*stream, 99, 5, soon()).expect("copied")[1..], *b"keys");
    assert!(matches!(storage.upload(&*stream, 4093, b"keys", soon()), Err(StorageError::OutOfRange { .. })));
    assert_eq!(device.info().free_bytes, (1 << 20) - 4096);
    drop(storage);
    assert_eq!(device.info().free_bytes, 1 << 20);
    let refused = DeviceStorage::new(&*device, 2 << 20, 256).expect_err("more than there is");
    assert!(matches!(refused, StorageError::Device(DeviceError::OutOfMemory { .. })), "{refused}");
}

#[test]
fn engine_memory_is_used_and_never_freed() {
    let device = device();
    let stream = device.create_stream("s").expect("stream");
    let engine = device.allocate(65_536, 4096).expect("memory");
    let owner: Owner = Arc::new(engine.clone());
    let weak = Arc::downgrade(&owner);
    // SAFETY: `engine` lives until the end of the test.
    let storage = unsafe { DeviceStorage::from_external(engine.address() + 512, 1024, &*device, owner) };
    let storage = storage.expect("registered");
    assert!(storage.is_external());
    assert_eq!((storage.len(), storage.alignment()), (1024, 512));
    storage.upload(&*stream, 0, &[5; 1024], soon()).expect("copied");
    let free = device.info().free_bytes;
    let kept = storage.memory().clone();
    drop(storage);
    assert!(weak.upgrade().is_some(), "work on the memory may be under way");
    drop(kept);
    assert!(weak.upgrade().is_none() && device.info().free_bytes == free);
    let nobody = || -> Owner { Arc::new(()) };
    // SAFETY: as above.
    let whole = unsafe { DeviceStorage::from_external(engine.address(), 65_536, &*device, nobody()) };
    let bytes = whole.expect("registered").download(&*stream, 512, 1024, soon()).expect("copied");
    assert_eq!(bytes, [5; 1024]);
    // SAFETY: refused; nothing is done with it.
    let beyond = unsafe { DeviceStorage::from_external(engine.address() + 512, 65_536, &*device, nobody()) };
    assert!(matches!(beyond, Err(StorageError::Device(DeviceError::UnknownMemory { .. }))), "{beyond:?}");
}
