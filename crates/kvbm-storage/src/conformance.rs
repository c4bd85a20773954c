//! What every [`StorageAllocator`] and its [`Storage`] must do, as checks that any implementation
//! can run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{CopyBatch, Device, Direction, HostBuffer};
use kvbm_layout::{AxisOrder, BlockLayout, DType, FullyContiguous, LayoutConfig};

use crate::{Backing, BoundLayout, Storage, StorageAllocator, StorageError, StorageExt};

/// Runs all checks. `device` is the device whose memory is allocated; other storages need none.
///
/// # Panics
/// If a check fails.
pub fn run(allocator: &dyn StorageAllocator, device: Option<&Arc<dyn Device>>) {
    describes_itself(allocator);
    keeps_bytes(allocator, device);
    refuses_bad_requests(allocator);
    outlives_its_allocator_calls(allocator, device);
    binds_layouts(allocator, device);
}

fn describes_itself(allocator: &dyn StorageAllocator) {
    for (len, alignment) in [(1, 1), (4095, 512), (4096, 4096), (100_000, 65536)] {
        let storage = allocate(allocator, len, alignment);
        assert_eq!(storage.len(), len, "a storage is as long as was asked");
        assert!(!storage.is_empty());
        assert!(storage.alignment().is_power_of_two() && storage.alignment() >= alignment);
        assert!(
            storage.address().is_multiple_of(alignment),
            "{:#x} is not aligned to {alignment}",
            storage.address()
        );
        let has_device = matches!(storage.backing(), Backing::Device(_));
        assert_eq!(storage.device().is_some(), has_device, "device memory, and only that, names its device");
    }
}

fn keeps_bytes(allocator: &dyn StorageAllocator, device: Option<&Arc<dyn Device>>) {
    let one = allocate(allocator, 70_000, 4096);
    let two = allocate(allocator, 70_000, 4096);
    let (mut expected_one, mut expected_two) = (vec![0x11; 70_000], vec![0x22; 70_000]);
    write(&*one, device, 0, &expected_one);
    write(&*two, device, 0, &expected_two);
    for (round, offset) in (1_u8..).zip([0_u64, 1, 4095, 4096, 65_537, 69_000]) {
        let bytes: Vec<u8> = (0..1000_u32).map(|index| (index as u8).wrapping_mul(round) ^ 0x5a).collect();
        write(&*one, device, offset, &bytes);
        expected_one[offset as usize..][..1000].copy_from_slice(&bytes);
        write(&*two, device, 69_000 - offset, &bytes[..500]);
        expected_two[69_000 - offset as usize..][..500].copy_from_slice(&bytes[..500]);
    }
    assert!(read(&*one, device, 0, 70_000) == expected_one, "bytes changed");
    assert!(read(&*two, device, 0, 70_000) == expected_two, "two storages share bytes, or bytes changed");
    assert!(read(&*one, device, 69_999, 1) == expected_one[69_999..], "the last byte is addressable");
}

fn refuses_bad_requests(allocator: &dyn StorageAllocator) {
    for (len, alignment) in [(0, 4096), (u64::MAX, 1), (4096, 0), (4096, 3)] {
        assert!(allocator.allocate(len, alignment).is_err(), "{len} bytes aligned to {alignment} were given");
    }
    let storage = allocate(allocator, 4096, 1);
    let mut byte = [0];
    for offset in [4096, u64::MAX] {
        // SAFETY: nobody else touches the storage of this check.
        let read = unsafe { storage.read_at(offset, &mut byte) };
        assert!(matches!(read, Err(StorageError::OutOfRange { .. })), "read at {offset}: {read:?}");
        // SAFETY: nobody else touches the storage of this check.
        let written = unsafe { storage.write_at(offset, &byte) };
        assert!(matches!(written, Err(StorageError::OutOfRange { .. })), "write at {offset}: {written:?}");
    }
    if matches!(storage.backing(), Backing::Device(_)) {
        // SAFETY: nobody else touches the storage of this check.
        let refused = unsafe { storage.read_at(0, &mut byte) };
        assert!(matches!(refused, Err(StorageError::NotHostAccessible { .. })), "{refused:?}");
    }
}

