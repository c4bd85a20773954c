//! S3-compatible stores: a real server (its program named by `KVBM_S3_SERVER`), and a fake one that fails in every way.
#![cfg(feature = "s3")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
use kvbm_volume::conformance::{self, Subject};
use kvbm_volume::{
    BlobKey, BlobSlice, PayloadForm, PutRequest, S3Volume, Volume, VolumeDescriptor, VolumeError, VolumeExt,
    object,
};

/// A server, killed when it is dropped.
struct Server {
    child: Child,
    addr: SocketAddr,
    root: tempfile::TempDir,
}

impl Server {
    /// `None` where there is no such program: `cargo xtask test --only s3` fetches one.
    fn start() -> Option<Self> {
        let Some(program) = std::env::var_os("KVBM_S3_SERVER") else {
            eprintln!("skipped: KVBM_S3_SERVER names no server");
            return None;
        };
        let root = tempfile::tempdir().expect("the test's own set-up");
        std::fs::create_dir(root.path().join("bucket")).expect("the test's own set-up");
        let addr = TcpListener::bind("127.0.0.1:0")
            .expect("the test's own set-up")
            .local_addr()
            .expect("the test's own set-up");
        let mut command = Command::new(program);
        command.args(["--host", "127.0.0.1", "--port", &addr.port().to_string()]).arg(root.path());
        let child =
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the test's own set-up");
        let server = Self { child, addr, root };
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(server.addr).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }

    fn uri(&self, prefix: &str) -> String {
        format!("s3://bucket/{prefix}?endpoint=http://{}&anonymous=true&part_bytes=5242880", self.addr)
    }

    fn stop(&mut self) {
        // Gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

struct InBucket {
    server: Server,
    opened: AtomicUsize,
}

impl Subject for InBucket {
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        let uri = self.server.uri(&format!("volume-{number}"));
        Arc::new(S3Volume::open(VolumeDescriptor { uri, ..descriptor }).expect("the test's own set-up"))
    }

    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        let volume = format!("bucket/volume-{}", self.opened.load(Ordering::Relaxed));
        let file = self.server.root.path().join(volume).join(key.object_path());
        let mut object = std::fs::read(&file).expect("the test's own set-up");
        change(&mut object);
        std::fs::write(&file, object).expect("the test's own set-up");
        true
    }
}

fn key(number: u8) -> BlobKey {
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xaa; 16]),
        label: NamespaceId(1),
        group: GroupId(0),
        hash: SequenceHash::from_bytes([number; 16]),
        slice: BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    }
}

fn open(uri: String, deadline: Duration) -> S3Volume {
    S3Volume::open(VolumeDescriptor { deadline, ..VolumeDescriptor::new(VolumeId(3), uri) })
        .expect("the test's own set-up")
}

fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

#[test]
fn a_real_server_conforms() {
    let Some(server) = Server::start() else { return };
    let subject = InBucket { server, opened: AtomicUsize::new(0) };
    conformance::check(&subject);
}

#[test]
fn large_objects_go_up_in_parts_and_are_remembered() {
    let Some(server) = Server::start() else { return };
    let payload: Vec<u8> = (0..13 << 20).map(|at: u32| (at % 251) as u8).collect();
    open(server.uri("large"), Duration::from_secs(20)).put_one(&key(1), &payload, within(60)).unwrap();
    let again = open(server.uri("large"), Duration::from_secs(20));
    assert!(again.get_one(&key(1), payload.len(), within(60)).unwrap() == payload);
    assert!(server.root.path().join("bucket/large").join(key(1).object_path()).is_file());
}

#[test]
fn a_server_that_dies_during_puts_leaves_whole_objects_or_none() {
    let Some(mut server) = Server::start() else { return };
    let volume = open(server.uri("killed"), Duration::from_secs(5));
    let payload = |number: u8| vec![number; 3 << 20];
    volume.put_one(&key(0), &payload(0), within(30)).unwrap();
    let put: Vec<bool> = std::thread::scope(|scope| {
        let putting = scope.spawn(|| {
            (1..60).map(|number| volume.put_one(&key(number), &payload(number), within(5)).is_ok()).collect()
        });
        std::thread::sleep(Duration::from_millis(150));
        server.stop();
        putting.join().unwrap()
    });
    assert!(put.iter().any(|stored| !stored), "the server died too late");
    // The store's own files, without the server: what is there is read by the same rules.
    let folder = server.root.path().join("bucket/killed");
    let left =
        kvbm_volume::DirectoryVolume::open(VolumeDescriptor::new(VolumeId(4), folder.display().to_string()))
            .unwrap();
    for (number, stored) in (1..60).zip(put) {
        match left.get_one(&key(number), 3 << 20, within(30)) {
            Ok(bytes) => assert!(bytes == payload(number), "wrong bytes of {number}"),
            Err(error) => assert!(error.is_miss() && !stored, "{number}: {error}"),
        }
    }
}

