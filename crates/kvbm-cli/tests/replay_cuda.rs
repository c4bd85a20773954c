//! The replay on a CUDA device whose driver is the test driver: the code that runs on a GPU, every block compared.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

use kvbm_test_driver::TestDriver;
use serde_json::Value;

fn replay(driver: &Path, dir: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.current_dir(dir).env("TMPDIR", dir).env("KVBM_CUDA_DRIVER", driver);
    command.arg("replay").args(line.split_whitespace()).output().unwrap()
}

#[test]
fn every_block_comes_back_from_a_cuda_device_as_it_was() {
    let Some(driver) = TestDriver::library() else { return };
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "--device cuda --synthetic 60 --capacity 40,120,600 --block-bytes 16KiB --json -",
        "--device cuda:1 --synthetic 60 --capacity 40,120,0 --concurrency 4 --offload drop --json -",
    ] {
        let output = replay(&driver, dir.path(), line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{line}: {errors}");
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |field: &str| json.pointer(field).and_then(Value::as_u64).unwrap();
        assert_eq!((number("/corrupt_blocks"), number("/failed_transfers")), (0, 0), "{line}");
        assert!(number("/verified_blocks") > 100 && number("/hits/g2") > 0, "{line}: {json:#}");
    }
}

#[test]
fn what_is_missing_is_named_and_nothing_takes_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let line = "--device cuda --synthetic 3 --capacity 40,0,0";
    let output = replay(Path::new("/no/such/libcuda.so.1"), dir.path(), line);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    for part in ["device.kind = \"cuda\"", "/no/such/libcuda.so.1", "KVBM_CUDA_DRIVER", "emulated device"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let Some(driver) = TestDriver::library() else { return };
    let output = replay(&driver, dir.path(), "--device cuda:7 --synthetic 3 --capacity 40,0,0");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("there is no CUDA device 7") && text.contains("there are 2"), "{text}");
    let output =
        replay(&driver, dir.path(), "--device cuda --synthetic 3 --block-bytes 1MiB --capacity 9000,0,0");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("out of memory") && text.contains("memory of G1"), "{text}");
}