/// Memory taken out of a storage keeps it alive.
fn outlives_its_allocator_calls(allocator: &dyn StorageAllocator, device: Option<&Arc<dyn Device>>) {
    let storage = allocate(allocator, 4096, 4096);
    write(&*storage, device, 0, &[7; 4096]);
    let mut bytes = vec![0; 4096];
    match storage.backing() {
        Backing::Host(region) => {
            let region = region.clone();
            drop(storage);
            // SAFETY: nobody else touches the storage of this check.
            unsafe { region.read_at(0, &mut bytes) }.expect("inside");
        }
        Backing::Device(memory) => {
            let memory = memory.clone();
            drop(storage);
            bytes = download(device, &memory, 0, 4096);
        }
        Backing::File(file) => {
            let file = file.clone();
            drop(storage);
            // SAFETY: nobody else touches the storage of this check.
            unsafe { file.read_at(0, &mut bytes) }.expect("inside");
        }
    }
    assert_eq!(bytes, [7; 4096]);
}

fn binds_layouts(allocator: &dyn StorageAllocator, device: Option<&Arc<dyn Device>>) {
    let layout = small_layout();
    let bound = BoundLayout::allocate(Arc::clone(&layout), allocator).expect("a small layout fits");
    let (payload, blocks) = (bound.bytes_per_block(), bound.num_blocks());
    let bytes_of =
        |block: u32| -> Vec<u8> { (0..payload).map(|at| (at as u8) ^ (block as u8 + 1)).collect() };
    let storage = &bound.bindings()[0].storage;
    for block in 0..blocks {
        let fragments = bound.block_fragments(block).expect("there is such a block");
        assert_eq!(fragments.iter().map(|fragment| fragment.len).sum::<u64>(), payload);
        write(&**storage, device, fragments[0].offset, &bytes_of(block));
    }
    for block in 0..blocks {
        let offset = bound.block_fragments(block).expect("there is such a block")[0].offset;
        assert!(read(&**storage, device, offset, payload) == bytes_of(block), "block {block}");
        if !matches!(storage.backing(), Backing::Device(_)) {
            let mut bytes = vec![0; payload as usize];
            // SAFETY: nobody else touches the storage of this check.
            unsafe { bound.read_block(block, &mut bytes) }.expect("the host can read it");
            assert!(bytes == bytes_of(block), "block {block}");
        }
    }
    assert!(bound.block_fragments(blocks).is_err());
}

fn small_layout() -> Arc<dyn BlockLayout> {
    let config = LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .outer_dim(2)
        .page_size(4)
        .inner_dim(24)
        .num_heads(3)
        .dtype(DType::BF16)
        .alignment(512)
        .build()
        .expect("a valid shape");
    Arc::new(FullyContiguous::new(config, AxisOrder::Nhd).expect("a valid layout"))
}

fn allocate(allocator: &dyn StorageAllocator, len: u64, alignment: u64) -> Arc<dyn Storage> {
    allocator.allocate(len, alignment).expect("a small storage can be had")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn write(storage: &dyn Storage, device: Option<&Arc<dyn Device>>, offset: u64, bytes: &[u8]) {
    let Backing::Device(memory) = storage.backing() else {
        // SAFETY: nobody else touches the storage of this check.
        return unsafe { storage.write_at(offset, bytes) }.expect("the host can write it");
    };
    let stream =
        device.expect("device memory needs its device").create_stream("conformance").expect("a stream");
    let host = HostBuffer::from_bytes(bytes);
    let mut batch = CopyBatch::new(Direction::HostToDevice);
    batch.push_host_to_device(&host, 0, memory, offset, host.len()).expect("inside");
    stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
}

fn read(storage: &dyn Storage, device: Option<&Arc<dyn Device>>, offset: u64, len: u64) -> Vec<u8> {
    if let Backing::Device(memory) = storage.backing() {
        return download(device, memory, offset, len);
    }
    let mut bytes = vec![0; len as usize];
    // SAFETY: nobody else touches the storage of this check.
    unsafe { storage.read_at(offset, &mut bytes) }.expect("the host can read it");
    bytes
}

fn download(
    device: Option<&Arc<dyn Device>>,
    memory: &kvbm_device::DeviceMemory,
    offset: u64,
    len: u64,
) -> Vec<u8> {
    let stream =
        device.expect("device memory needs its device").create_stream("conformance").expect("a stream");
    let mut host = HostBuffer::zeroed(len as usize);
    let mut batch = CopyBatch::new(Direction::DeviceToHost);
    batch.push_device_to_host(memory, offset, &host, 0, len).expect("inside");
    stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
    host.exclusive_bytes().expect("the copy is over").to_vec()
}
