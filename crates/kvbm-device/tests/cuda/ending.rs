//! A process that ends while threads are in the driver.

use std::process::{Command, ExitStatus};
use std::time::Duration;

use kvbm_device::{CudaDevice, CudaDriver, Device, DeviceId};
use kvbm_test_driver::TestDriver;

const ENDS: &str = "KVBM_TEST_PROCESS_ENDS";

/// Mutation that makes it fail: the test driver's state is destroyed when the process ends.
#[test]
fn a_process_may_end_while_its_streams_are_let_go() {
    let Some(library) = TestDriver::library() else { return };
    let ended: ExitStatus = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "ending::the_process_that_ends"])
        .env(CudaDriver::LIBRARY_VARIABLE, library)
        .env(ENDS, "1")
        .stdout(std::process::Stdio::null())
        .status()
        .expect("it starts");
    assert_eq!(ended.code(), Some(7), "{ended}");
}

/// Run by the test above, in a process of its own; nothing on its own.
#[test]
fn the_process_that_ends() {
    if std::env::var_os(ENDS).is_none() {
        return;
    }
    // What is registered first is called last: when whatever the driver does at the end is over,
    // threads go on for a while.
    // SAFETY: the function is one of C and does not unwind.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
    let driver = CudaDriver::open().expect("the driver starts");
    let device = CudaDevice::open(&driver, DeviceId(0)).expect("there is a device");
    let memory = device.allocate(4096, 256).expect("memory");
    let (one_done, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        loop {
            let stream = device.create_stream("short").expect("a stream");
            stream.fill(&memory, 0, 4096, 1).expect("queued");
            let _nobody_asks = one_done.send(());
        }
    });
    done.recv().expect("one was made");
    std::process::exit(7);
}

extern "C" fn linger() {
    std::thread::sleep(Duration::from_millis(200));
}
