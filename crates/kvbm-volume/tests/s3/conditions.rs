//! Puts under the condition that there is nothing yet.

use crate::server::Server;
use crate::{key, object_of, open, within};
use kvbm_plan::VolumeId;
use kvbm_volume::{BlobScope, S3Volume, Volume, VolumeDescriptor, VolumeExt, probe};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// What a store does with `If-None-Match: *`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// 412 where there is an object.
    Knows,
    /// 501: it says that it does not know the condition.
    Refuses,
    /// It writes as if nothing had been said.
    Ignores,
    /// As the first, but says that it failed when it has written.
    Breaks,
    /// Whatever it writes, it says that it failed.
    Denies,
    /// It begins uploads in parts, and never answers a part.
    Stalls,
}

/// A small store: objects by path, and what it was asked for.
#[derive(Default)]
pub(crate) struct Shelf {
    pub(crate) objects: BTreeMap<String, Vec<u8>>,
    pub(crate) asked: Vec<&'static str>,
    /// Whether puts under a condition find no time, as while a server starts.
    busy: bool,
}

pub(crate) fn start(manner: Manner) -> (SocketAddr, Arc<Mutex<Shelf>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the test's own set-up");
    let addr = listener.local_addr().expect("the test's own set-up");
    let shelf: Arc<Mutex<Shelf>> = Arc::default();
    let shared = Arc::clone(&shelf);
    // Ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let shelf = Arc::clone(&shared);
            std::thread::spawn(move || serve(&stream, manner, &shelf));
        }
    });
    (addr, shelf)
}

/// One request after the other; `None` where the client went away.
fn serve(stream: &TcpStream, manner: Manner, shelf: &Mutex<Shelf>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let head = head.to_ascii_lowercase();
        let field = |name: &str| {
            let line = head.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim_start_matches(':').trim().to_owned())
        };
        let mut words = head.split_whitespace();
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut body = vec![0; field("content-length").map_or(0, |length| length.parse().unwrap_or(0))];
        reader.read_exact(&mut body).ok()?;
        if manner == Manner::Stalls && path.contains("partnumber=") {
            // Until the client goes.
            reader.read_line(&mut head.clone()).ok()?;
            return None;
        }
        let range = field("range").and_then(|range| range.strip_prefix("bytes=0-")?.parse::<usize>().ok());
        let (status, extra, answer) = shelf.lock().expect("the test's own set-up").answer(
            manner,
            &method,
            &path,
            body,
            field("if-none-match").is_some(),
            range,
        );
        let date = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: \"1\"";
        let length = answer.len();
        write!(&*stream, "HTTP/1.1 {status} X\r\n{date}\r\n{extra}Content-Length: {length}\r\n\r\n").ok()?;
        (&*stream).write_all(if method == "head" { &[] } else { &answer }).ok()?;
    }
}

impl Shelf {
    fn answer(
        &mut self,
        manner: Manner,
        method: &str,
        path: &str,
        body: Vec<u8>,
        conditional: bool,
        range: Option<usize>,
    ) -> (u16, String, Vec<u8>) {
        let there = self.objects.get(path);
        let nothing = |status| (status, String::new(), Vec::new());
        match method {
            "put" if conditional => {
                self.asked.push("create");
                match manner {
                    _ if self.busy => return nothing(503),
                    Manner::Knows | Manner::Breaks if there.is_some() => return nothing(412),
                    Manner::Refuses => return nothing(501),
                    Manner::Knows | Manner::Ignores | Manner::Breaks | Manner::Denies | Manner::Stalls => {}
                }
                self.objects.insert(path.to_owned(), body);
                nothing(if matches!(manner, Manner::Breaks | Manner::Denies) { 503 } else { 200 })
            }
            "put" => {
                self.asked.push("put");
                self.objects.insert(path.to_owned(), body);
                nothing(if manner == Manner::Denies { 503 } else { 200 })
            }
            "post" if path.contains("uploads") => {
                let begun =
                    "<InitiateMultipartUploadResult><UploadId>7</UploadId></InitiateMultipartUploadResult>";
                (200, String::new(), begun.into())
            }
            "delete" if path.contains("uploadid=7") => {
                self.asked.push("abort");
                nothing(204)
            }
            "delete" => {
                self.objects.remove(path);
                nothing(204)
            }
            "get" if path.contains("list-type") => (200, String::new(), self.listing().into()),
            _ => {
                let Some(object) = there.cloned() else { return nothing(404) };
                let Some(last) = range else {
                    self.asked.push("get");
                    return (200, String::new(), object);
                };
                self.asked.push("head");
                let last = last.min(object.len() - 1);
                let extra = format!("Content-Range: bytes 0-{last}/{}\r\n", object.len());
                (206, extra, object[..=last].to_vec())
            }
        }
    }
}

