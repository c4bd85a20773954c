//! What a build without the feature `tls` has in place of TLS: errors that say so.

use super::connection::Connection;
use super::error::HttpError;
use super::stream::DeadlineStream;
use kvbm_link::TlsError;
use std::io;
use std::path::Path;

/// The server's side: there is none.
pub(super) enum TlsAcceptor {}

impl TlsAcceptor {
    pub(super) fn load(_: &Path, _: &Path, _: Option<&Path>) -> Result<Self, HttpError> {
        Err(TlsError::NoTls.into())
    }

    pub(super) fn accept(
        &self,
        _: DeadlineStream,
    ) -> io::Result<Result<Box<dyn Connection>, DeadlineStream>> {
        match *self {}
    }
}

/// The client's side: there is none.
#[derive(Clone, Debug)]
pub enum TlsClient {}

impl TlsClient {
    /// Fails: the build lacks TLS.
    ///
    /// # Errors
    /// [`TlsError::NoTls`].
    pub fn new(_: &Path, _: Option<(&Path, &Path)>) -> Result<Self, HttpError> {
        Err(TlsError::NoTls.into())
    }

    /// Nobody has a value to call it with.
    ///
    /// # Errors
    /// None.
    pub fn connect(&self, _: &str, _: DeadlineStream) -> io::Result<Box<dyn Connection>> {
        match *self {}
    }
}
