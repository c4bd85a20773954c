//! Whoever connects with other bytes than a leader's, and bytes at every bound.

use crate::echo::{Leader, Worker, leader_terms, soon};
use kvbm_link::Lane;
use kvbm_plan::wire;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn random_bytes_and_silent_strangers_do_not_keep_a_leader_away() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    let mut state = 3_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize
    };
    let silent = UnixStream::connect(&path).unwrap();
    for _ in 0..200 {
        let bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
        let mut stream = UnixStream::connect(&path).unwrap();
        // The worker may hang up before all of it is written.
        let _ = stream.write_all(&bytes);
    }
    let leader = Leader::start(&path, leader_terms(1));
    leader.send(b"still here");
    leader.expect_echoes(&[b"still here"]);
    drop(silent);
}

#[test]
fn a_frame_that_lies_about_its_length_ends_the_line_and_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(&[0xff, 0xff, 0xff, 0xff, 3]).unwrap();
    let mut answer = Vec::new();
    // The worker hangs up: an end or a reset, not a wait.
    let ended = stream.read_to_end(&mut answer);
    assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    assert!(answer.is_empty());
}

#[test]
fn the_largest_command_passes_and_an_idle_line_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rank-0.sock");
    let _worker = Worker::start(&path);
    let leader = Leader::start(&path, leader_terms(1));
    let largest: Vec<u8> = (0..wire::MAX_BYTES).map(|at| (at % 251) as u8).collect();
    leader.send(&largest);
    leader.expect_echoes(&[&largest]);
    // Longer than the other end may be silent.
    std::thread::sleep(Duration::from_millis(700));
    leader.line.send(Lane::Urgent, b"urgent").unwrap();
    soon(|| (leader.echoes().len() == 2).then_some(())).unwrap();
}
