//! Tests of the server with clients that behave badly.

use super::*;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);
const PATIENCE: Duration = Duration::from_secs(30);

fn echo(request: &HttpRequest) -> HttpResponse {
    let HttpRequest { method, path, query, authorization, body } = request;
    HttpResponse::json(200, &json!([method, path, query, authorization, body.len()]))
}

fn server(limits: HttpLimits) -> (HttpServer, SocketAddr) {
    let server = HttpServer::tcp(ANY_PORT, "test", limits, &HttpSecurity::default(), echo).unwrap();
    let addr = server.addr().unwrap();
    (server, addr)
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn ask(addr: SocketAddr, text: &str) -> String {
    let mut stream = connect(addr);
    // The server may answer before it has read everything.
    let _ = stream.write_all(text.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn requests_are_read_and_nonsense_is_answered() {
    let limits = HttpLimits::default();
    let (_server, addr) = server(limits);
    let answer =
        ask(addr, "POST /find?a=b HTTP/1.1\r\nAuthorization: Bearer t\r\ncontent-length: 3\r\n\r\nabc");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("[\"POST\",\"/find\",\"a=b\",\"Bearer t\",3]\n"), "{answer}");
    for (text, status) in [
        ("GET /\r\n\r\n", "400"),
        ("GET / SPDY/3\r\n\r\n", "400"),
        ("POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", "400"),
        ("POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", "413"),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "501"),
    ] {
        let answer = ask(addr, text);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{text:?}: {answer}");
        assert!(answer.contains("\"error\""), "{answer}");
    }
    let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(limits.head_bytes));
    assert!(ask(addr, &long).starts_with("HTTP/1.1 431 "));
}

#[test]
fn a_client_that_waits_for_leave_gets_it() {
    let (_server, addr) = server(HttpLimits::default());
    let mut stream = connect(addr);
    stream.write_all(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n").unwrap();
    let mut leave = [0; 25];
    stream.read_exact(&mut leave).unwrap();
    assert_eq!(&leave, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"ok").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with(",2]\n"), "{answer}");
}

/// Mutation that makes it fail: the deadline counts for each read or write.
#[test]
fn a_slow_client_holds_no_thread_longer_than_its_time() {
    let limits =
        HttpLimits { client_time: Duration::from_millis(500), connections: 1, ..HttpLimits::default() };
    let (_server, addr) = server(limits);
    let (mut slow, began) = (connect(addr), Instant::now());
    // Each byte comes well within the time; all of them would take minutes.
    while slow.write_all(b"G").is_ok() && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(began.elapsed() < limits.client_time * 6, "{:?}", began.elapsed());
    assert!(ask(addr, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

/// Mutation that makes it fail: the deadline counts for each write.
#[test]
fn a_client_that_reads_slowly_is_left() {
    let limits =
        HttpLimits { client_time: Duration::from_millis(500), connections: 1, ..HttpLimits::default() };
    let large = "x".repeat(64 << 20);
    let server =
        HttpServer::tcp(ANY_PORT, "test", limits, &HttpSecurity::default(), move |_: &HttpRequest| {
            HttpResponse::text(200, large.as_str())
        })
        .unwrap();
    let mut slow = connect(server.addr().unwrap());
    slow.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let (began, mut part, mut got) = (Instant::now(), vec![0; 64 << 10], 0);
    while let Ok(count @ 1..) = slow.read(&mut part) {
        got += count;
        std::thread::sleep(Duration::from_millis(20));
        assert!(began.elapsed() < PATIENCE, "{got} bytes");
    }
    assert!(got < 64 << 20, "{got}");
}

#[test]
fn more_connections_than_allowed_are_answered_and_leave_room_again() {
    let limits = HttpLimits { connections: 2, ..HttpLimits::default() };
    let (begun, begins) = channel();
    let (goes_on, waits) = channel::<()>();
    let waits = Mutex::new(waits);
    let server =
        HttpServer::tcp(ANY_PORT, "test", limits, &HttpSecurity::default(), move |_: &HttpRequest| {
            // The test waits for both.
            let _gone = begun.send(());
            let _gone = waits.lock().unwrap().recv_timeout(PATIENCE);
            HttpResponse::text(200, "")
        })
        .unwrap();
    let addr = server.addr().unwrap();
    std::thread::scope(|scope| {
        let ask_one = || ask(addr, "GET / HTTP/1.1\r\n\r\n");
        let answered: Vec<_> = (0..2).map(|_| scope.spawn(ask_one)).collect();
        (0..2).for_each(|_| begins.recv_timeout(PATIENCE).unwrap());
        assert!(ask_one().starts_with("HTTP/1.1 503 "));
        (0..3).for_each(|_| goes_on.send(()).unwrap());
        assert!(answered.into_iter().all(|one| one.join().unwrap().starts_with("HTTP/1.1 200 ")));
        until_answered(addr);
    });
}

/// Mutation that makes it fail: a client that sends nothing keeps its place.
#[test]
fn clients_without_a_request_keep_nobody_out() {
    let limits = HttpLimits { client_time: PATIENCE * 2, connections: 8, ..HttpLimits::default() };
    let (_server, addr) = server(limits);
    let idle: Vec<_> = (0..200).map(|_| connect(addr)).collect();
    until_answered(addr);
    drop(idle);
}

/// Asks until there is an answer: those that lost their place may still be about to end.
fn until_answered(addr: SocketAddr) {
    let until = Instant::now() + PATIENCE;
    while !ask(addr, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 ") {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_unix_socket_is_private_and_goes_with_its_server() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/admin.sock");
    let server = HttpServer::unix(&path, "test", HttpLimits::default(), echo).unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    let mut stream = UnixStream::connect(server.path().unwrap()).unwrap();
    stream.write_all(b"GET /x HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"/x\""), "{answer}");
    let second = HttpServer::unix(&path, "test", HttpLimits::default(), echo).unwrap_err();
    assert!(second.to_string().contains("another process listens"), "{second}");
    drop(server);
    assert!(!path.exists());
}
