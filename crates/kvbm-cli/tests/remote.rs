//! `kvbm remote` and `kvbm serve --remote` as an operator meets them.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[cfg(feature = "nats")]
#[path = "../../kvbm-events/tests/support/nats_server.rs"]
mod nats_server;
#[cfg(feature = "nats")]
#[path = "../../kvbm-events/tests/support/ports.rs"]
mod ports;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn kvbm(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvbm")).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn private(folder: &Path) -> String {
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o700)).unwrap();
    folder.to_str().unwrap().to_owned()
}

fn configuration(folder: &Path) -> PathBuf {
    let path = folder.join("kvbm.toml");
    let text = format!(
        "[model]\nnum_layers = 2\nnum_kv_heads = 2\nhead_dim = 32\n\
         [namespace]\nmodel = \"test\"\n[host]\ncapacity = 32\n\
         [node]\nsocket = \"{}/run/node.sock\"\nengine_blocks = 64\n\
         [remote]\nagent = \"in-process\"\n",
        folder.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_benchmark_has_a_row_for_each_pair_of_layouts() {
    let words = ["remote", "bench", "--agent", "in-process", "--blocks", "4", "--rounds", "1", "--json", "-"];
    let output = kvbm(&words);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = json(&output)["rows"].as_array().unwrap().clone();
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["contiguous", "layer_separate", "tp4_to_tp2"]);
    for row in rows {
        let [verified, bare, ratio] =
            ["gb_per_s", "bare_gb_per_s", "ratio"].map(|name| row[name].as_f64().unwrap());
        assert!(verified > 0.0 && bare > 0.0 && (ratio - verified / bare).abs() < 1e-9, "{row}");
    }
    assert!(text(&output.stderr).contains("4 blocks of 1 MiB"));
}

/// A daemon that has said its first line. It ends with this.
struct Daemon {
    child: Child,
    first_line: String,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SAFETY: a signal to a child that was not waited for yet.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let _ended = self.child.wait();
    }
}

/// A daemon that is announced at `place`, a folder or a URL, with the words of its first line.
fn is_announced_while_it_runs(place: &str, expected: &str, during: impl FnOnce()) {
    let dir = tempfile::tempdir().unwrap();
    let config = configuration(dir.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.arg("serve").arg("--config").arg(&config).args(["--remote", place, "--node", "3"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut first_line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
    let daemon = Daemon { child, first_line };
    assert!(daemon.first_line.contains(expected), "{}", daemon.first_line);

    let output = kvbm(&["remote", "ls", place, "--json", "-"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let nodes = json(&output)["nodes"].as_array().unwrap().clone();
    assert_eq!(nodes.len(), 1);
    let set = &nodes[0]["sets"][0];
    assert_eq!((&nodes[0]["node"], &set["blocks"]), (&3.into(), &32.into()));
    assert_eq!((&set["heads"], &set["layers"]), (&2.into(), &2.into()));
    assert!(text(&output.stderr).contains("rank 0: 32 blocks"), "{}", text(&output.stderr));
    during();

    drop(daemon);
    let output = kvbm(&["remote", "ls", place]);
    assert!(text(&output.stdout).contains("no node is announced"), "{}", text(&output.stdout));
}

#[test]
fn a_daemon_is_announced_in_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let peers = dir.path().join("peers");
    let place = peers.to_str().unwrap();
    is_announced_while_it_runs(place, &format!("node 3 in {place}"), || {
        let mode = std::fs::metadata(peers.join("node-3.kvbm")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "for its owner alone");
    });
}

/// On a real nats-server, where `KVBM_NATS_SERVER` names its program.
#[cfg(feature = "nats")]
#[test]
fn a_daemon_is_announced_on_a_server() {
    let Some(server) = nats_server::NatsServer::start(&[]) else { return };
    let place = format!("nats://127.0.0.1:{}", server.port());
    is_announced_while_it_runs(&place, "node 3 over NATS", || {});
}

#[test]
fn what_cannot_be_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = private(dir.path());
    let config = configuration(dir.path());
    let config = config.to_str().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, "1, 2 3\n4").unwrap();
    let (few, tokens) = (tokens.to_str().unwrap().to_owned(), dir.path().join("prompt"));
    std::fs::write(&tokens, vec!["7"; 40].join(" ")).unwrap();
    let tokens = tokens.to_str().unwrap();
    let wrong = dir.path().join("wrong");
    std::fs::write(&wrong, "1 two 3").unwrap();
    let wrong = wrong.to_str().unwrap();
    std::fs::create_dir(dir.path().join("broken")).unwrap();
    let broken = private(&dir.path().join("broken"));
    std::fs::write(dir.path().join("broken/node-1.kvbm"), "not an announcement").unwrap();
    std::fs::write(dir.path().join("node-8.kvbm"), "of a live node").unwrap();
    let pull = |tokens: &str, node: &str| {
        let words = ["remote", "pull", "--config", config, "--directory", &folder, "--wait", "0"];
        kvbm(&[&words[..], &["--tokens", tokens, "--node", node]].concat())
    };
    let (url, hint) = if cfg!(feature = "nats") {
        ("nats://user:word@127.0.0.1:9?bukket=x", "no parameter 'bukket'")
    } else {
        ("nats://user:word@127.0.0.1:9", "--features nats")
    };
    for words in [&["remote", "ls", url][..], &["serve", "--config", config, "--remote", url, "--node", "1"]]
    {
        let output = kvbm(words);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{hint}: {stderr}");
        assert!(stderr.contains(hint) && !stderr.contains("word"), "{hint}: {stderr}");
    }
    for (output, hint) in [
        (kvbm(&["remote", "ls", "no/folder"]), "there is no folder no/folder"),
        (kvbm(&["remote", "ls", &broken]), "1 announcements cannot be read"),
        (pull(wrong, "9"), "\"two\" is no token id"),
        (pull(&few, "9"), "4 tokens fill no block"),
        (pull(tokens, "0"), "remote.node"),
        (pull(tokens, "9"), "no peer is announced"),
        (pull(tokens, "8"), "give a number that no node has"),
        #[cfg(not(feature = "nixl"))]
        (kvbm(&["remote", "bench", "--agent", "nixl"]), "`--agent in-process` needs nothing"),
    ] {
        assert_eq!(output.status.code(), Some(1), "{hint}");
        assert!(text(&output.stderr).contains(hint), "{hint}: {}", text(&output.stderr));
    }
    let output = kvbm(&["serve", "--config", config, "--node", "3"]);
    assert_eq!(output.status.code(), Some(2), "a number without a folder");
}
