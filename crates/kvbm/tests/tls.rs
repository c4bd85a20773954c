//! TLS on the servers of a manager, with real handshakes: who is served, who is not, and why.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[path = "../../kvbm-link/tests/support/authority.rs"]
mod authority;

use authority::{Authority, private};
use kvbm::config::{Blocks, ModelConfig};
use kvbm::http::{
    Connection, DeadlineStream, HttpError, HttpLimits, HttpRequest, HttpResponse, HttpSecurity, HttpServer,
    TlsClient, TlsError,
};
use kvbm::{KvBlockManager, Namespace, Owned};
use rcgen::date_time_ymd;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";
const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn client(of: &Authority<'_>, identity: Option<&(PathBuf, PathBuf)>) -> TlsClient {
    let identity = identity.map(|(cert, key)| (cert.as_path(), key.as_path()));
    TlsClient::new(&of.file(), identity).unwrap()
}

fn over_tls((cert, key): &(PathBuf, PathBuf)) -> HttpSecurity {
    HttpSecurity { tls_cert: Some(cert.clone()), tls_key: Some(key.clone()), ..HttpSecurity::default() }
}

fn limits() -> HttpLimits {
    HttpLimits { client_time: PATIENCE, ..HttpLimits::default() }
}

fn serve(limits: HttpLimits, security: &HttpSecurity) -> (HttpServer, SocketAddr) {
    let answer = |request: &HttpRequest| HttpResponse::text(200, format!("{}\n", request.path));
    let server = HttpServer::tcp(any_port(), "test", limits, security, answer).unwrap();
    let addr = server.addr().unwrap();
    (server, addr)
}

fn stream(addr: SocketAddr) -> DeadlineStream {
    DeadlineStream::from(TcpStream::connect(addr).unwrap()).until(Instant::now() + PATIENCE)
}

/// The answer to a request, or what ends the connection: a server may refuse a client after the
/// client's own handshake.
fn ask(client: &TlsClient, name: &str, addr: SocketAddr, request: &[u8]) -> io::Result<String> {
    exchange(client.connect(name, stream(addr))?.as_mut(), request)
}

fn exchange(to: &mut dyn Connection, request: &[u8]) -> io::Result<String> {
    to.write_all(request)?;
    to.flush()?;
    let mut answer = String::new();
    to.read_to_string(&mut answer)?;
    Ok(answer)
}

fn plain(addr: SocketAddr, request: &[u8]) -> String {
    let mut to = stream(addr);
    to.write_all(request).unwrap();
    let mut answer = Vec::new();
    to.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_client_reads_what_a_trusted_server_says_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "other"));
    let (_server, addr) = serve(limits(), &over_tls(&ours.issue("server", |_| {})));
    for name in ["localhost", "127.0.0.1"] {
        // No error at the end: the server has said that it ends there.
        let answer = ask(&client(&ours, None), name, addr, GET).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("/metrics\n"), "{answer}");
    }
    let error = ask(&client(&other, None), "localhost", addr, GET).unwrap_err().to_string();
    assert!(error.contains("UnknownIssuer"), "{error}");
    let error = ask(&client(&ours, None), "elsewhere", addr, GET).unwrap_err().to_string();
    assert!(error.contains("not valid for name"), "{error}");

    let expired = ours.issue("expired", |params| {
        params.not_before = date_time_ymd(2019, 1, 1);
        params.not_after = date_time_ymd(2020, 1, 1);
    });
    let (_server, addr) = serve(limits(), &over_tls(&expired));
    let error = ask(&client(&ours, None), "localhost", addr, GET).unwrap_err().to_string();
    assert!(error.contains("expired"), "{error}");
}

#[test]
fn only_clients_of_the_authority_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "other"));
    let server_cert = ours.issue("server", |_| {});
    let security = HttpSecurity { client_ca: Some(ours.file()), ..over_tls(&server_cert) };
    let (_server, addr) = serve(limits(), &security);
    let known = ours.issue("client", |_| {});
    let answer = ask(&client(&ours, Some(&known)), "localhost", addr, GET).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");

    let (foreign, own) = (other.issue("foreign", |_| {}), Authority::new(folder.path(), "own"));
    let expired = ours.issue("late", |params| params.not_after = date_time_ymd(2020, 1, 1));
    for identity in [None, Some(&foreign), Some(&own.issue("self", |_| {})), Some(&expired)] {
        let refused = ask(&client(&ours, identity), "localhost", addr, GET);
        assert!(refused.is_err(), "{identity:?}: {refused:?}");
    }
    assert!(ask(&client(&ours, Some(&known)), "localhost", addr, GET).is_ok(), "others are served on");
}

#[test]
fn the_token_is_asked_for_behind_the_handshake() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let token_file = folder.path().join("token");
    private(&token_file, TOKEN);
    let security = HttpSecurity { token_file: Some(token_file), ..over_tls(&ours.issue("server", |_| {})) };
    let (_server, addr) = serve(limits(), &security);
    let status = |header: &str| {
        let request = format!("GET /metrics HTTP/1.1\r\n{header}\r\n");
        let answer = ask(&client(&ours, None), "localhost", addr, request.as_bytes()).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status(""), "401");
    assert_eq!(status("Authorization: Bearer 00000000000000000000000000000000\r\n"), "401");
    assert_eq!(status(&format!("Authorization: Bearer {TOKEN}\r\n")), "200");
}

