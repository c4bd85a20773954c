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
        // It was asked, so what it was asked for may have been done.
        let unasked = error.to_string().contains("deadline passed before");
        assert!(what != "silence" || error.is_late() && !unasked, "{error}");
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
    let opened = fake.requests.load(Ordering::Relaxed);
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
    assert_eq!(fake.requests.load(Ordering::Relaxed) - opened, 24);
    let most = fake.busy[1].load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at a time");
}

/// Mutation that makes it fail: `client` leaves `Courteous` out.
#[test]
fn parts_of_an_object_count_as_requests() {
    // An answer to each request of an upload in parts.
    let body = b"<R><UploadId>1</UploadId><ETag>1</ETag></R>".to_vec();
    let fake = Fake::start(Answer::Slow(Duration::from_millis(50), 200, body));
    let uri = format!(
        "s3://bucket/p?endpoint=http://{}&anonymous=true&concurrency=2&part_bytes={}",
        fake.addr,
        5 << 20
    );
    let volume = open(uri, Duration::from_secs(60));
    volume.put_one(&key(1), &vec![7; 36 << 20], within(60)).unwrap();
    // Eight parts, and what stands around them.
    assert!(fake.requests.load(Ordering::Relaxed) >= 10);
    let most = fake.busy[1].load(Ordering::SeqCst);
    assert_eq!(most, 2, "at a time");
}

