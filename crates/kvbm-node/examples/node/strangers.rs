//! Strangers, who send random bytes to a socket that listens.

use crate::Random;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{Read, Result as IoResult, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Connections that a stranger holds open and silent, at most.
const HELD: usize = 64;
/// Time that a stranger waits for room to write.
const WRITE: Duration = Duration::from_millis(50);
/// Time that a client of TLS waits for an answer.
const ANSWER: Duration = Duration::from_millis(200);
/// Longest stream.
const LONGEST: u64 = 4096;

/// Where a socket listens, and how an honest stream begins there.
pub(crate) struct Socket {
    pub(crate) name: &'static str,
    address: Address,
    prefix: &'static [u8],
    streams: AtomicU64,
    refused: AtomicU64,
    /// Who comes over TLS, where certificates decide.
    tls: Option<TlsStrangers>,
    /// Longest time between two answers to the honest client, in milliseconds.
    pub(crate) longest_wait: AtomicU64,
}

pub(crate) enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// The head of a record of TLS, and of a client's first message in it.
pub(crate) const CLIENT_HELLO: &[u8] = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";

/// The head of a frame of the line between processes: 64 bytes of the first kind.
pub(crate) const FRAME: &[u8] = b"\x40\0\0\0\x01";

/// The greeting of ZMTP 3.0 with the mechanism NULL (RFC 23 of `ZeroMQ`).
pub(crate) const GREETING: &[u8] = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
    \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

impl Socket {
    pub(crate) fn new(name: &'static str, address: Address, prefix: &'static [u8]) -> Self {
        let [streams, refused, longest_wait] = [(); 3].map(|()| AtomicU64::new(0));
        Self { name, address, prefix, streams, refused, tls: None, longest_wait }
    }

    pub(crate) fn over_tls(name: &'static str, address: SocketAddr, strangers: TlsStrangers) -> Self {
        Self { tls: Some(strangers), ..Self::new(name, Address::Tcp(address), CLIENT_HELLO) }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "streams": self.streams.load(Ordering::Relaxed),
            "refused": self.refused.load(Ordering::Relaxed),
            "longest_wait_s": self.longest_wait.load(Ordering::Relaxed) as f64 / 1000.0,
            "alerts": self.tls.as_ref().map(|tls| tls.alerts.load(Ordering::Relaxed)),
        })
    }

    /// Comes once; the line is open as long as what this returns.
    fn visit(&self, random: &mut Random, bytes: &mut Vec<u8>) -> IoResult<Box<dyn Write>> {
        bytes.clear();
        if let (Some(tls), Address::Tcp(address)) = (&self.tls, &self.address) {
            match random.below(16) {
                0 => return tls.shake_hands(*address, random),
                1..4 => {
                    bytes.extend(tls.half_a_hello(random));
                    return self.send(bytes);
                }
                4 | 5 => bytes.extend_from_slice(TEXT),
                _ => {}
            }
        }
        if random.below(2) == 0 && bytes.is_empty() {
            bytes.extend_from_slice(self.prefix);
        }
        let length = random.below(LONGEST) * random.below(2);
        bytes.extend((0..length.div_ceil(8)).flat_map(|_| random.below(u64::MAX).to_le_bytes()));
        self.send(bytes)
    }

    /// Connects, and sends some of `bytes`.
    fn send(&self, bytes: &[u8]) -> IoResult<Box<dyn Write>> {
        Ok(match &self.address {
            Address::Unix(path) => {
                let mut stream = UnixStream::connect(path)?;
                stream.set_write_timeout(Some(WRITE))?;
                // Who listens may close the line before all is written.
                let _ = stream.write_all(bytes);
                Box::new(stream)
            }
            Address::Tcp(address) => {
                let mut stream = TcpStream::connect(address)?;
                stream.set_write_timeout(Some(WRITE))?;
                let _ = stream.write_all(bytes);
                Box::new(stream)
            }
        })
    }
}

/// What is no TLS.
const TEXT: &[u8] = b"GET / HTTP/1.1\r\nhost: kvbm\r\n\r\n";

/// Sends `rate` streams a second until it is over. Some begin as an honest one, some stay open.
pub(crate) fn attack(socket: &Socket, rate: u64, mut random: Random, over: &AtomicBool) {
    let begun = Instant::now();
    let mut held = VecDeque::new();
    let mut bytes = Vec::new();
    for count in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let due = begun + Duration::from_nanos(count * 1_000_000_000 / rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        match socket.visit(&mut random, &mut bytes) {
            Ok(stream) => {
                socket.streams.fetch_add(1, Ordering::Relaxed);
                if random.below(16) == 0 {
                    held.push_back(stream);
                }
                if held.len() > HELD {
                    held.pop_front();
                }
            }
            Err(_) => {
                socket.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Clients of TLS that must not be served: one without a certificate, and one with a certificate of
/// another authority.
pub(crate) struct TlsStrangers {
    configs: [Arc<ClientConfig>; 2],
    /// How many were told that their certificate will not do.
    alerts: AtomicU64,
}

impl TlsStrangers {
    /// They trust the authority `ca`; `foreign` is a certificate of another one, and its key.
    pub(crate) fn new(ca: &Path, (cert, key): &(PathBuf, PathBuf)) -> Self {
        let builder = || {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
            builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots)
        };
        let cert = vec![CertificateDer::from_pem_file(cert).unwrap()];
        let key = PrivateKeyDer::from_pem_file(key).unwrap();
        let foreign = builder().with_client_auth_cert(cert, key).unwrap();
        let configs = [builder().with_no_client_auth(), foreign].map(Arc::new);
        Self { configs, alerts: AtomicU64::new(0) }
    }

    fn connection(&self, random: &mut Random) -> ClientConnection {
        let config = &self.configs[random.below(2) as usize];
        let name = ServerName::try_from("127.0.0.1").unwrap();
        ClientConnection::new(Arc::clone(config), name).unwrap()
    }

    /// The begin of a handshake.
    fn half_a_hello(&self, random: &mut Random) -> Vec<u8> {
        let mut hello = Vec::new();
        self.connection(random).write_tls(&mut hello).unwrap();
        hello.truncate(random.below(hello.len() as u64 + 1) as usize);
        hello
    }

    /// A whole handshake, and a frame.
    fn shake_hands(&self, address: SocketAddr, random: &mut Random) -> IoResult<Box<dyn Write>> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.set_write_timeout(Some(WRITE))?;
        let mut connection = self.connection(random);
        let mut stream = Stream::new(&mut connection, &mut socket);
        let answer = stream.write_all(FRAME).and_then(|()| stream.read(&mut [0]));
        let said = answer.as_ref().err().and_then(|error| error.get_ref()?.downcast_ref());
        if let Some(rustls::Error::AlertReceived(_)) = said {
            self.alerts.fetch_add(1, Ordering::Relaxed);
        }
        assert!(!matches!(answer, Ok(1..)), "a stranger was served");
        Ok(Box::new(socket))
    }
}
