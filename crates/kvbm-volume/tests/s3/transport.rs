//! Objects that something else moves than the client.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use crate::conditions::{Manner, Shelf, start};
use crate::{key, object_of, open, within};
use kvbm_plan::VolumeId;
use kvbm_volume::{
    ObjectMove, ObjectTransport, S3Volume, TransportStore, Volume, VolumeDescriptor, VolumeError, VolumeExt,
};
use std::io;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The credentials that a client needs where it signs its requests.
const CREDENTIALS: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];

/// Whether this process has credentials. Where it has none, `test` is run in one that has, and
/// passes there.
fn has_credentials(test: &str) -> bool {
    if CREDENTIALS.iter().all(|name| std::env::var_os(name).is_some()) {
        return true;
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", &format!("transport::{test}"), "--nocapture"]);
    let output = alone.envs(CREDENTIALS.map(|name| (name, "test"))).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    false
}

/// What becomes of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives,
    Fails,
    NeverEnds,
    /// It ends as if all were well, with another byte.
    WrongByte,
    /// With a byte less.
    Short,
    /// It does not even begin.
    Refused,
}

/// Moves objects to and from a shelf past its server.
#[derive(Clone)]
struct Past {
    shelf: Arc<Mutex<Shelf>>,
    fate: Arc<Mutex<Fate>>,
    /// Puts, and gets.
    asked: Arc<[AtomicUsize; 2]>,
    /// Transfers that are there.
    there: Arc<()>,
}

impl std::fmt::Debug for Past {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Past")
    }
}

struct OnItsWay {
    polls: usize,
    fate: Fate,
    bytes: Vec<u8>,
    _there: Arc<()>,
}

impl ObjectMove for OnItsWay {
    fn poll(&mut self) -> Option<io::Result<Vec<u8>>> {
        self.polls += 1;
        if self.polls < 4 || self.fate == Fate::NeverEnds {
            return None;
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        match self.fate {
            Fate::Fails => return Some(Err(io::Error::other("the transport fails"))),
            Fate::WrongByte if !bytes.is_empty() => *bytes.last_mut()? ^= 1,
            Fate::Short => drop(bytes.pop()),
            _ => {}
        }
        Some(Ok(bytes))
    }
}

impl Past {
    fn begin(&self, which: usize, bytes: Vec<u8>) -> io::Result<Box<dyn ObjectMove>> {
        self.asked[which].fetch_add(1, Ordering::Relaxed);
        let (fate, there) = (*self.fate.lock().unwrap(), Arc::clone(&self.there));
        if fate == Fate::Refused {
            return Err(io::Error::other("the transport is not there"));
        }
        Ok(Box::new(OnItsWay { polls: 0, fate, bytes, _there: there }))
    }

    fn asked(&self) -> [usize; 2] {
        [0, 1].map(|which| self.asked[which].load(Ordering::Relaxed))
    }
}

/// As the client names it to the server.
fn path(location: &str) -> String {
    format!("/bucket/{}", location.replace('+', "%2b"))
}

impl ObjectTransport for Past {
    fn start_put(&self, location: &str, object: &[u8]) -> io::Result<Box<dyn ObjectMove>> {
        if *self.fate.lock().unwrap() == Fate::Arrives {
            self.shelf.lock().unwrap().objects.insert(path(location), object.to_vec());
        }
        self.begin(0, Vec::new())
    }

    fn start_get(&self, location: &str, bytes: u64) -> io::Result<Box<dyn ObjectMove>> {
        let found = self.shelf.lock().unwrap().objects.get(&path(location)).cloned();
        let mut found = found.ok_or(io::ErrorKind::NotFound)?;
        found.truncate(bytes as usize);
        self.begin(1, found)
    }
}

fn uri(addr: SocketAddr) -> String {
    format!("s3://bucket/p?endpoint=http://{addr}&transport=nixl")
}

/// A volume whose large objects go past its server.
fn volume(deadline: Duration) -> (S3Volume, Past) {
    let (addr, shelf) = start(Manner::Knows);
    let past = Past {
        shelf,
        fate: Arc::new(Mutex::new(Fate::Arrives)),
        asked: Arc::default(),
        there: Arc::default(),
    };
    let given = past.clone();
    let opened = move |store: &TransportStore| {
        assert_eq!(
            (store.bucket.as_str(), store.endpoint.clone()),
            ("bucket", Some(format!("http://{addr}")))
        );
        Ok(Arc::new(given.clone()) as Arc<dyn ObjectTransport>)
    };
    let descriptor = VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(3), uri(addr)) };
    (S3Volume::open_with(descriptor, &opened).unwrap(), past)
}

fn large() -> Vec<u8> {
    (0..100_000_u32).map(|at| (at % 251) as u8).collect()
}