/// Mutation that makes it fail: `RateLimit::wait` waits for nothing.
#[test]
fn a_store_that_asks_to_be_left_alone_is() {
    let busy = |line| Answer::With(line, 503, b"<Error><Code>SlowDown</Code></Error>".to_vec());
    let fake = Fake::start(Answer::Body(404, Vec::new()));
    let volume = fake.volume(Duration::from_secs(20));
    let before = fake.requests.load(Ordering::Relaxed);
    let asked = || fake.requests.load(Ordering::Relaxed) - before;

    fake.say(busy("Retry-After: 1"));
    let begun = Instant::now();
    let error = volume.get_one(&key(1), 15, within(60)).unwrap_err().to_string();
    // The client alone would wait for 0.2 s.
    assert!(
        asked() == 3 && begun.elapsed() >= Duration::from_secs(2) && error.contains("SlowDown"),
        "{error}"
    );
    fake.say(Answer::Body(200, object_of(1, b"keys and values")));
    assert_eq!(volume.get_one(&key(1), 15, within(60)).unwrap(), b"keys and values");
    assert!(begun.elapsed() >= Duration::from_secs(3));

    // It asks for more than there is: everybody fails at once, and it is not asked.
    fake.say(busy("retry-after: 3600"));
    for _ in 0..3 {
        let error = volume.get_one(&key(1), 15, within(20)).unwrap_err();
        assert!(!error.is_miss() && !error.is_late(), "{error}");
        let error = error.to_string();
        assert!(error.contains(&fake.addr.to_string()) && error.contains("answered 503"), "{error}");
        assert!(error.contains("lower the option concurrency") && error.len() < 512, "{error}");
    }
    assert_eq!(asked(), 5, "{error}");
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

fn answer(status: u16, code: &str) -> Answer {
    let body = format!(
        "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>In the store's own words.</Message></Error>"
    );
    Answer::Body(status, body.into_bytes())
}

/// A log keeps 512 bytes of a failure, and the object's name takes a hundred.
#[test]
fn what_a_store_answers_is_reported_with_the_way_out() {
    let fake = Fake::start(Answer::Reset);
    for (said, told, way_out) in [
        (
            answer(404, "NoSuchBucket"),
            "404 Not Found, NoSuchBucket: In the store's own words.",
            "create the bucket",
        ),
        (
            answer(403, "RequestTimeTooSkewed"),
            "403 Forbidden, RequestTimeTooSkewed",
            "set this machine's clock",
        ),
        (answer(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch", "check the credentials"),
        (answer(403, "AccessDenied"), "AccessDenied", "permit to get, put, delete and list"),
        (answer(400, "AuthorizationHeaderMalformed"), "400 Bad Request", "options region and endpoint"),
        (Answer::Body(301, Vec::new()), "301 Moved Permanently", "options region and endpoint"),
        (answer(429, "TooManyRequests"), "429 Too Many Requests", "lower the option concurrency"),
        (answer(503, "SlowDown"), "SlowDown", "lower the option concurrency"),
        (answer(500, "InternalError"), "500 Internal Server Error, InternalError", ""),
        (answer(409, "OperationAborted"), "409 Conflict, OperationAborted", ""),
        (Answer::Body(502, b"<html>\n  no  upstream </html>".repeat(999)), "<html> no upstream </html>", ""),
    ] {
        fake.say(answer(500, "starting"));
        let volume = fake.volume(Duration::from_secs(20));
        fake.say(said);
        let server = format!("http://{} answered", fake.addr);
        for error in [
            volume.get_one(&key(1), 15, within(20)).unwrap_err(),
            volume.put_one(&key(1), b"keys and values", within(20)).unwrap_err(),
        ] {
            assert!(!error.is_miss() && !error.is_full() && !error.is_late(), "{error}");
            let error = error.to_string();
            assert!(error.contains(told) && error.contains(&server) && error.contains(way_out), "{error}");
            assert!(error.len() <= 512, "{} bytes: {error}", error.len());
        }
    }
    // A head has no body that could say more.
    fake.say(Answer::Body(403, Vec::new()));
    let volume = fake.volume(Duration::from_secs(20));
    let error = volume.exists(&[key(1)], within(20)).remove(0).unwrap_err().to_string();
    assert!(error.contains("403 Forbidden; check the credentials"), "{error}");
}

#[test]
fn a_store_without_room_is_full() {
    let fake = Fake::start(answer(404, "NoSuchKey"));
    let volume = fake.volume(Duration::from_secs(20));
    for said in
        [answer(507, "XMinioStorageFull"), answer(403, "QuotaExceeded"), Answer::Body(507, Vec::new())]
    {
        fake.say(said);
        let error = volume.put_one(&key(1), b"keys and values", within(20)).unwrap_err();
        assert!(error.is_full() && error.to_string().contains("make room"), "{error}");
    }
}

/// Credentials that only read are in order. Those that the store does not know do not read either.
#[test]
fn a_store_that_does_not_permit_to_write_is_read() {
    let fake = Fake::start(answer(404, "NoSuchKey"));
    let volume = fake.volume(Duration::from_secs(20));
    let unknown = [
        answer(403, "SignatureDoesNotMatch"),
        answer(403, "RequestTimeTooSkewed"),
        answer(400, "ExpiredToken"),
        Answer::Body(401, Vec::new()),
    ];
    let known = [answer(403, "AccessDenied"), Answer::Body(403, Vec::new())];
    for (said, forbidden) in
        unknown.map(|said| (said, false)).into_iter().chain(known.map(|said| (said, true)))
    {
        fake.say(said);
        let written = volume.put_one(&key(1), b"keys and values", within(20)).unwrap_err();
        assert_eq!(written.is_forbidden(), forbidden, "{written}");
        let read = volume.get_one(&key(1), 15, within(20)).unwrap_err();
        assert!(!read.is_forbidden() && !read.is_miss(), "{read}");
    }
}

#[test]
fn why_nobody_can_be_reached_is_reported() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let talker = Fake::start(Answer::Body(200, Vec::new()));
    for (endpoint, reason) in [
        (format!("http://{nobody}"), "Connection refused"),
        // It does not speak TLS.
        (format!("https://{}", talker.addr), "tls handshake eof"),
        ("http://no-such-host.invalid".to_owned(), "dns error"),
    ] {
        let uri = format!("s3://bucket?endpoint={endpoint}&anonymous=true");
        let error = open(uri, Duration::from_secs(10)).get_one(&key(1), 4, within(10)).unwrap_err();
        let told = error.to_string();
        assert!(!error.is_miss() && told.contains(reason) && told.contains(&endpoint), "{told}");
    }
}

/// Mutation that makes it fail: `find_bucket` is not asked.
#[test]
fn a_bucket_that_is_not_there_is_reported_at_the_opening() {
    let fake = Fake::start(answer(404, "NoSuchBucket"));
    for capacity_bytes in [None, Some(1 << 20)] {
        let uri = format!("s3://bucket/p?endpoint=http://{}&anonymous=true", fake.addr);
        let descriptor = VolumeDescriptor { capacity_bytes, ..VolumeDescriptor::new(VolumeId(1), uri) };
        let refused = S3Volume::open(descriptor).expect_err("it is not there").to_string();
        assert!(refused.contains("\"s3://bucket/p\"") && refused.contains("NoSuchBucket"), "{refused}");
    }
    // It may come later, or answer so only where there is no object.
    for other in
        [answer(404, "NoSuchKey"), Answer::Body(404, Vec::new()), answer(503, "SlowDown"), Answer::Reset]
    {
        fake.say(other);
        drop(fake.volume(Duration::from_secs(20)));
    }
    // One that was removed has lost nothing of ours: it is no miss.
    fake.say(answer(404, "NoSuchKey"));
    let volume = fake.volume(Duration::from_secs(20));
    assert!(volume.get_one(&key(1), 4, within(20)).unwrap_err().is_miss());
    fake.say(answer(404, "NoSuchBucket"));
    assert!(!volume.get_one(&key(1), 4, within(20)).unwrap_err().is_miss());
}
