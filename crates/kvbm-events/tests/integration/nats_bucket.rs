//! Buckets on a real server: see `nats.rs`.

#![cfg(feature = "nats")]

use crate::support::{NatsServer, PATIENCE};
use kvbm_events::nats::NatsBucket;
use kvbm_events::{BucketUrl, TransportError};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_secs(3);

fn open(server: &NatsServer, query: &str, lease: Duration) -> NatsBucket {
    let url = format!("nats://127.0.0.1:{}{query}", server.port());
    url.parse::<BucketUrl>().unwrap().open(lease, PATIENCE).unwrap()
}

fn values(bucket: &NatsBucket) -> BTreeMap<String, Vec<u8>> {
    bucket.values().into_iter().map(|(key, value)| (key, value.to_vec())).collect()
}

/// Waits until the bucket has these values and no others.
fn comes_to(bucket: &NatsBucket, wanted: &[(&str, &[u8])]) {
    let wanted: BTreeMap<String, Vec<u8>> =
        wanted.iter().map(|(key, value)| ((*key).to_owned(), value.to_vec())).collect();
    let until = Instant::now() + PATIENCE;
    while values(bucket) != wanted {
        assert!(Instant::now() < until, "{:?}, not {wanted:?}", values(bucket));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn values_are_seen_by_all_replaced_and_removed() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let one = open(&server, "", LEASE);
    assert_eq!(values(&one), BTreeMap::new());
    one.keep("node-1", b"first").unwrap();
    // Who opens it later has read it at once.
    let two = open(&server, "", LEASE);
    assert_eq!(values(&two), BTreeMap::from([("node-1".to_owned(), b"first".to_vec())]));
    let long = vec![0xff; 100_000];
    two.keep("node-2", &long).unwrap();
    comes_to(&one, &[("node-1", b"first"), ("node-2", &long)]);
    one.keep("node-1", b"second").unwrap();
    comes_to(&two, &[("node-1", b"second"), ("node-2", &long)]);
    two.remove("node-2").unwrap();
    two.remove("node-3").unwrap();
    comes_to(&one, &[("node-1", b"second")]);
    let other = open(&server, "?bucket=another", LEASE);
    assert_eq!(values(&other), BTreeMap::new(), "another bucket has other values");
}

/// Mutation that makes it fail: a value is not renewed, or not dropped with its lease.
#[test]
fn a_value_lives_as_long_as_who_keeps_it() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let (one, two) = (open(&server, "", LEASE), open(&server, "", LEASE));
    one.keep("node-1", b"stays").unwrap();
    two.keep("node-2", b"goes").unwrap();
    comes_to(&one, &[("node-1", b"stays"), ("node-2", b"goes")]);
    drop(two);
    comes_to(&one, &[("node-1", b"stays")]);
    std::thread::sleep(LEASE * 2);
    assert_eq!(values(&one).len(), 1, "it is renewed");
    assert_eq!(values(&open(&server, "", LEASE)).len(), 1, "for others too");
}

/// Mutation that makes it fail: both renew.
#[test]
fn of_two_that_keep_a_key_the_last_writer_has_it() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let [one, two, reader] = [(); 3].map(|()| open(&server, "", LEASE));
    one.keep("node-1", b"one").unwrap();
    comes_to(&one, &[("node-1", b"one")]);
    two.keep("node-1", b"two").unwrap();
    comes_to(&reader, &[("node-1", b"two")]);
    let until = Instant::now() + LEASE * 2;
    while Instant::now() < until {
        assert_eq!(reader.values()[0].1.as_ref(), b"two", "they replace each other");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((one.trouble(), two.trouble()), (None, None));
    // Free again, it is whose puts it.
    two.remove("node-1").unwrap();
    comes_to(&reader, &[]);
    one.keep("node-1", b"one").unwrap();
    comes_to(&reader, &[("node-1", b"one")]);
}

/// The server forgets the bucket when it ends: it keeps it in memory.
#[test]
fn values_outlive_a_restart_of_the_server() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let (one, two) = (open(&server, "", LEASE), open(&server, "", LEASE));
    one.keep("node-1", b"a").unwrap();
    two.keep("node-2", b"b").unwrap();
    let both: &[(&str, &[u8])] = &[("node-1", b"a"), ("node-2", b"b")];
    comes_to(&one, both);
    comes_to(&two, both);
    server.kill();
    std::thread::sleep(LEASE * 2);
    assert_eq!(values(&one).len(), 2, "without a server nothing is known to be gone");
    server.restart();
    // A third one sees what both have put again.
    let until = Instant::now() + PATIENCE;
    while values(&open(&server, "", LEASE)).len() < 2 {
        assert!(Instant::now() < until, "the values are not put again");
    }
    // What goes is noticed again.
    drop(two);
    comes_to(&one, &[("node-1", b"a")]);
    one.keep("node-1", b"c").unwrap();
    comes_to(&open(&server, "", LEASE), &[("node-1", b"c")]);
}

