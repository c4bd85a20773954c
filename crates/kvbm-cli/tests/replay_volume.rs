//! `kvbm replay` with a volume as G4: a directory, and a real S3 server (`TEST_S3_SERVER` names its
//! program) that dies half-way.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[cfg(feature = "s3")]
#[path = "../../kvbm-events/tests/support/ports.rs"]
mod ports;

use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn replay(dir: &Path, volume: &str, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.current_dir(dir).env("TMPDIR", dir);
    command.args(["replay", "--block-bytes", "16KiB", "--json", "-", "--volume", volume]);
    command.args(line.split_whitespace());
    command
}

fn json(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(json: &Value, field: &str) -> u64 {
    json.pointer(field).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {field} in {json:#}"))
}

/// Every onboarded block was compared and right.
fn assert_verified(json: &Value) {
    assert_eq!(number(json, "/corrupt_blocks"), 0, "{json:#}");
    let hits: u64 =
        ["/hits/g1", "/hits/g2", "/hits/g3", "/hits/g4"].iter().map(|tier| number(json, tier)).sum();
    assert_eq!(number(json, "/verified_blocks"), hits, "{json:#}");
}

#[test]
fn a_directory_is_found_again_by_the_next_run_and_not_under_another_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("volume")).unwrap();
    let volume = format!("dir://{}", dir.path().join("volume").display());
    let line = "--synthetic 60 --capacity 200,400,0";
    let first = json(&mut replay(dir.path(), &volume, line));
    assert_verified(&first);
    assert!(number(&first, "/paths/g2_g4/blocks") > 0, "{first:#}");
    let second = json(&mut replay(dir.path(), &volume, line));
    assert_verified(&second);
    assert!(number(&second, "/hits/g4") > 0 && number(&second, "/paths/g4_g1/blocks") > 0, "{second:#}");
    let early = |json: &Value| json["hit_ratio_first_10pct"].as_f64().unwrap();
    assert!(early(&second) >= 0.95 && early(&second) > early(&first), "{second:#}");
    let other = json(&mut replay(dir.path(), &volume, &format!("{line} --namespace other")));
    assert_verified(&other);
    assert!((early(&other) - early(&first)).abs() < 1e-9, "{other:#}");
}

#[test]
fn a_volume_that_is_not_there_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    for (volume, what) in [("dir:///no/such/folder", "/no/such/folder"), ("vendor:x", "known schemes")] {
        let output = replay(dir.path(), volume, "--synthetic 5").output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(what), "{error}");
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use super::*;
    use crate::ports::free_port;
    use std::net::{SocketAddr, TcpStream};
    use std::process::{Child, Stdio};
    use std::time::{Duration, Instant};

    /// A server, stopped by its id when it is dropped.
    struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            // Gone already is as good.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A server over a directory with a bucket, and the URI of a volume in it.
    fn start(dir: &Path) -> Option<(Server, String)> {
        let Some(program) = std::env::var_os("TEST_S3_SERVER") else {
            eprintln!("skipped: TEST_S3_SERVER names no server");
            return None;
        };
        std::fs::create_dir_all(dir.join("store/bucket")).unwrap();
        let addr = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let mut command = Command::new(program);
        command.args(["--host", "127.0.0.1", "--port", &addr.port().to_string()]).arg(dir.join("store"));
        let server = Server(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(addr).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some((server, format!("s3://bucket/kv?endpoint=http://{addr}&anonymous=true")))
    }

    #[test]
    fn a_bucket_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let Some((_server, volume)) = start(dir.path()) else { return };
        let line = "--synthetic 40 --capacity 200,400,0";
        assert_verified(&json(&mut replay(dir.path(), &volume, line)));
        let second = json(&mut replay(dir.path(), &volume, line));
        assert_verified(&second);
        assert!(number(&second, "/hits/g4") > 0, "{second:#}");
        assert!(second["hit_ratio_first_10pct"].as_f64().unwrap() >= 0.95, "{second:#}");
    }

    #[test]
    fn a_replay_outlives_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let Some((server, volume)) = start(dir.path()) else { return };
        let mut command = replay(dir.path(), &volume, "--synthetic 400 --capacity 200,400,0");
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Once it is at work.
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::fs::read_dir(dir.path().join("store/bucket/kv")).is_err() {
            assert!(Instant::now() < deadline, "nothing was written");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(server);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_verified(&json);
        assert_eq!(number(&json, "/requests"), 400);
        assert!(number(&json, "/offload_dropped") > 0, "what could not be copied is counted: {json:#}");
    }
}
