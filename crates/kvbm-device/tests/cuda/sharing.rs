//! Device memory that two processes share, by each kind of handle.

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

use kvbm_device::{
    CopyBatch, CudaDevice, Device, DeviceError, DeviceMemory, Direction, HostBuffer, SharedMemory, SharedVia,
};
use kvbm_test_driver::TestDriver;

use crate::library::open_device;
use crate::soon;

const LEN: u64 = 12_000;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &str) -> [u8; 64] {
    std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal"))
}

fn copy(device: &CudaDevice, memory: &DeviceMemory, host: &HostBuffer, direction: Direction) {
    let mut batch = CopyBatch::new(direction);
    match direction {
        Direction::HostToDevice => batch.push_host_to_device(host, 0, memory, 0, memory.len()),
        _ => batch.push_device_to_host(memory, 0, host, 0, memory.len()),
    }
    .expect("fits");
    let stream = device.create_stream("shared").expect("a stream");
    stream.copy(batch).expect("queued").wait(soon()).expect("the copy completes");
}

/// The other process: opens what its environment describes, adds one to each byte. Without that
/// there is nothing to do.
#[test]
fn the_other_process() {
    if std::env::var_os("SHARED_HANDLE").is_none() {
        return;
    }
    let variable =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by another test"));
    let number = |name: &str| variable(name).parse::<u64>().expect("a number");
    let driver = kvbm_device::CudaDriver::open().expect("the driver that was named");
    let device = CudaDevice::open(&driver, kvbm_device::DeviceId(0)).expect("a device");
    let handle = variable("SHARED_HANDLE");
    let via = match variable("SHARED_KIND").as_str() {
        "legacy" => SharedVia::Legacy(unhex(&handle)),
        "fabric" => SharedVia::Fabric(unhex(&handle)),
        // As if it had come over a Unix socket.
        _ => SharedVia::Descriptor(
            File::options().read(true).write(true).open(handle).expect("it is open").into(),
        ),
    };
    let whole = number("SHARED_WHOLE");
    let shared = SharedMemory { via, whole, offset: number("SHARED_OFFSET"), len: LEN };
    // SAFETY: the other process waits for this one.
    let memory = unsafe { device.open_shared(&shared) }.expect("opened");
    assert!(memory.is_external());
    let mut host = HostBuffer::zeroed(LEN as usize);
    copy(&device, &memory, &host, Direction::DeviceToHost);
    let more: Vec<u8> = host
        .exclusive_bytes()
        .expect("the work is over")
        .to_vec()
        .iter()
        .map(|byte| byte.wrapping_add(1))
        .collect();
    copy(&device, &memory, &HostBuffer::from_bytes(&more), Direction::HostToDevice);

    let beyond = SharedMemory { offset: whole - LEN + 1, ..shared };
    // SAFETY: it is refused.
    let error = unsafe { device.open_shared(&beyond) }.unwrap_err();
    assert!(matches!(error, DeviceError::OutOfRange { .. }), "{error}");
}

#[test]
fn processes_share_memory_by_the_handle_that_it_has() {
    let Some(library) = TestDriver::new() else { return };
    let device = open_device(&library);
    for kind in ["legacy", "descriptor", "fabric"] {
        let whole = match kind {
            "legacy" => device.allocate(3 * LEN, 256),
            other => device.allocate_shareable(3 * LEN, other == "fabric"),
        }
        .expect("memory");
        let part = whole.slice(LEN, LEN).expect("inside");
        let pattern: Vec<u8> = (0..LEN).map(|at| ((at * 13) >> 2) as u8).collect();
        copy(&device, &part, &HostBuffer::from_bytes(&pattern), Direction::HostToDevice);
        let shared = device.share(&part).expect("shared");
        assert_eq!((shared.offset, shared.len), (LEN, LEN), "{kind}");
        let handle = match &shared.via {
            SharedVia::Legacy(bytes) if kind == "legacy" => hex(bytes),
            SharedVia::Fabric(bytes) if kind == "fabric" => hex(bytes),
            SharedVia::Descriptor(file) if kind == "descriptor" => {
                format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
            }
            other => panic!("{kind}: {other:?}"),
        };
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "sharing::the_other_process"])
            .env("KVBM_CUDA_DRIVER", library.path())
            .env("SHARED_KIND", kind)
            .env("SHARED_HANDLE", handle)
            .env("SHARED_WHOLE", shared.whole.to_string())
            .env("SHARED_OFFSET", shared.offset.to_string())
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{kind}: {}", String::from_utf8_lossy(&output.stdout));
        let mut back = HostBuffer::zeroed(LEN as usize);
        copy(&device, &part, &back, Direction::DeviceToHost);
        assert!(
            back.exclusive_bytes()
                .expect("the work is over")
                .to_vec()
                .iter()
                .zip(&pattern)
                .all(|(now, was)| *now == was.wrapping_add(1)),
            "{kind}"
        );
    }
    drop(device);
    library.assert_nothing_is_left();
}

#[test]
fn what_cannot_be_shared_says_why() {
    let Some(library) = TestDriver::new() else { return };
    library.no_fabric();
    let device = open_device(&library);
    let error = device.allocate_shareable(LEN, true).unwrap_err();
    assert!(error.to_string().contains("fabric"), "{error}");
    let error = device.allocate_shareable(0, false).unwrap_err();
    assert!(matches!(error, DeviceError::Invalid { .. }), "{error}");
    let memory = device.allocate(LEN, 256).expect("memory");
    let shared = device.share(&memory).expect("shared");
    // SAFETY: the driver refuses: this process has the memory.
    let error = unsafe { device.open_shared(&shared) }.unwrap_err().to_string();
    assert!(error.contains("cuIpcOpenMemHandle returned CUDA_ERROR_INVALID_CONTEXT"), "{error}");
    // Every step of making such memory may fail, and leaves nothing behind.
    for call in [
        c"cuMemGetAllocationGranularity",
        c"cuMemCreate",
        c"cuMemAddressReserve",
        c"cuMemMap",
        c"cuMemSetAccess",
    ] {
        library.fail(call, 999, 0);
        let error = device.allocate_shareable(LEN, false).unwrap_err().to_string();
        assert!(
            error.contains(&format!("{} returned CUDA_ERROR_UNKNOWN", call.to_string_lossy())),
            "{error}"
        );
    }
    drop((memory, device));
    library.assert_nothing_is_left();
}