impl Shelf {
    /// All objects, whatever was asked for.
    fn listing(&self) -> String {
        let object = |(path, object): (&String, &Vec<u8>)| {
            let key = decoded(path.trim_start_matches("/bucket/"));
            let (size, date) = (object.len(), "2015-10-21T07:28:00.000Z");
            format!(
                "<Contents><Key>{key}</Key><LastModified>{date}</LastModified><Size>{size}</Size></Contents>"
            )
        };
        let objects: String = self.objects.iter().map(object).collect();
        format!("<ListBucketResult>{objects}<IsTruncated>false</IsTruncated></ListBucketResult>")
    }
}

/// Without the escapes of a URL.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).expect("two digits"));
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).expect("a key is text")
}

/// A volume over a shelf, and what it was asked for during `work`.
fn asked_during(shelf: &Mutex<Shelf>, work: impl FnOnce()) -> Vec<&'static str> {
    shelf.lock().expect("the test's own set-up").asked.clear();
    work();
    shelf.lock().expect("the test's own set-up").asked.clone()
}

const PAYLOAD: &[u8] = b"keys and values";

#[test]
fn an_equal_object_stays_and_any_other_is_replaced() {
    let (addr, shelf) = start(Manner::Knows);
    let volume = open(format!("s3://bucket/p?endpoint=http://{addr}&anonymous=true"), Duration::from_secs(5));
    let put = || volume.put_one(&key(1), PAYLOAD, within(5)).expect("a put");
    // There is one object only.
    let place = |object: Vec<u8>| {
        for there in shelf.lock().expect("the test's own set-up").objects.values_mut() {
            there.clone_from(&object);
        }
    };
    let holds = || {
        let objects = &shelf.lock().expect("the test's own set-up").objects;
        objects.values().eq([&object_of(1, PAYLOAD)])
    };
    assert_eq!(asked_during(&shelf, put), ["create"]);
    assert_eq!(asked_during(&shelf, put), ["create", "head"], "the bytes stay where they are");
    assert!(holds());
    // A torn one, another one, and one that does not even have a header.
    for object in [object_of(1, PAYLOAD)[..110].to_vec(), object_of(2, PAYLOAD), b"x".to_vec()] {
        place(object);
        assert_eq!(asked_during(&shelf, put), ["create", "head", "put"]);
        assert!(holds());
    }
    // A sound header over damaged bytes looks equal, until somebody reads it.
    let mut flipped = object_of(1, PAYLOAD);
    flipped[110] ^= 1;
    place(flipped);
    assert!(volume.get_one(&key(1), PAYLOAD.len(), within(5)).expect_err("damaged").is_corrupt());
    assert_eq!(asked_during(&shelf, put), ["put"]);
    assert!(holds());
    assert_eq!(asked_during(&shelf, put), ["create", "head"], "healed");
    assert_eq!(volume.facts(within(5)).conditional_puts, Some(true));
}

#[test]
fn stores_that_do_not_know_conditions_are_written_to_without() {
    for (manner, first, later) in
        [(Manner::Refuses, &["create", "put"][..], &["put"][..]), (Manner::Ignores, &["create"], &["create"])]
    {
        let (addr, shelf) = start(manner);
        let uri = format!("s3://bucket/p?endpoint=http://{addr}&anonymous=true");
        let volume = open(uri, Duration::from_secs(5));
        for number in 0..6 {
            let put = || volume.put_one(&key(number), PAYLOAD, within(5)).expect("a put");
            // A server error is tried again before it is believed.
            let mut asked = asked_during(&shelf, put);
            asked.dedup();
            assert_eq!(asked, if number < 3 { first } else { later }, "put {number}");
            assert_eq!(volume.get_one(&key(number), PAYLOAD.len(), within(5)).expect("a get"), PAYLOAD);
        }
        assert_eq!(volume.facts(within(5)).conditional_puts, Some(false));
    }
}

