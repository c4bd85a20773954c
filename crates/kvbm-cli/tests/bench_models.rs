//! The benchmarks that model a disk, a link and an engine, in their short form.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::Command;

fn rows(words: &[&str]) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_kvbm")).args(words).args(["--json", "-"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    json["rows"].as_array().unwrap().clone()
}

fn count(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("{name} of {row}"))
}

/// The figures of a busy machine say little; what was decided does not depend on it.
#[test]
fn a_slow_disk_is_left_alone_and_a_stalled_one_is_not_waited_for() {
    let words = ["--requests", "5", "--blocks", "64", "--compute-us", "1000", "--stall-ms", "6000"];
    let rows = rows(&[&["bench", "loads"][..], &words].concat());
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["faster", "slower", "stall"]);
    assert_eq!((count(&rows[0], "loaded"), count(&rows[0], "left_out")), (320, 0));
    assert_eq!(count(&rows[1], "left_out"), 256, "all but the first: {}", rows[1]);
    let waited = rows[2]["longest_wait_ms"].as_f64().unwrap();
    assert!(waited < 6000.0, "no request waits for the stalled disk: {}", rows[2]);
}

#[test]
fn copies_go_layer_by_layer_both_ways() {
    let words = ["--layers", "8", "--blocks", "2", "--link-mb-per-s", "4", "--rounds", "1"];
    let rows = rows(&[&["bench", "layers"][..], &words].concat());
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["save", "load"]);
    for row in &rows {
        assert_eq!(count(row, "steps"), 8, "{row}");
        assert!(row["hidden"].is_number(), "{row}");
    }
}

/// Mutation that makes it fail: the planes of a block are not told apart.
#[cfg(feature = "compress")]
#[test]
fn compression_is_measured_on_planes_and_on_blocks_as_they_are() {
    let rows = rows(&[
        "bench",
        "compression",
        "--rounds",
        "1",
        "--block-bytes",
        "1048576",
        "--link-mb-per-s",
        "1000000",
    ]);
    let find = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    let ratio = |name: &str| find(name)["ratio"].as_f64().unwrap();
    assert!(ratio("zstd 1 planes") > 1.3 && ratio("zstd 1 planes") > 1.1 * ratio("zstd 1 as is"));
    assert!(find("zstd 1 planes")["made_up"] == true && rows.len() == 10 + 6 + 1);
    // A scale for 32 codes; normally distributed numbers become what is nearest.
    for (name, kept, mean) in [("fp8_e4m3", 33, 0.03), ("int8", 33, 0.01), ("int4", 17, 0.2)] {
        assert!((ratio(name) - 64.0 / f64::from(kept)).abs() < 0.01, "{name}: {}", ratio(name));
        let error = |which: &str| find(name)[which].as_f64().unwrap();
        assert!((mean / 4.0..mean).contains(&error("mean_error")), "{name}: {}", error("mean_error"));
        assert!(error("largest_error") < mean * 4.0, "{name}: {}", error("largest_error"));
        assert!(ratio(&format!("{name}, zstd 1")) >= ratio(name));
    }
    // No core compresses as fast as memory copies.
    let link = find("link");
    assert!(
        link["auto_compresses"] == false && link["write_gb_per_s"].as_array().unwrap().len() == 3,
        "{link}"
    );
}
