//! The command as people and scripts meet it: exit status, streams, output.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output, Stdio};

fn kvbm(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbm")).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn wrong_usage_is_status_2_and_goes_to_standard_error() {
    for (words, hint) in [
        (&["replai"][..], "unrecognized subcommand 'replai'"),
        (&["replay", "--capacty", "5"], "'--capacity'"),
        (&["replay", "--capacity", "1,2,3,4"], "--volume URI"),
        (&["layout", "explain", "--copy-heads", "0..1"], "--to"),
        (&["layout", "explain", "--alignment", "3"], "layout config: alignment = 3"),
        (&["replay", "--block-bytes", "1000"], "not a multiple of 512"),
        (&["replay", "--capacity", "268435456"], "device.capacity"),
        (
            &["bench", "transfer", "--verify-every", "-1"],
            "'-1' for '--verify-every <N>': give a whole number",
        ),
        (&["bench", "transfer", "--sizes", "-1"], "'-1' is not a size"),
        (&["bench", "transfer", "--sizes", "5000"], "--sizes 5000B"),
        (&["bench", "transfer", "--sizes", "4096", "--set", "1000TiB"], "blocks are too many"),
        #[cfg(feature = "zmq")]
        (
            &["events", "serve-index", "zmq+tcp://127.0.0.1:1", "--listen", "0.0.0.0:0"],
            "allow it with --public",
        ),
        #[cfg(feature = "zmq")]
        (&["events", "tail", "zmq+tcp://127.0.0.1:1", "--count", "0"], "from 1 to"),
        #[cfg(not(feature = "zmq"))]
        (&["events", "tail", "zmq+tcp://127.0.0.1:1"], "`cargo run --release --features zmq -- ...`"),
        #[cfg(not(feature = "nats"))]
        (&["replay", "--events", "nats://127.0.0.1:1"], "`cargo run --release --features nats -- ...`"),
    ] {
        let output = kvbm(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty(), "{words:?}");
        assert!(text(&output.stderr).contains(hint), "{words:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_failure_is_status_1_with_the_thing_named() {
    for (words, hint) in [
        (
            &["replay", "--trace", "no/trace.jsonl"][..],
            "cannot read the trace no/trace.jsonl: No such file or directory (os error 2); name a file",
        ),
        (&["disk", "inspect", "no/folder"], "cannot read no/folder; name what disk.dir names"),
        (&["bench", "transfer", "--dir", "no/folder"], "cannot use no/folder: name a directory with --dir"),
        (&["doctor", "--json", "no/folder/x.json"], "create the directory no/folder first"),
    ] {
        let output = kvbm(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let message = text(&output.stderr);
        assert!(message.starts_with("kvbm: ") && message.contains(hint), "{words:?}: {message}");
    }
}

#[test]
fn whoever_closes_our_output_stops_nothing() {
    let line = "replay --synthetic 20 --capacity 50 --metadata-only --json result.json";
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.args(line.split(' ')).current_dir(dir.path()).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(dir.path().join("result.json").is_file());
}

#[test]
fn output_that_cannot_be_written_is_named() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_kvbm")).args(["layout", "explain"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.contains("cannot write to standard output: No space left on device"), "{message}");
}

#[test]
fn the_doctor_never_fails_for_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let output = kvbm(&["doctor", "--dir", dir]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("CUDA"));

    let output = kvbm(&["doctor", "--dir", "no/such/folder", "--json", "-"]);
    assert_eq!(output.status.code(), Some(0));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(json["findings"].as_array().is_some_and(|findings| findings.len() >= 7), "{json}");
    assert!(text(&output.stderr).contains("no/such/folder: not a directory"));
}

#[test]
fn a_layout_and_its_copy_plan_are_drawn() {
    let line = "layout explain --type layer-separate --layers 3 --to fully-contiguous --to-order universal";
    let output = kvbm(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(0));
    let golden = include_str!("golden/explain_engine_to_universal.txt");
    assert_eq!(text(&output.stdout), golden, "{}", text(&output.stdout));
}

#[test]
fn help_names_every_command() {
    let help = text(&kvbm(&["--help"]).stdout);
    for command in ["replay", "bench", "doctor", "layout", "remote", "worker", "Exit status"] {
        assert!(help.contains(command), "{help}");
    }
}