/// Mutation that makes it fail: any error counts as a refusal of the condition.
#[test]
fn a_server_that_starts_does_not_end_conditions() {
    let (addr, shelf) = start(Manner::Knows);
    let uri = format!("s3://bucket/p?endpoint=http://{addr}&anonymous=true");
    let volume = open(uri, Duration::from_secs(20));
    shelf.lock().expect("the test's own set-up").busy = true;
    for number in 0..5 {
        volume.put_one(&key(number), PAYLOAD, within(20)).expect("without the condition it is taken");
    }
    shelf.lock().expect("the test's own set-up").busy = false;
    let put = || volume.put_one(&key(7), PAYLOAD, within(20)).expect("a put");
    assert_eq!(asked_during(&shelf, put), ["create"]);
}

/// Mutation that makes it fail: a probe deletes only where the put succeeded.
#[test]
fn a_probe_leaves_nothing_where_its_put_is_reported_as_failed() {
    let (addr, shelf) = start(Manner::Denies);
    let uri = format!("s3://bucket/p?endpoint=http://{addr}&anonymous=true");
    let volume = open(uri, Duration::from_secs(20));
    let asked =
        asked_during(&shelf, || drop(probe(&volume, within(20)).expect_err("it says that it failed")));
    assert!(asked.contains(&"create") && asked.contains(&"put"), "it was written: {asked:?}");
    assert_eq!(stored(&shelf), 0);
}

/// Mutation that makes it fail: `Unfinished` is dropped without a word.
#[test]
fn parts_of_an_upload_that_ran_out_of_time_are_removed() {
    let (addr, shelf) = start(Manner::Stalls);
    let uri = format!("s3://bucket/p?endpoint=http://{addr}&anonymous=true&part_bytes=5242880");
    let volume = open(uri, Duration::from_secs(60));
    let late = volume.put_one(&key(1), &vec![1; 6 << 20], Instant::now() + Duration::from_millis(500));
    assert!(late.expect_err("no part is answered").is_late());
    let until = within(60);
    while !shelf.lock().expect("the test's own set-up").asked.contains(&"abort") {
        assert!(Instant::now() < until, "the upload is aborted");
        std::thread::yield_now();
    }
}

fn limited(addr: SocketAddr) -> S3Volume {
    let uri = format!("s3://kv/p?endpoint=http://{addr}&region=us-east-1&anonymous=true");
    let descriptor = VolumeDescriptor::new(VolumeId(3), uri);
    let capacity_bytes = Some(1 << 20);
    S3Volume::open(VolumeDescriptor { deadline: Duration::from_secs(20), capacity_bytes, ..descriptor })
        .expect("the test's own set-up")
}

fn stored(shelf: &Mutex<Shelf>) -> u64 {
    let shelf = shelf.lock().expect("the test's own set-up");
    shelf.objects.values().map(|object| object.len() as u64).sum()
}

#[test]
fn an_object_whose_put_was_answered_with_a_failure_counts() {
    let (addr, shelf) = start(Manner::Breaks);
    let volume = limited(addr);
    for _ in 0..2 {
        volume.put_one(&key(1), PAYLOAD, within(20)).expect("the second request finds it");
        assert_eq!(volume.used_bytes(), Some(stored(&shelf)));
    }
    assert!(volume.used_bytes() > Some(0));
}

