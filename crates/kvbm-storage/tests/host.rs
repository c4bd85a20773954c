//! Host memory: alignment, huge pages, page-locking and its failures, disjoint access by several
//! threads.

use std::sync::Arc;

use kvbm_device::{Device, DeviceError, EmulatedConfig, EmulatedDevice};
use kvbm_storage::{
    Backing, HugePages, NumaPlacement, PageSize, PinFallback, PinState, PinnedStorage, Storage, StorageError,
    StorageExt, StorageKind, SystemStorage,
};

#[test]
fn memory_is_zeroed_and_aligned() {
    for alignment in [1, 4096, 65_536, 1 << 21] {
        let storage = SystemStorage::new(10_000, alignment, HugePages::No).expect("memory");
        assert!(storage.address().is_multiple_of(alignment.max(4096)), "{alignment}");
        let mut bytes = vec![1; 10_000];
        // SAFETY: the test alone touches these bytes now.
        unsafe { storage.read_at(0, &mut bytes) }.expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!((storage.kind(), storage.pages()), (StorageKind::System, &PageSize::Base));
    }
}

#[test]
#[cfg_attr(miri, ignore = "an allocation too large for the host ends the interpreter")]
fn requests_are_checked() {
    let refused = SystemStorage::new(1 << 62, 4096, HugePages::No).expect_err("too much");
    assert!(matches!(refused, StorageError::OutOfMemory { .. }), "{refused}");
    let refused = SystemStorage::new(4096, 1 << 31, HugePages::No).expect_err("too aligned");
    assert!(matches!(refused, StorageError::Invalid { what: "alignment", .. }), "{refused}");
}

#[test]
#[cfg_attr(miri, ignore = "madvise and huge pages do not exist there")]
fn huge_pages_are_given_or_the_fallback_is_reported() {
    let storage = SystemStorage::new(5 << 20, 4096, HugePages::Try).expect("memory");
    // SAFETY: the test alone touches these bytes now.
    unsafe { storage.write_at((5 << 20) - 1, &[1]) }.expect("inside");
    assert!(storage.address().is_multiple_of(2 << 20), "both kinds of huge pages need the alignment");
    match (storage.pages(), SystemStorage::new(5 << 20, 4096, HugePages::Require)) {
        (PageSize::Huge, _) => {}
        (PageSize::Transparent { reason } | PageSize::Fallback { reason }, Err(error)) => {
            assert!(!reason.is_empty());
            assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
        }
        (pages, required) => panic!("huge pages were asked for: {pages:?}, {required:?}"),
    }
}

fn device() -> EmulatedDevice {
    let config = EmulatedConfig { memory_bytes: 1 << 20, ..EmulatedConfig::default() };
    EmulatedDevice::new(config).expect("address space")
}

#[test]
#[cfg_attr(miri, ignore = "mlock and the emulated device's memfd do not exist there")]
fn pinned_memory_is_unpinned_when_dropped() {
    let device = device();
    let pin =
        || PinnedStorage::new(&device, 65_536, 4096, HugePages::No, PinFallback::Error).expect("memory");
    let storage = pin();
    assert_eq!((storage.kind(), storage.state()), (StorageKind::Pinned, PinState::Pinned));
    assert_eq!(storage.placement(), &NumaPlacement::Anywhere, "the emulated device has no node");
    let region = storage.region().clone();
    let twice = device.register_host(region.clone());
    assert!(matches!(twice, Err(DeviceError::AlreadyPinned { .. })));
    drop(storage);
    assert!(device.register_host(region).is_ok(), "dropped: not registered, and the region still lives");
    assert_eq!(pin().state(), PinState::Pinned);
}

#[test]
#[cfg_attr(miri, ignore = "mlock and the emulated device's memfd do not exist there")]
fn page_locking_reports_its_progress() {
    static DONE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let tell = |done, total| {
        assert_eq!(total, 65_536);
        DONE.fetch_max(done, std::sync::atomic::Ordering::Relaxed);
    };
    let pinned =
        PinnedStorage::with_progress(&device(), 65_536, 4096, HugePages::No, PinFallback::Error, tell);
    assert_eq!(pinned.expect("memory").state(), PinState::Pinned);
    assert_eq!(DONE.load(std::sync::atomic::Ordering::Relaxed), 65_536);
}

#[test]
#[cfg_attr(miri, ignore = "mlock and the emulated device's memfd do not exist there")]
fn without_enough_lockable_memory_it_fails_or_says_so() {
    let device = device();
    let limit = DeviceError::PinLimit { asked: 65_536, limit: 8192 };
    device.faults().fail_pins(2, 8192);
    let refused = PinnedStorage::new(&device, 65_536, 4096, HugePages::No, PinFallback::Error);
    assert_eq!(refused.err(), Some(StorageError::Device(limit.clone())));
    let unpinned =
        PinnedStorage::new(&device, 65_536, 4096, HugePages::No, PinFallback::Unpinned).expect("memory");
    assert_eq!(unpinned.state(), PinState::Unpinned { reason: limit });
    assert_eq!(unpinned.kind(), StorageKind::System, "it is what it is");
    // SAFETY: the test alone touches these bytes now.
    unsafe { unpinned.write_at(0, &[1]) }.expect("usable all the same");
}

#[test]
fn threads_write_disjoint_blocks() {
    const BLOCK: u64 = 4096;
    let storage: Arc<dyn Storage> =
        Arc::new(SystemStorage::new(8 * BLOCK, 4096, HugePages::No).expect("memory"));
    std::thread::scope(|scope| {
        for block in 0..8_u8 {
            let storage = &storage;
            scope.spawn(move || {
                let Backing::Host(region) = storage.backing() else { panic!("host memory") };
                let bytes = [block + 1; BLOCK as usize];
                // SAFETY: each thread has a block of its own.
                unsafe { region.write_at(u64::from(block) * BLOCK, &bytes) }.expect("inside");
            });
        }
    });
    for block in 0..8_u8 {
        let mut bytes = [0; BLOCK as usize];
        // SAFETY: the test alone touches these bytes now.
        unsafe { storage.read_at(u64::from(block) * BLOCK, &mut bytes) }.expect("inside");
        assert!(bytes.iter().all(|byte| *byte == block + 1), "block {block}");
    }
}
