//! TLS 1.3 over TCP, of which both ends show a certificate.

use crate::address::TlsFiles;
use crate::pem::{TlsError, TlsRefused};
use crate::timed::Timed;
use crate::tls_config::{TlsServer, tls_client_config};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are read from the socket at a time: a record of TLS.
const CHUNK: usize = 16 << 10;
/// What is read of an end that was refused, so that it reads why.
const MAX_DISCARDED: usize = 64 << 10;

/// See the module. One thread reads, and one writes.
pub(crate) struct TlsStream {
    socket: TcpStream,
    state: Mutex<TlsState>,
}

struct TlsState {
    connection: Connection,
    /// What came from the socket and was not decrypted yet.
    encrypted: Vec<u8>,
}

/// The side of whoever listens.
pub(crate) struct TlsAcceptor(TlsServer);

impl TlsAcceptor {
    pub(crate) fn load(files: &TlsFiles) -> Result<Self, TlsError> {
        let [cert, key, ca] = files.named();
        TlsServer::load(cert, key, Some(ca)).map(Self)
    }

    /// The handshake with a client, until a time.
    pub(crate) fn accept(&self, socket: TcpStream, until: Instant) -> io::Result<TlsStream> {
        let connection = ServerConnection::new(self.0.config()).map_err(io::Error::other)?;
        shake_hands(Connection::Server(connection), socket, until)
    }
}

/// The side of whoever connects to `host`. The files are read each time: they may have changed.
pub(crate) fn connect(
    files: &TlsFiles,
    host: &str,
    socket: TcpStream,
    until: Instant,
) -> io::Result<TlsStream> {
    let [cert, key, ca] = files.named();
    let config = tls_client_config(&ca, Some([&cert, &key])).map_err(io::Error::other)?;
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let connection = ClientConnection::new(Arc::clone(&config), name).map_err(io::Error::other)?;
    shake_hands(Connection::Client(connection), socket, until)
}

fn shake_hands(mut connection: Connection, socket: TcpStream, until: Instant) -> io::Result<TlsStream> {
    socket.set_nodelay(true)?;
    let mut line = Timed::until(&socket, until);
    while connection.is_handshaking() {
        if let Err(error) = connection.complete_io(&mut line) {
            discard(&socket, &mut line);
            return Err(name_refusal(error));
        }
    }
    drop(line);
    let state = Mutex::new(TlsState { connection, encrypted: Vec::new() });
    Ok(TlsStream { socket, state })
}

/// Reads what the other end still sends, within bounds. The system resets a connection that is
/// closed with bytes unread, and the other end would not read why it was refused.
fn discard(socket: &TcpStream, line: &mut Timed<'_, TcpStream>) {
    if socket.shutdown(Shutdown::Write).is_ok() {
        let _ended = io::copy(&mut line.take(MAX_DISCARDED as u64), &mut io::sink());
    }
}

fn name_refusal(error: io::Error) -> io::Error {
    if error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>) {
        return io::Error::new(error.kind(), TlsRefused(error.to_string()));
    }
    error
}

impl TlsStream {
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// What was decrypted, or can be, without a look at the socket.
    pub(crate) fn read_waiting(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        self.state.lock().decrypt(bytes)
    }

    /// Reads the socket once. `Interrupted` where a record is not whole yet.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        if let Some(count) = self.read_waiting(bytes)? {
            return Ok(count);
        }
        let mut chunk = [0; CHUNK];
        let count = (&self.socket).read(&mut chunk)?;
        if count == 0 {
            return Ok(0);
        }
        let mut state = self.state.lock();
        state.encrypted.extend_from_slice(&chunk[..count]);
        state.decrypt(bytes)?.ok_or_else(|| io::ErrorKind::Interrupted.into())
    }

    pub(crate) fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut encrypted = Vec::new();
            let mut state = self.state.lock();
            let taken = state.connection.writer().write(bytes)?;
            while state.connection.wants_write() {
                state.connection.write_tls(&mut encrypted)?;
            }
            drop(state);
            if taken == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[taken..];
            (&self.socket).write_all(&encrypted)?;
        }
        Ok(())
    }
}

impl TlsState {
    fn decrypt(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.connection.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other.map(Some),
            }
            if self.encrypted.is_empty() {
                return Ok(None);
            }
            let taken = self.connection.read_tls(&mut &self.encrypted[..])?;
            self.encrypted.drain(..taken);
            let processed = self.connection.process_new_packets();
            processed.map_err(|error| name_refusal(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        }
    }
}
