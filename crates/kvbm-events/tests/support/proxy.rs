//! A way between two ends of a TCP connection that can be cut, held and led elsewhere. Tests of
//! other crates use it by its path.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A proxy in front of a TCP address whose connections can be cut, or held.
pub(crate) struct Proxy {
    address: SocketAddr,
    shared: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    upstream: Mutex<String>,
    streams: Mutex<Vec<TcpStream>>,
    /// Nothing passes: neither bytes nor new connections.
    held: AtomicBool,
    /// Connections do not tell what kvbm's publishers say of their lives: they look like an
    /// engine's.
    nameless: AtomicBool,
    ended: AtomicBool,
    accepted: AtomicUsize,
}

impl Proxy {
    pub(crate) fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(ProxyState::default());
        let state = Arc::clone(&shared);
        upstream.clone_into(&mut shared.upstream.lock().unwrap());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if state.ended.load(Ordering::SeqCst) {
                    return;
                }
                state.accepted.fetch_add(1, Ordering::SeqCst);
                let upstream = state.upstream.lock().unwrap().clone();
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(upstream)) else {
                    continue;
                };
                let mut streams = state.streams.lock().unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || pass(from, to, &state));
                }
                streams.extend([client, server]);
            }
        });
        Self { address, shared }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same in front of a publisher over `ZeroMQ` whose followers are not to know one life of
    /// it from another, as with engines.
    pub(crate) fn nameless(upstream: &str) -> Self {
        let proxy = Self::start(upstream);
        proxy.shared.nameless.store(true, Ordering::SeqCst);
        proxy
    }

    /// Connections so far, whether they led anywhere or not.
    pub(crate) fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// New connections go there.
    pub(crate) fn lead_to(&self, upstream: &str) {
        upstream.clone_into(&mut self.shared.upstream.lock().unwrap());
    }

    /// Cuts every connection; new ones are welcome.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Holds everything, as a network that lets nothing through, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        self.shared.held.store(held, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

/// Moves bytes until one side ends or the proxy does.
fn pass(mut from: TcpStream, mut to: TcpStream, state: &ProxyState) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        while state.held.load(Ordering::SeqCst) && !state.ended.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let name = b"X-Kvbm-Life";
        if let Some(at) = bytes[..len].windows(name.len()).position(|part| part == name)
            && state.nameless.load(Ordering::SeqCst)
        {
            bytes[at] = b'Y';
        }
        if to.write_all(&bytes[..len]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
