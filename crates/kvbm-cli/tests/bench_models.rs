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

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"))
}

/// The figures of a busy machine say little; what was decided does not depend on it.
#[test]
fn a_slow_disk_is_left_alone_and_a_stalled_one_is_not_waited_for() {
    let words = ["--requests", "5", "--blocks", "64", "--compute-us", "1000", "--stall-ms", "6000"];
    let rows = rows(&[&["bench", "loads"][..], &words].concat());
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["faster", "slower", "stall"]);
    assert_eq!((number(&rows[0], "loaded"), number(&rows[0], "left_out")), (320.0, 0.0));
    assert!(number(&rows[0], "ratio") < 0.9, "{}", rows[0]);
    assert_eq!(number(&rows[1], "left_out"), 256.0, "all but the first: {}", rows[1]);
    assert!(number(&rows[2], "longest_wait_ms") < 5000.0, "{}", rows[2]);
}

/// Four fifths are hidden where the machine is free; half where it is not.
#[test]
fn computing_hides_copies() {
    let words = ["--layers", "8", "--blocks", "2", "--link-mb-per-s", "4", "--rounds", "1"];
    let rows = rows(&[&["bench", "layers"][..], &words].concat());
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["save", "load"]);
    for row in &rows {
        assert_eq!(number(row, "steps"), 8.0);
        assert!(number(row, "hidden") > 0.5, "{row}");
    }
}
