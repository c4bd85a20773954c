//! Whatever comes over the socket, the daemon serves on.

use crate::support::{Daemon, TestEngine, config, sequence, socket, times};
use kvbm_link::{Lane, Welcomed};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// A scheduler's terms, as bytes: role, engine, blocks, ranks, namespace, model, host memory,
/// replicas. The model has a list of groups, each with its kind and no shape, and a fingerprint.
const TERMS: &[u8] =
    b"\x98\xa9Scheduler\xa1x\x04\x01\xc0\x92\x91\x92\xa4full\xc0\xcf\x11\xda\xc3\x5e\xf0\x81\x36\x26\xc0\x01";

#[test]
fn strange_bytes_end_the_line_that_they_came_on_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"8 blocks\"\n"));
    let _daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let mut lines = Vec::new();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[0; 64], b"\x02\0\0\0\x01\x90"] {
        let mut line = UnixStream::connect(&socket).unwrap();
        line.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        // Cut off, or answered: both end.
        let _ = line.read_to_end(&mut rest);
    }
    // Some say nothing at all.
    lines.extend((0..20).map(|_| UnixStream::connect(&socket).unwrap()));
    for bytes in [&b"\xc1"[..], b"\x92\x01\xa4Step\x00", &[0x92, 0x01, 0x81], &[0xdd, 0xff, 0xff, 0xff, 0xff]]
    {
        // The line before ends at both ends, one after the other.
        let until = Instant::now() + crate::support::PATIENCE;
        let welcomed = loop {
            match Welcomed::attach(&socket, TERMS, times()) {
                Ok(welcomed) => break welcomed,
                Err(refused) => assert!(Instant::now() < until, "{refused}"),
            }
        };
        let (ended, end) = std::sync::mpsc::channel();
        let line = welcomed.start(|_| {}, move |_| ended.send(()).unwrap()).unwrap();
        line.send(Lane::Bulk, bytes).unwrap();
        end.recv_timeout(crate::support::PATIENCE).unwrap();
    }
    let refused = Welcomed::attach(&socket, b"\x90", times()).err().unwrap();
    assert!(refused.to_string().contains("refuses"), "{refused}");
    let tokens = sequence(&config, 1, 4);
    engine.save(&tokens, &[0, 1, 2, 3]);
    assert_eq!(engine.load("r", &tokens, &[4, 5, 6, 7]).arrived, 4);
    assert!(engine.holds(&tokens, 0, &[4, 5, 6, 7]));
}
