//! Every storage against the conformance suite.

use std::sync::Arc;

use kvbm_device::{Device, EmulatedConfig, EmulatedDevice};
use kvbm_storage::{
    DeviceAllocator, DiskAllocator, HugePages, PinFallback, PinnedAllocator, SystemAllocator, conformance,
};

fn device() -> Arc<dyn Device> {
    let config = EmulatedConfig { memory_bytes: 16 << 20, ..EmulatedConfig::default() };
    Arc::new(EmulatedDevice::new(config).expect("address space"))
}

#[test]
fn system_storage_conforms() {
    conformance::run(&SystemAllocator::default(), None);
}

#[test]
#[cfg_attr(miri, ignore = "madvise and huge pages do not exist there")]
fn system_storage_with_huge_pages_conforms() {
    conformance::run(&SystemAllocator { huge_pages: HugePages::Try }, None);
}

#[test]
#[cfg_attr(miri, ignore = "mlock and the emulated device's memfd do not exist there")]
fn pinned_storage_conforms() {
    let mut allocator = PinnedAllocator::new(device());
    allocator.fallback = PinFallback::Unpinned;
    conformance::run(&allocator, None);
}

#[test]
#[cfg_attr(miri, ignore = "the emulated device's memfd does not exist there")]
fn device_storage_conforms() {
    let device = device();
    conformance::run(&DeviceAllocator::new(Arc::clone(&device)), Some(&device));
}

#[test]
#[cfg_attr(miri, ignore = "fallocate and statvfs do not exist there")]
fn disk_storage_conforms() {
    let directory = tempfile::tempdir().expect("a directory");
    conformance::run(&DiskAllocator::new(directory.path(), "conformance"), None);
}