#[test]
fn each_side_says_so_where_the_other_one_does_not_encrypt() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (_server, addr) = serve(limits(), &over_tls(&ours.issue("server", |_| {})));
    let answer = plain(addr, GET);
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("use https://"), "{answer}");

    let (_server, addr) = serve(limits(), &HttpSecurity::default());
    let began = Instant::now();
    let error = client(&ours, None).connect("localhost", stream(addr)).err().unwrap();
    assert!(error.kind() != io::ErrorKind::TimedOut && began.elapsed() < PATIENCE, "{error}");
    assert!(plain(addr, b"\x16\x03\x01\x02\x00").contains("use http://"));
}

/// Mutation that makes it fail: the deadline begins after the handshake.
#[test]
fn a_client_that_stalls_or_sends_nonsense_holds_no_thread() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let limits =
        HttpLimits { client_time: Duration::from_millis(500), connections: 4, ..HttpLimits::default() };
    let (_server, addr) = serve(limits, &over_tls(&ours.issue("server", |_| {})));
    // Nothing; half a head of a record; a record that goes on for ever; a record of nonsense.
    let parts: [&[u8]; 4] = [b"", b"\x16\x03", b"\x16\x03\x01\x40\x00\x01", b"\x16\x03\x01\x00\x04abcd"];
    let stalled: Vec<TcpStream> = parts
        .into_iter()
        .map(|part| {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.write_all(part).unwrap();
            stream
        })
        .collect();
    let until = Instant::now() + PATIENCE;
    while ask(&client(&ours, None), "localhost", addr, GET).is_err() {
        assert!(Instant::now() < until, "all threads are held");
        std::thread::sleep(Duration::from_millis(50));
    }
    for mut stream in stalled {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let ended = stream.read_to_end(&mut Vec::new());
        let is_late = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        assert!(!ended.is_err_and(|error| is_late(&error)), "the server has closed it");
    }
}

#[test]
fn a_renewed_certificate_is_used_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = (Authority::new(folder.path(), "before"), Authority::new(folder.path(), "after"));
    let files = before.issue("server", |_| {});
    let (_server, addr) = serve(limits(), &over_tls(&files));
    assert!(ask(&client(&before, None), "localhost", addr, GET).is_ok());
    // What cannot be used changes nothing.
    private(&files.0, "no certificate");
    std::thread::sleep(Duration::from_millis(1_100));
    assert!(ask(&client(&before, None), "localhost", addr, GET).is_ok());
    assert_eq!(after.issue("server", |_| {}), files, "it has replaced the files");
    let until = Instant::now() + PATIENCE;
    while ask(&client(&after, None), "localhost", addr, GET).is_err() {
        assert!(Instant::now() < until, "the new certificate is not in use");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(ask(&client(&before, None), "localhost", addr, GET).is_err());
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (cert, key) = ours.issue("server", |_| {});
    let (_, other_key) = ours.issue("other", |_| {});
    let shared = folder.path().join("shared.key");
    private(&shared, &fs::read_to_string(&key).unwrap());
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o644)).unwrap();
    let absent = folder.path().join("absent");
    let of = |cert: &Path, key: &Path| over_tls(&(cert.to_owned(), key.to_owned()));
    let with_authority = HttpSecurity { client_ca: Some(key.clone()), ..of(&cert, &key) };
    for (security, setting, why) in [
        (of(&cert, &shared), "tls_key = ", "chmod 600"),
        (of(&cert, &cert), "tls_key = ", "no private key in PEM form"),
        (of(&cert, &absent), "tls_key = ", "No such file"),
        (of(&cert, &other_key), "tls_cert = ", "keys may not be consistent"),
        (of(&key, &key), "tls_cert = ", "no certificate in PEM form"),
        (of(&absent, &key), "tls_cert = ", "No such file"),
        (with_authority, "client_ca = ", "no certificate in PEM form"),
    ] {
        let error = security.check(any_port()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, HttpError::Tls(TlsError::File { .. })), "{text}");
        assert!(text.starts_with(setting) && text.contains(why), "{text}");
    }
}

#[test]
fn a_manager_serves_metrics_and_administration_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (cert, key) = ours.issue("server", |_| {});
    let token_file = folder.path().join("token");
    private(&token_file, TOKEN);
    let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
    let manager = KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(Namespace::new("llama-3-8b"))
        .device(Blocks(64))
        .configure(|config| {
            (config.admin.http, config.metrics.http) = (Some(any_port()), Some(any_port()));
            (config.admin.tls_cert, config.admin.tls_key) = (Some(cert.clone()), Some(key.clone()));
            (config.metrics.tls_cert, config.metrics.tls_key) = (Some(cert), Some(key));
            config.admin.token_file = Some(token_file);
        })
        .build()
        .unwrap();
    let client = client(&ours, None);
    let answer = ask(&client, "localhost", manager.metrics_addr().unwrap(), GET).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("kvbm_"), "{answer}");
    let call = format!("GET /v1/status HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
    let answer = ask(&client, "localhost", manager.admin().http().unwrap(), call.as_bytes()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"capacity\":64"), "{answer}");
}
