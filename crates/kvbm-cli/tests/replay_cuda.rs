//! The replay on a CUDA device whose driver is the test driver: the code that runs on a GPU, every
//! block compared.

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
        // FP8 with scales, a latent on two ranks, windows with scales, states.
        "--device cuda --synthetic 60 --capacity 40,120,600 --block-bytes 16KiB --dtype fp8_e4m3 --scales head \
         --json -",
        "--device cuda --synthetic 60 --capacity 40,120,600 --block-bytes 16KiB --model deepseek-v3 \
         --dtype fp8_e4m3 --tp 2 --json -",
        "--device cuda --synthetic 40 --capacity 300,400,4000 --block-bytes 16KiB --model gemma-3 \
         --checkpoint-every 4 --dtype fp8_e4m3 --scales token:f16 --json -",
        "--device cuda --synthetic 40 --capacity 300,400,4000 --block-bytes 16KiB --model jamba \
         --checkpoint-every 4 --json -",
    ] {
        let output = replay(&driver, dir.path(), line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{line}: {errors}");
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |field: &str| json.pointer(field).and_then(Value::as_u64).unwrap();
        assert_eq!((number("/corrupt_blocks"), number("/failed_transfers")), (0, 0), "{line}");
        let hits: u64 = ["/hits/g1", "/hits/g2", "/hits/g3"].into_iter().map(number).sum();
        // Of several cache groups a block of a prefix has several parts, or none outside a window.
        let groups = line.contains("--checkpoint-every");
        let verified = number("/verified_blocks");
        assert!(if groups { verified > 0 } else { verified == hits }, "{line}: {json:#}");
        // How many offloads keep up where they may be dropped is the machine's business.
        let keeps_up = !line.contains("drop");
        assert!(!keeps_up || hits > 100 && number("/hits/g2") > 0, "{line}: {json:#}");
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

#[test]
fn the_doctor_shows_what_a_device_offers_and_what_is_missing() {
    let doctor = |driver: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
        let output =
            command.args(["doctor", "--json", "-"]).env("KVBM_CUDA_DRIVER", driver).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        json["findings"].as_array().unwrap().clone()
    };
    let of = |findings: &[Value], name: &str| -> Vec<String> {
        let named = findings.iter().filter(|finding| finding["name"] == name);
        named.map(|finding| format!("{} {}", finding["status"].as_str().unwrap(), finding["found"])).collect()
    };
    let findings = doctor(Path::new("/no/such/libcuda.so.1"));
    assert!(
        of(&findings, "CUDA")[0].starts_with("missing \"no CUDA driver: /no/such/libcuda.so.1"),
        "{findings:?}"
    );
    assert!(of(&findings, "GPU").is_empty());

    let Some(driver) = TestDriver::library() else { return };
    let findings = doctor(&driver);
    for (name, count, part) in [
        ("CUDA", 1, "driver for CUDA 12.8, 2 devices"),
        ("GPU", 2, "compute capability 9.0"),
        ("GPU kernels", 2, "machine code for sm_90"),
        ("GPU batch copies", 1, "cuMemcpyBatchAsync"),
        ("GPU copies", 2, "measured, by fragment size: to host memory 2 KiB "),
        ("page-locking", 2, "GB/s"),
        ("GPUDirect Storage", 1, "nvidia_fs"),
    ] {
        let found = of(&findings, name);
        assert!(found.len() == count && found.iter().all(|text| text.contains(part)), "{name}: {found:?}");
    }
}