/// What the fake server does with a request.
#[derive(Clone, Debug)]
enum Answer {
    /// A status and a body.
    Body(u16, Vec<u8>),
    /// Says that more bytes come than do, then hangs up.
    Torn(usize, Vec<u8>),
    /// Nothing, for as long as the client stays.
    Silence,
    /// Hangs up at once.
    Reset,
}

/// Answers every request as it is told.
struct Fake {
    addr: SocketAddr,
    answer: Arc<Mutex<Answer>>,
    requests: Arc<AtomicUsize>,
}

impl Fake {
    fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the test's own set-up");
        let addr = listener.local_addr().expect("the test's own set-up");
        let (answer, requests) = (Arc::new(Mutex::new(answer)), Arc::new(AtomicUsize::new(0)));
        let (shared, counted) = (Arc::clone(&answer), Arc::clone(&requests));
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, counted) = (Arc::clone(&shared), Arc::clone(&counted));
                std::thread::spawn(move || serve(stream, &answer, &counted));
            }
        });
        Self { addr, answer, requests }
    }

    fn volume(&self, deadline: Duration) -> S3Volume {
        open(format!("s3://bucket/p?endpoint=http://{}&anonymous=true", self.addr), deadline)
    }

    fn say(&self, answer: Answer) {
        *self.answer.lock().expect("the test's own set-up") = answer;
    }
}

/// One request after the other on a connection; an error is a client that went away.
fn serve(stream: TcpStream, answer: &Mutex<Answer>, requests: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let (mut line, mut length, mut head) = (String::new(), 0, false);
        loop {
            line.clear();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            head |= line.starts_with("HEAD");
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
            if line == "\r\n" {
                break;
            }
        }
        std::io::copy(&mut (&mut reader).take(length), &mut std::io::sink()).ok()?;
        requests.fetch_add(1, Ordering::Relaxed);
        let answer = answer.lock().expect("the test's own set-up").clone();
        let (status, announced, body) = match answer {
            Answer::Body(status, body) => (status, body.len(), body),
            Answer::Torn(announced, body) => (200, announced, body),
            Answer::Silence => return reader.read_line(&mut line).ok().map(drop),
            Answer::Reset => return None,
        };
        let date = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nETag: \"1\"";
        write!(stream, "HTTP/1.1 {status} X\r\n{date}\r\nContent-Length: {announced}\r\n\r\n").ok()?;
        if !head {
            stream.write_all(&body).ok()?;
        }
        if announced > body.len() {
            return None;
        }
    }
}

fn object_of(number: u8, payload: &[u8]) -> Vec<u8> {
    let request = PutRequest { key: key(number), form: PayloadForm::default(), pieces: vec![payload] };
    let mut object = object::seal(VolumeId(3), &request, 1).expect("the test's own set-up");
    object.extend_from_slice(payload);
    object
}

#[test]
fn a_server_that_lies_serves_nothing() {
    let sound = object_of(1, b"keys and values");
    let fake = Fake::start(Answer::Body(200, sound.clone()));
    let volume = fake.volume(Duration::from_secs(2));
    assert_eq!(volume.get_one(&key(1), 15, within(2)).unwrap(), b"keys and values");
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
        let error = volume.get_one(&key(1), 15, within(2)).err();
        let error = error.unwrap_or_else(|| panic!("{what}: served"));
        assert!(error.is_corrupt() && error.is_miss(), "{what}: {error}");
    }
    fake.say(Answer::Body(404, Vec::new()));
    assert!(matches!(volume.get_one(&key(1), 15, within(2)), Err(VolumeError::NotFound { .. })));
    assert!(!volume.exists(&[key(1)], within(2)).remove(0).unwrap());
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
fn only_an_endpoint_that_says_http_is_spoken_to_without_tls() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let uri = format!("s3://bucket?endpoint=https://{nobody}&anonymous=true");
    let error = open(uri, Duration::from_secs(1)).get_one(&key(1), 4, within(1)).unwrap_err();
    assert!(!error.is_miss(), "{error}");
    let refused = S3Volume::open(VolumeDescriptor::new(VolumeId(1), "s3://bucket?endpoint=ftp://x"));
    assert!(refused.unwrap_err().to_string().contains("https://HOST:PORT"));
}