/// Mutation that makes it fail: the bucket is not watched anew when the server is back, or what is
/// not yet in a new bucket counts as gone.
#[test]
fn a_restart_of_the_server_hides_no_change_and_no_value() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    // Nothing is renewed or dropped by its age in the time of this test.
    let lease = PATIENCE * 10;
    let (one, two) = (open(&server, "", lease), open(&server, "", lease));
    one.keep("node-1", b"a").unwrap();
    two.keep("node-2", b"b").unwrap();
    let both: &[(&str, &[u8])] = &[("node-1", b"a"), ("node-2", b"b")];
    comes_to(&one, both);
    comes_to(&two, both);
    server.kill();
    server.restart();
    // The first calls may come before the connection.
    let until = Instant::now() + PATIENCE;
    while two.keep("node-2", b"c").is_err() {
        assert!(Instant::now() < until, "the server is back");
    }
    while values(&one)["node-2"] != b"c" {
        assert!(Instant::now() < until, "the change is heard of");
        assert_eq!(values(&one).len(), 2, "nobody has gone");
        std::thread::sleep(Duration::from_millis(1));
    }
    comes_to(&two, &[("node-1", b"a"), ("node-2", b"c")]);
    // Nor is it missing to those who come later.
    while values(&open(&server, "", lease)).len() < 2 {
        assert!(Instant::now() < until, "the values are put again");
    }
}

#[test]
fn what_cannot_be_done_says_why() {
    for (url, why) in [
        ("nats://h?subject=a", "no parameter 'subject'; it has bucket"),
        ("nats://h?bucket=a.b", "bucket=a.b: expected letters"),
        ("jetstream+nats://h", "over nats:// or tls://"),
        ("zmq+tcp://h:1", "over nats:// or tls://"),
        ("/a/folder", "no scheme"),
    ] {
        let error = url.parse::<BucketUrl>().unwrap_err().to_string();
        assert!(error.contains(why), "{url}: {error}");
    }
    let url: BucketUrl = "nats://user:word@127.0.0.1:9".parse().unwrap();
    let error = url.open(LEASE, PATIENCE).err().unwrap().to_string();
    assert!(error.contains("127.0.0.1:9") && !error.contains("word"), "{error}");

    let Some(server) = NatsServer::configured("max_payload: 4096") else { return };
    let bucket = open(&server, "", LEASE);
    let error = bucket.keep("node-1", &[0; 5000]).unwrap_err();
    assert!(matches!(error, TransportError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("max_payload of 4096"), "{error}");
    assert_eq!(values(&bucket), BTreeMap::new());

    let user = |name: &str, publish: &str| {
        format!(
            "{{ user: {name}, password: p, permissions: {{ publish: [{publish}], subscribe: \"_INBOX.>\" }} }}"
        )
    };
    // As docs/remote.md says; the reader lacks the bucket.
    let reader = user("reader", "\"$JS.API.>\", \"$JS.FC.>\"");
    let node = user("node", "\"$JS.API.>\", \"$JS.FC.>\", \"$KV.kvbm-nodes.>\"");
    let Some(server) = NatsServer::configured(&format!("authorization: {{ users: [{reader}, {node}] }}"))
    else {
        return;
    };
    let of = |user: &str| {
        let url = format!("nats://{user}:p@127.0.0.1:{}", server.port());
        url.parse::<BucketUrl>().unwrap().open(LEASE, PATIENCE).unwrap()
    };
    let (reader, node) = (of("reader"), of("node"));
    node.keep("node-1", b"x").unwrap();
    comes_to(&reader, &[("node-1", b"x")]);
    let error = reader.keep("node-2", b"x").unwrap_err().to_string();
    assert!(error.contains("$KV.kvbm-nodes.node-2"), "{error}");
    let until = Instant::now() + PATIENCE;
    while !reader.trouble().is_some_and(|why| why.contains("$KV.kvbm-nodes.node-2")) {
        assert!(Instant::now() < until, "a renewal that fails is said");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(node.trouble(), None);
    node.remove("node-1").unwrap();
    comes_to(&reader, &[]);
}
