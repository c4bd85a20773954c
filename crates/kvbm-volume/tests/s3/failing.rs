//! Servers that lie, fail and stall.

use crate::fake::{Answer, Fake};
use crate::ports::free_port;
use crate::{key, object_of, open, within};
use kvbm_plan::VolumeId;
use kvbm_volume::{BlobKey, S3Volume, Volume, VolumeDescriptor, VolumeError, VolumeExt};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn a_server_that_lies_serves_nothing() {
    let sound = object_of(1, b"keys and values");
    let fake = Fake::start(Answer::Body(200, sound.clone()));
    let volume = fake.volume(Duration::from_secs(20));
    assert_eq!(volume.get_one(&key(1), 15, within(20)).unwrap(), b"keys and values");
    let mut flipped = sound.clone();
    flipped[100] ^= 1;
    let lies = [
        ("another block's object", Answer::Body(200, object_of(2, b"keys and values"))),
        ("a flipped bit", Answer::Body(200, flipped)),
        ("half an object", Answer::Body(200, sound[..60].to_vec())),
        ("an object and more", Answer::Body(200, [&sound[..], b"more"].concat())),
        ("nothing", Answer::Body(200, Vec::new())),
        ("an error page", Answer::Body(200, b"<html>please log in</html>".repeat(9))),
        ("far more than asked for", Answer::Body(200, vec![0; 3 << 20])),
        ("an announcement of exabytes", Answer::Torn(usize::MAX / 16, sound.clone())),
    ];
    for (what, lie) in lies {
        fake.say(lie);
        let error = volume.get_one(&key(1), 15, within(20)).err();
        let error = error.unwrap_or_else(|| panic!("{what}: served"));
        assert!(error.is_corrupt() && error.is_miss(), "{what}: {error}");
    }
    fake.say(Answer::Body(404, Vec::new()));
    assert!(matches!(volume.get_one(&key(1), 15, within(20)), Err(VolumeError::NotFound { .. })));
    assert!(!volume.exists(&[key(1)], within(20)).remove(0).unwrap());
}

#[test]
fn a_server_that_fails_is_given_up_soon() {
    let sound = object_of(1, b"keys and values");
    let fake = Fake::start(Answer::Reset);
    let failures = [
        ("hangs up", Answer::Reset),
        ("500", Answer::Body(500, b"<Error/>".to_vec())),
        ("503", Answer::Body(503, b"<Error><Code>SlowDown</Code></Error>".to_vec())),
        ("403", Answer::Body(403, b"<Error><Code>AccessDenied</Code></Error>".to_vec())),
        ("a torn answer", Answer::Torn(sound.len(), sound[..60].to_vec())),
        ("silence", Answer::Silence),
    ];
    for (what, failure) in failures {
        fake.say(failure);
        let volume = fake.volume(Duration::from_secs(1));
        let begun = Instant::now();
        let asked = fake.requests.load(Ordering::Relaxed);
        let error = volume.get_one(&key(1), 15, within(1)).err();
        let error = error.unwrap_or_else(|| panic!("{what}: served"));
        assert!(!error.is_miss(), "{what}: {error}");
        if what != "a torn answer" {
            let error = volume.put_one(&key(1), b"keys and values", within(1)).unwrap_err();
            assert!(error.to_string().contains(&key(1).to_string()), "{what}: {error}");
            volume.exists(&[key(1)], within(1)).remove(0).unwrap_err();
            volume.delete(&[key(1)], within(1)).remove(0).unwrap_err();
        }
        // Four calls of a second each, however often the store would retry by itself.
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {:?}", begun.elapsed());
        assert!(fake.requests.load(Ordering::Relaxed) - asked < 24, "{what}: too many retries");
    }
}

#[test]
fn no_more_requests_than_allowed_are_on_their_way() {
    let fake = Fake::start(Answer::Slow(Duration::from_millis(20), 404, Vec::new()));
    let uri = format!("s3://bucket/p?endpoint=http://{}&anonymous=true&concurrency=3", fake.addr);
    let volume = open(uri, Duration::from_secs(20));
    std::thread::scope(|scope| {
        // The bound is for all callers together.
        for caller in 0..2 {
            let volume = &volume;
            scope.spawn(move || {
                let keys: Vec<BlobKey> = (0..12).map(|number| key(20 * caller + number)).collect();
                for found in volume.exists(&keys, within(20)) {
                    assert!(!found.expect("an answer"));
                }
            });
        }
    });
    assert_eq!(fake.requests.load(Ordering::Relaxed), 24);
    let most = fake.busy[1].load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at a time");
}

#[test]
fn only_an_endpoint_that_says_http_is_spoken_to_without_tls() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let uri = format!("s3://bucket?endpoint=https://{nobody}&anonymous=true");
    let error = open(uri, Duration::from_secs(1)).get_one(&key(1), 4, within(1)).unwrap_err();
    assert!(!error.is_miss(), "{error}");
    let refused = S3Volume::open(VolumeDescriptor::new(VolumeId(1), "s3://bucket?endpoint=ftp://x"));
    assert!(refused.unwrap_err().to_string().contains("https://HOST:PORT"));
}
