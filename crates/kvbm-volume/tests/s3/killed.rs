//! Servers that die, or stop answering, in the middle of puts and gets: of objects in one request
//! and of objects in parts.

use crate::server::{Kind, Server};
use crate::{key, open, within};
use kvbm_plan::VolumeId;
use kvbm_volume::{DirectoryVolume, S3Volume, Volume, VolumeDescriptor, VolumeError, VolumeExt};
use std::time::{Duration, Instant};

/// In one request, and in three parts.
const SIZES: [usize; 2] = [3 << 20, 11 << 20];
/// No call may take longer, whatever happens to the server: many times any deadline here.
const PATIENCE: Duration = Duration::from_secs(60);

fn payload(number: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8 ^ number).collect()
}

/// Puts one object after the other until three puts have failed, and kills the server when the
/// fourth is there. Which ones were put.
fn killed_during_puts(server: &mut Server, volume: &S3Volume, bytes: usize) -> Vec<bool> {
    std::thread::scope(|scope| {
        let putting = scope.spawn(|| {
            let mut put: Vec<bool> = Vec::new();
            while put.iter().filter(|stored| !**stored).count() < 3 {
                assert!(put.len() < 200, "the server lives on");
                let number = put.len() as u8;
                put.push(volume.put_one(&key(number), &payload(number, bytes), within(5)).is_ok());
            }
            put
        });
        let deadline = within(60);
        while !volume.exists(&[key(3)], within(5)).remove(0).unwrap_or(false) {
            assert!(Instant::now() < deadline, "nothing was put");
        }
        server.stop();
        putting.join().expect("puts end")
    })
}

/// What is there is what was put; what is not there, or torn, was never said to be.
fn assert_whole_or_none(volume: &dyn Volume, put: &[bool], bytes: usize, may_be_gone: bool) {
    for (number, stored) in (0..).zip(put) {
        match volume.get_one(&key(number), bytes, within(30)) {
            Ok(found) => assert!(found == payload(number, bytes), "wrong bytes of {number}"),
            Err(error) => assert!(error.is_miss() && (may_be_gone || !stored), "{number}: {error}"),
        }
    }
}

#[test]
fn a_server_that_dies_during_puts_leaves_whole_objects_or_none() {
    for bytes in SIZES {
        let Some(mut server) = Server::of_files() else { return };
        let volume = open(server.uri("killed"), Duration::from_secs(5));
        let put = killed_during_puts(&mut server, &volume, bytes);
        assert!(put[..3].iter().all(|stored| *stored), "{put:?}");
        // The store's own files, without the server: what is there is read by the same rules.
        let folder = server.folder("killed").display().to_string();
        let left = DirectoryVolume::open(VolumeDescriptor::new(VolumeId(4), folder)).expect("a folder");
        assert_whole_or_none(&left, &put, bytes, false);
    }
}

#[test]
fn a_volume_outlives_its_server() {
    for mut server in Server::each() {
        for bytes in SIZES {
            let volume = open(server.uri(&format!("back-{bytes}")), Duration::from_secs(5));
            let put = killed_during_puts(&mut server, &volume, bytes);
            server.start_again();
            // Objects in memory are gone with it.
            assert_whole_or_none(&volume, &put, bytes, server.kind == Kind::Memory);
            volume.put_one(&key(7), &payload(7, bytes), within(30)).expect("a put");
            assert!(volume.get_one(&key(7), bytes, within(30)).expect("a get") == payload(7, bytes));
        }
    }
}

/// Reads the same objects again and again until three gets have failed; `then` runs when some have
/// been tried. The failures.
fn during_gets(volume: &S3Volume, bytes: usize, deadline: Duration, then: impl FnOnce()) -> Vec<VolumeError> {
    let (told, came) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let getting = scope.spawn(move || {
            let mut failures = Vec::new();
            for round in 0.. {
                assert!(round < 10_000, "the server lives on");
                let (number, begun) = (round as u8 % 4, Instant::now());
                match volume.get_one(&key(number), bytes, begun + deadline) {
                    Ok(found) => assert!(found == payload(number, bytes), "wrong bytes of {number}"),
                    Err(error) => failures.push(error),
                }
                assert!(begun.elapsed() < PATIENCE, "a call ends soon after its deadline");
                // Nobody listens any more after the first ones.
                let _ = told.send(round);
                if failures.len() == 3 {
                    break;
                }
            }
            failures
        });
        // On a slow machine gets may be late before, and end: that is no harm.
        while came.recv().is_ok_and(|round| round < 5) {}
        then();
        getting.join().expect("gets end")
    })
}

#[test]
fn a_server_that_dies_during_gets_serves_nothing_half() {
    for mut server in Server::each() {
        for bytes in SIZES {
            let volume = open(server.uri(&format!("gets-{bytes}")), Duration::from_secs(5));
            for number in 0..4 {
                volume.put_one(&key(number), &payload(number, bytes), within(30)).expect("a put");
            }
            let failures = during_gets(&volume, bytes, Duration::from_secs(5), || server.stop());
            // The store failed: that says nothing about the objects.
            assert!(failures.iter().all(|error| !error.is_miss()), "{failures:?}");
            server.start_again();
        }
    }
}

#[test]
fn a_server_that_stops_answering_is_left_at_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(1);
    for server in Server::each() {
        for bytes in SIZES {
            let uri = server.uri(&format!("stopped-{bytes}"));
            let (hasty, patient) = (open(uri.clone(), DEADLINE), open(uri, Duration::from_secs(60)));
            for number in 0..4 {
                patient.put_one(&key(number), &payload(number, bytes), within(60)).expect("a put");
            }
            let failures = during_gets(&hasty, bytes, DEADLINE, || server.signal("STOP"));
            assert!(failures.iter().all(|error| error.is_late() && !error.is_miss()), "{failures:?}");
            let begun = Instant::now();
            let late =
                hasty.put_one(&key(9), &payload(9, bytes), begun + DEADLINE).expect_err("it is stopped");
            assert!(late.is_late() && begun.elapsed() < PATIENCE, "{late}");
            server.signal("CONT");
            assert!(patient.get_one(&key(1), bytes, within(60)).expect("a get") == payload(1, bytes));
            // The put that was given up may still land, or not: whole in any case.
            match patient.get_one(&key(9), bytes, within(60)) {
                Ok(found) => assert!(found == payload(9, bytes), "wrong bytes"),
                Err(error) => assert!(error.is_miss(), "{error}"),
            }
            patient.put_one(&key(9), &payload(9, bytes), within(60)).expect("a put");
            assert!(patient.get_one(&key(9), bytes, within(60)).expect("a get") == payload(9, bytes));
        }
    }
}
