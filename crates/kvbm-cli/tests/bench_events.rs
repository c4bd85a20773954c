//! `kvbm bench events` where there is no nats-server: said, and the rest is measured.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::Command;

#[test]
fn without_a_server_its_rows_say_so_and_the_others_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvbm"))
        .current_dir(dir.path())
        .env("TMPDIR", dir.path())
        .args("bench events --events 100000 --rounds 1 --nats-server none --json rows.json".split(' '))
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("there is no nats-server at none"), "{stderr}");
    let json: Value = serde_json::from_slice(&std::fs::read(dir.path().join("rows.json")).unwrap()).unwrap();
    let row = |name: &str| {
        json["rows"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["name"] == name)
            .unwrap_or_else(|| panic!("{name}: {json:#}"))
    };
    for name in ["nats_core", "jetstream_file"] {
        assert!(row(name)["error"].is_string() && row(name).get("events_per_s").is_none(), "{json:#}");
    }
    assert!(row("zmq")["events_per_s"].as_f64().unwrap() > 0.0 && row("zmq")["missing"] == 0, "{json:#}");
    assert!(row("zmq")["bytes_per_event"].as_f64().unwrap() <= 100.0, "{json:#}");
    for cost in ["publisher_cost", "noting_cost", "noting_cost_vllm"] {
        assert!(row(cost)["ns_per_event"].is_f64(), "{json:#}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the rows are left");
}