#[test]
fn large_objects_go_by_the_transport_and_small_ones_by_the_client() {
    if !has_credentials("large_objects_go_by_the_transport_and_small_ones_by_the_client") {
        return;
    }
    let (volume, past) = volume(Duration::from_secs(20));
    let large = large();
    volume.put_one(&key(1), &large, within(20)).unwrap();
    assert_eq!((past.asked(), past.shelf.lock().unwrap().objects.len()), ([1, 0], 1));
    assert!(past.shelf.lock().unwrap().objects.values().eq([&object_of(1, &large)]), "as any other object");
    volume.put_one(&key(2), b"keys and values", within(20)).unwrap();
    assert_eq!(past.asked(), [1, 0], "a small one, under a condition");
    assert!(past.shelf.lock().unwrap().asked.contains(&"create"));
    assert!(volume.get_one(&key(1), large.len(), within(20)).unwrap() == large);
    assert_eq!(volume.get_one(&key(2), 15, within(20)).unwrap(), b"keys and values");
    assert_eq!(past.asked(), [1, 1]);

    // The same one stays; what is not there is not asked for.
    volume.put_one(&key(1), &large, within(20)).unwrap();
    let absent = volume.get_one(&key(9), large.len(), within(20)).unwrap_err();
    assert!(matches!(absent, VolumeError::NotFound { .. }), "{absent}");
    assert_eq!(past.asked(), [1, 1]);
    let there = volume.exists(&[key(1), key(2), key(9)], within(20));
    assert_eq!(there.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [true, true, false]);

    // A client without the transport reads what came by it, and the other way round.
    let plain =
        open(volume.descriptor().uri.replace("&transport=nixl", "&anonymous=true"), Duration::from_secs(20));
    assert!(plain.get_one(&key(1), large.len(), within(20)).unwrap() == large);
    assert!(volume.delete(&[key(1)], within(20)).remove(0).unwrap());
    plain.put_one(&key(1), &large, within(20)).unwrap();
    assert!(volume.get_one(&key(1), large.len(), within(20)).unwrap() == large);
    assert_eq!(past.asked(), [1, 2]);
}

/// Mutation that makes it fail: `get` takes what the transport brought for what the store has.
#[test]
fn what_a_transport_fails_at_or_brings_wrong_the_client_moves() {
    if !has_credentials("what_a_transport_fails_at_or_brings_wrong_the_client_moves") {
        return;
    }
    let (volume, past) = volume(Duration::from_secs(20));
    let large = large();
    volume.put_one(&key(1), &large, within(20)).unwrap();
    for (at, fate) in (2..).zip([Fate::WrongByte, Fate::Short, Fate::Fails, Fate::Refused]) {
        *past.fate.lock().unwrap() = fate;
        let asked = past.asked();
        assert!(volume.get_one(&key(1), large.len(), within(20)).unwrap() == large, "{fate:?}");
        assert_eq!(past.asked()[1], asked[1] + 1, "{fate:?}");
        if matches!(fate, Fate::Fails | Fate::Refused) {
            volume.put_one(&key(at), &large, within(20)).unwrap();
            assert_eq!(past.asked()[0], asked[0] + 1, "{fate:?}");
            assert!(volume.get_one(&key(at), large.len(), within(20)).unwrap() == large, "{fate:?}");
        }
    }
    let asked = past.asked()[0];
    volume.put_one(&key(1), &large, within(20)).unwrap();
    assert_eq!(past.asked()[0], asked, "nothing was found to be damaged in the store");
    *past.fate.lock().unwrap() = Fate::Arrives;
    // Damaged in the store, and by its length.
    for change in [|object: &mut Vec<u8>| object[90_000] ^= 1, |object: &mut Vec<u8>| object.truncate(90_000)]
    {
        past.shelf.lock().unwrap().objects.values_mut().for_each(change);
        let error = volume.get_one(&key(1), large.len(), within(20)).unwrap_err();
        assert!(error.is_corrupt(), "{error}");
        // The next put replaces it without a look.
        let before = past.asked()[0];
        volume.put_one(&key(1), &large, within(20)).unwrap();
        assert_eq!(past.asked()[0], before + 1);
        assert!(volume.get_one(&key(1), large.len(), within(20)).is_ok());
    }
    assert_eq!(Arc::strong_count(&past.there), 2, "no transfer is left");
}

#[test]
fn a_transfer_that_does_not_end_is_left_at_the_deadline() {
    if !has_credentials("a_transfer_that_does_not_end_is_left_at_the_deadline") {
        return;
    }
    let (volume, past) = volume(Duration::from_secs(20));
    let large = large();
    volume.put_one(&key(1), &large, within(20)).unwrap();
    *past.fate.lock().unwrap() = Fate::NeverEnds;
    for write in [false, true] {
        let begun = Instant::now();
        let deadline = begun + Duration::from_millis(300);
        let result = if write {
            volume.put_one(&key(2), &large, deadline)
        } else {
            volume.get_one(&key(1), large.len(), deadline).map(drop)
        };
        let error = result.unwrap_err();
        assert!(!error.is_miss(), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let until = within(20);
        while Arc::strong_count(&past.there) > 2 {
            assert!(Instant::now() < until, "the transfer is dropped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    *past.fate.lock().unwrap() = Fate::Arrives;
    assert!(volume.get_one(&key(1), large.len(), within(20)).unwrap() == large, "the volume goes on");
}

#[test]
fn without_a_transport_the_volume_does_not_open() {
    let (addr, _shelf) = start(Manner::Knows);
    let descriptor = VolumeDescriptor::new(VolumeId(3), uri(addr));
    let error = S3Volume::open(descriptor.clone()).unwrap_err().to_string();
    assert!(error.contains("this program has no NIXL for volumes"), "{error}");
    let none = |_: &TransportStore| Err(io::Error::other("no library"));
    let error = S3Volume::open_with(descriptor, &none).unwrap_err().to_string();
    assert!(error.contains("no library"), "{error}");
}
