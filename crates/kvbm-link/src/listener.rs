//! Where a worker listens, and who may enter: processes of the same user at a Unix socket, holders
//! of a certificate over TCP. And the other side of both.

use crate::address::{WorkerAddress, resolve};
use crate::peer::Peer;
use crate::socket_file::SocketFile;
use crate::stream::Stream;
use crate::tls_stream::{TlsAcceptor, connect as connect_tls};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest look-up of the name to listen at.
const LOOK_UP: Duration = Duration::from_secs(10);

/// A place where a worker listens.
pub(crate) enum Listener {
    Unix(SocketFile),
    Tcp(TcpListener, TlsAcceptor),
}

/// Whoever has connected, and may be anybody.
pub(crate) enum UnverifiedConnection {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr),
}

impl Listener {
    /// Listens, for accepts that do not wait. Also the place: the port may be one that the system
    /// chose.
    pub(crate) fn bind(at: &WorkerAddress) -> io::Result<(Self, WorkerAddress)> {
        match at {
            WorkerAddress::Unix(path) => Ok((Self::Unix(SocketFile::bind(path)?), at.clone())),
            WorkerAddress::Tcp { host, port, files } => {
                let acceptor = TlsAcceptor::load(files).map_err(io::Error::other)?;
                let listener = TcpListener::bind(&resolve(host, *port, LOOK_UP)?[..])?;
                listener.set_nonblocking(true)?;
                let bound = at.at_port(listener.local_addr()?.port());
                Ok((Self::Tcp(listener, acceptor), bound))
            }
        }
    }

    pub(crate) fn accept(&self) -> io::Result<UnverifiedConnection> {
        match self {
            Self::Unix(socket) => {
                socket.listener.accept().map(|(stream, _)| UnverifiedConnection::Unix(stream))
            }
            Self::Tcp(listener, _) => {
                listener.accept().map(|(stream, address)| UnverifiedConnection::Tcp(stream, address))
            }
        }
    }

    /// Lets in whoever belongs here, until a time.
    pub(crate) fn admit(&self, stranger: UnverifiedConnection, until: Instant) -> io::Result<(Stream, Peer)> {
        match (self, stranger) {
            (Self::Tcp(_, acceptor), UnverifiedConnection::Tcp(stream, address)) => {
                stream.set_nonblocking(false)?;
                let stream = acceptor.accept(stream, until);
                let stream = stream.map_err(|error| of(address, &error))?;
                Ok((Stream::Tls(Box::new(stream)), Peer::elsewhere(address)))
            }
            (_, UnverifiedConnection::Unix(stream)) => {
                stream.set_nonblocking(false)?;
                same_user(stream)
            }
            // Each listener has strangers of its own kind.
            (Self::Unix(_), UnverifiedConnection::Tcp(..)) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl UnverifiedConnection {
    /// Its socket, to hang up on it.
    pub(crate) fn socket(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(OwnedFd::from),
            Self::Tcp(stream, _) => stream.try_clone().map(OwnedFd::from),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.listener.as_fd(),
            Self::Tcp(listener, _) => listener.as_fd(),
        }
    }
}

/// Whether what the other end is shown can be read: before anything is started.
pub(crate) fn check(to: &WorkerAddress) -> io::Result<()> {
    match to {
        WorkerAddress::Unix(_) => Ok(()),
        WorkerAddress::Tcp { files, .. } => TlsAcceptor::load(files).map(drop).map_err(io::Error::other),
    }
}

/// Connects to whoever listens there, within `time`.
pub(crate) fn connect(to: &WorkerAddress, time: Duration) -> io::Result<(Stream, Peer)> {
    match to {
        WorkerAddress::Unix(path) => same_user(UnixStream::connect(path)?),
        WorkerAddress::Tcp { host, port, files } => {
            let until = kvbm_plan::deadline_after(Instant::now(), time);
            let left = || until.saturating_duration_since(Instant::now());
            let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
            for address in resolve(host, *port, time)? {
                if left().is_zero() {
                    break;
                }
                match TcpStream::connect_timeout(&address, left()) {
                    Ok(stream) => {
                        let stream = connect_tls(files, host, stream, until)?;
                        return Ok((Stream::Tls(Box::new(stream)), Peer::elsewhere(address)));
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

fn same_user(stream: UnixStream) -> io::Result<(Stream, Peer)> {
    let peer = Peer::of(&stream)?;
    peer.expect_same_user()?;
    Ok((Stream::Unix(stream), peer))
}

fn of(address: SocketAddr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{address}: {error}"))
}
