//! TLS 1.3 for both sides of a connection.

use super::connection::{Connection, TLS_HANDSHAKE};
use super::error::HttpError;
use super::stream::DeadlineStream;
use kvbm_link::{PemFile, TlsServer, tls_client_config};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ConnectionCommon, ServerConnection, SideData, StreamOwned};
use std::io::{self, Write};
use std::ops::DerefMut;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The server's side. It reads its files again when they have changed.
pub(super) struct TlsAcceptor(TlsServer);

impl TlsAcceptor {
    /// Reads the files.
    ///
    /// # Errors
    /// [`HttpError::Tls`] names the one that cannot be used.
    pub(super) fn load(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self, HttpError> {
        let client_ca = client_ca.map(|path| pem("client_ca", path));
        Ok(Self(TlsServer::load(pem("tls_cert", cert), pem("tls_key", key), client_ca)?))
    }

    /// The handshake with a client, until the stream's deadline. A client without TLS comes back.
    pub(super) fn accept(
        &self,
        stream: DeadlineStream,
    ) -> io::Result<Result<Box<dyn Connection>, DeadlineStream>> {
        if stream.first_byte()?.is_some_and(|byte| byte != TLS_HANDSHAKE) {
            return Ok(Err(stream));
        }
        let connection = ServerConnection::new(self.0.config()).map_err(io::Error::other)?;
        handshake(StreamOwned::new(connection, stream)).map(Ok)
    }
}

/// The client's side.
#[derive(Clone, Debug)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
}

impl TlsClient {
    /// Trusts servers with a certificate of the authorities in the PEM file `ca`, and shows
    /// `identity`, a certificate and its key in PEM files, to servers that ask for one.
    ///
    /// # Errors
    /// [`HttpError::Tls`]: a file cannot be used.
    pub fn new(ca: &Path, identity: Option<(&Path, &Path)>) -> Result<Self, HttpError> {
        let identity = identity.map(|(cert, key)| [pem("cert", cert), pem("key", key)]);
        let config = tls_client_config(&pem("ca", ca), identity.as_ref().map(|[cert, key]| [cert, key]))?;
        Ok(Self { config })
    }

    /// The handshake with the server that was called as `host`, a name or an address, until the
    /// stream's deadline.
    ///
    /// # Errors
    /// No certificate of `host` by an authority that is trusted, a server without TLS, or the end
    /// of the connection.
    pub fn connect(&self, host: &str, stream: DeadlineStream) -> io::Result<Box<dyn Connection>> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let connection = ClientConnection::new(Arc::clone(&self.config), name).map_err(io::Error::other)?;
        handshake(StreamOwned::new(connection, stream))
    }
}

impl<C, S> Connection for StreamOwned<C, DeadlineStream>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Send,
    S: SideData,
{
    fn set_deadline(&mut self, deadline: Instant) {
        self.sock.set_deadline(deadline);
    }

    fn finish(&mut self) -> io::Result<()> {
        self.conn.send_close_notify();
        self.flush()?;
        self.sock.finish()
    }
}

fn handshake<C, S>(mut tls: StreamOwned<C, DeadlineStream>) -> io::Result<Box<dyn Connection>>
where
    C: DerefMut<Target = ConnectionCommon<S>> + Send + 'static,
    S: SideData,
{
    while tls.conn.is_handshaking() {
        tls.conn.complete_io(&mut tls.sock)?;
    }
    Ok(Box::new(tls))
}

fn pem(setting: &'static str, path: &Path) -> PemFile {
    PemFile { setting, path: path.to_owned() }
}