/// Mutation that makes it fail: the look at what is there does not take the turn of the key.
#[test]
fn concurrent_changes_of_one_object_leave_the_count_right() {
    let (addr, shelf) = start(Manner::Knows);
    let volume = limited(addr);
    for round in 0..10 {
        let start = Barrier::new(5);
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let (start, volume) = (&start, &volume);
                scope.spawn(move || {
                    start.wait();
                    volume.put_one(&key(1), &vec![1; 100 * (writer + 1)], within(20)).expect("it writes");
                });
            }
            start.wait();
            volume.delete(&[key(1)], within(20)).remove(0).expect("an answer");
        });
        assert_eq!(volume.used_bytes(), Some(stored(&shelf)), "round {round}");
    }
}

#[test]
fn two_writers_of_one_key_leave_one_whole_object() {
    for server in Server::each() {
        let writers = [(); 2].map(|()| open(server.uri("two"), Duration::from_secs(20)));
        for bytes in [300_000, 6 << 20] {
            let payload = |number: u8| vec![number; bytes];
            std::thread::scope(|scope| {
                for writer in &writers {
                    scope.spawn(move || {
                        for number in 0..8 {
                            writer
                                .put_one(&key(number), &payload(number), within(60))
                                .expect("either writes");
                        }
                    });
                }
            });
            for number in 0..8 {
                for reader in &writers {
                    let found = reader.get_one(&key(number), bytes, within(60)).expect("one of them was put");
                    assert!(found == payload(number));
                }
            }
            let keys: Vec<_> = (0..8).map(key).collect();
            assert!(writers[0].delete(&keys, within(60)).into_iter().all(|deleted| deleted.expect("there")));
            assert!(writers[1].exists(&keys, within(60)).into_iter().all(|there| !there.expect("an answer")));
        }
    }
}

#[test]
fn real_servers_know_conditions_and_replace_torn_objects() {
    for server in Server::each() {
        let volume = open(server.uri("torn"), Duration::from_secs(20));
        let tried = probe(&volume, within(20)).expect("it works");
        eprintln!("{}: {tried:?}", server.name());
        assert!(tried.facts.conditional_puts.is_some());
        assert_eq!(
            tried.took.iter().map(|(call, _)| *call).collect::<Vec<_>>(),
            ["put", "exists", "get", "list", "delete"]
        );
        let payload: Vec<u8> = (0..7 << 20).map(|at: u32| (at % 253) as u8).collect();
        // In one request, and in parts.
        for payload in [&payload[..500_000], &payload] {
            volume.put_one(&key(1), payload, within(60)).expect("a put");
            server.tamper(&format!("torn/{}", key(1).object_path()), &mut |object| object.truncate(400_000));
            assert!(volume.get_one(&key(1), payload.len(), within(60)).expect_err("torn").is_miss());
            let fresh = open(server.uri("torn"), Duration::from_secs(20));
            fresh.put_one(&key(1), payload, within(60)).expect("a put");
            assert!(fresh.get_one(&key(1), payload.len(), within(60)).expect("healed") == payload);
        }
    }
}

/// Mutation that makes it fail: the paths of objects begin where the prefix ends as it is written
/// in the URI.
#[test]
fn objects_below_any_prefix_are_listed_and_counted() {
    for prefix in ["", "p", "a b", "te~m", "k\u{fc}/50%", "a//b/./c", "x#y*{z}"] {
        let (addr, _) = start(Manner::Knows);
        let uri = format!("s3://bucket/{prefix}?endpoint=http://{addr}&anonymous=true");
        let open = |capacity_bytes| {
            let deadline = Duration::from_secs(20);
            let descriptor = VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(3), &uri) };
            S3Volume::open(VolumeDescriptor { capacity_bytes, ..descriptor }).expect("the test's own set-up")
        };
        let volume = open(None);
        volume.put_one(&key(1), PAYLOAD, within(20)).expect("a put");
        assert_eq!(volume.get_one(&key(1), PAYLOAD.len(), within(20)).expect("a get"), PAYLOAD);
        let scope = BlobScope { namespace: key(1).namespace, label: None };
        assert_eq!(volume.list(&scope, None, 10, within(20)).expect("a list"), [key(1)], "{prefix:?}");
        let used = open(Some(1 << 20)).used_bytes();
        assert_eq!(used, Some(object_of(1, PAYLOAD).len() as u64), "{prefix:?}");
    }
}
