//! The limit of locked memory, met for real. A process of its own, because limits are of the
//! process.
#![cfg(not(miri))] // mlock does not exist there.

use kvbm_device::{Device, DeviceError, EmulatedConfig, EmulatedDevice, HostBuffer};

const LIMIT: u64 = 64 << 10;

/// `CAP_IPC_LOCK` of `linux/capability.h`: who has it may lock without limit.
const CAP_IPC_LOCK: u32 = 14;

/// Takes the capability from this thread, if it has it, and sets the limit of the process.
fn limit_locked_memory() {
    // `struct __user_cap_header_struct` version 3 and two `__user_cap_data_struct` of
    // `linux/capability.h`.
    let mut header = [0x2008_0522_u32, 0];
    let mut data = [0_u32; 6];
    // SAFETY: both point to structures of the size that version 3 has; pid 0 is this thread.
    let read = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), data.as_mut_ptr()) };
    assert_eq!(read, 0, "{}", std::io::Error::last_os_error());
    data[0] &= !(1 << CAP_IPC_LOCK);
    // SAFETY: as above; the kernel only reads.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), data.as_ptr()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: `limit` is a valid structure.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn the_limit_of_locked_memory_is_reported() {
    limit_locked_memory();
    let config = EmulatedConfig { memory_bytes: 1 << 20, ..EmulatedConfig::default() };
    let device = EmulatedDevice::new(config).expect("address space");
    let too_much = HostBuffer::zeroed(1 << 20);
    let refused = device.register_host(too_much.region().clone()).expect_err("a mebibyte");
    assert_eq!(refused, DeviceError::PinLimit { asked: 1 << 20, limit: LIMIT });
    let enough = HostBuffer::zeroed(16 << 10);
    let pinned = device.register_host(enough.region().clone()).expect("within the limit");
    drop(pinned);
    let again = (0..8).map(|_| device.register_host(enough.region().clone()).map(drop));
    assert!(again.into_iter().all(|pinned| pinned.is_ok()), "unregistering unlocks");
    assert!(
        device.register_host(too_much.slice(0, 4096).expect("inside")).is_ok(),
        "a refusal leaves nothing"
    );
}
