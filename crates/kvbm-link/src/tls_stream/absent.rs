//! What a build without the feature `tls` has in place of TLS: errors that say so.

use crate::address::TlsFiles;
use crate::pem::TlsError;
use std::io;
use std::net::TcpStream;
use std::time::Instant;

/// There is none.
pub(crate) enum TlsStream {}

/// The side of whoever listens: there is none.
pub(crate) enum TlsAcceptor {}

impl TlsAcceptor {
    pub(crate) fn load(_: &TlsFiles) -> Result<Self, TlsError> {
        Err(TlsError::NoTls)
    }

    pub(crate) fn accept(&self, _: TcpStream, _: Instant) -> io::Result<TlsStream> {
        match *self {}
    }
}

pub(crate) fn connect(_: &TlsFiles, _: &str, _: TcpStream, _: Instant) -> io::Result<TlsStream> {
    Err(io::Error::other(TlsError::NoTls))
}

impl TlsStream {
    pub(crate) fn socket(&self) -> &TcpStream {
        match *self {}
    }

    pub(crate) fn read_waiting(&self, _: &mut [u8]) -> io::Result<Option<usize>> {
        match *self {}
    }

    pub(crate) fn read(&self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(crate) fn write_all(&self, _: &[u8]) -> io::Result<()> {
        match *self {}
    }
}
