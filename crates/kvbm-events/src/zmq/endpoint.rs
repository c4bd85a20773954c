//! Addresses of sockets, and connections over them.

use super::NAME;
use crate::TransportError;
use std::fmt;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

/// `tcp://HOST:PORT` or `ipc://PATH`. The host `*` means every interface, the port `*` or 0 any free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Ipc(PathBuf),
}

/// Time between two attempts to bind.
const AGAIN: Duration = Duration::from_millis(20);

/// Both ends of a connection.
pub(super) type Halves = (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>);

impl Endpoint {
    /// Reads an address; without `insecure`, only one of this machine.
    pub(super) fn read(text: &str, insecure: bool) -> Result<Self, TransportError> {
        let endpoint: Self = text.parse()?;
        if insecure || endpoint.is_local() {
            return Ok(endpoint);
        }
        Err(refused(format!(
            "{text} can be reached from other machines and ZeroMQ asks nobody who he is: use an address of this machine, \
             or say `insecure`"
        )))
    }

    fn is_local(&self) -> bool {
        match self {
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            }
            Self::Ipc(_) => true,
        }
    }

    pub(super) async fn connect(&self) -> std::io::Result<Halves> {
        match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                if stream.local_addr()? == stream.peer_addr()? {
                    // Nobody listens there, and the system gave us that very port to come from: we would keep the publisher from
                    // binding it.
                    return Err(ErrorKind::ConnectionRefused.into());
                }
                tcp_halves(stream)
            }
            Self::Ipc(path) => connect_ipc(path).await,
        }
    }

    /// Listens. While another listens there this tries again until `deadline`: of an engine that is started anew, the old
    /// process may not have ended yet.
    pub(super) async fn listen_by(&self, deadline: Instant) -> std::io::Result<Listener> {
        loop {
            match self.listen().await {
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() + AGAIN < deadline => {
                    tokio::time::sleep(AGAIN).await;
                }
                bound => return bound,
            }
        }
    }

    async fn listen(&self) -> std::io::Result<Listener> {
        match self {
            Self::Tcp { host, port } => {
                let host = if host == "*" { "0.0.0.0" } else { host.as_str() };
                // Sets SO_REUSEADDR: old connections that linger (TIME_WAIT) are not in the way.
                Ok(Listener::Tcp(TcpListener::bind((host, *port)).await?, self.clone()))
            }
            Self::Ipc(path) => listen_ipc(path).await,
        }
    }
}

impl FromStr for Endpoint {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let wrong = || refused(format!("{text:?} is no address: write tcp://HOST:PORT or ipc://PATH"));
        if let Some(path) = text.strip_prefix("ipc://").filter(|path| !path.is_empty()) {
            return Ok(Self::Ipc(path.into()));
        }
        let (host, port) =
            text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let port = if port == "*" { 0 } else { port.parse().map_err(|_| wrong())? };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(wrong());
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

/// A bound socket.
pub(super) enum Listener {
    Tcp(TcpListener, Endpoint),
    #[cfg(unix)]
    Ipc(tokio::net::UnixListener, PathBuf),
}

impl Listener {
    /// Where it listens, with the port that it got.
    pub(super) fn endpoint(&self) -> Endpoint {
        match self {
            Self::Tcp(listener, Endpoint::Tcp { host, port }) => {
                let port = listener.local_addr().map_or(*port, |address| address.port());
                Endpoint::Tcp { host: host.clone(), port }
            }
            Self::Tcp(_, other) => other.clone(),
            #[cfg(unix)]
            Self::Ipc(_, path) => Endpoint::Ipc(path.clone()),
        }
    }

    pub(super) async fn accept(&self) -> std::io::Result<Halves> {
        match self {
            Self::Tcp(listener, _) => tcp_halves(listener.accept().await?.0),
            #[cfg(unix)]
            Self::Ipc(listener, _) => Ok(unix_halves(listener.accept().await?.0)),
        }
    }
}

#[cfg(unix)]
impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Ipc(_, path) = self {
            // Left behind, it would only be in the way of the next one, who removes it as well.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn tcp_halves(stream: TcpStream) -> std::io::Result<Halves> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    Ok((Box::new(read), Box::new(write)))
}

#[cfg(unix)]
fn unix_halves(stream: tokio::net::UnixStream) -> Halves {
    let (read, write) = stream.into_split();
    (Box::new(read), Box::new(write))
}

#[cfg(unix)]
async fn connect_ipc(path: &std::path::Path) -> std::io::Result<Halves> {
    tokio::net::UnixStream::connect(path).await.map(unix_halves)
}

#[cfg(unix)]
async fn listen_ipc(path: &std::path::Path) -> std::io::Result<Listener> {
    use std::os::unix::fs::FileTypeExt;
    let listener = match tokio::net::UnixListener::bind(path) {
        // What a process that was killed leaves behind: a socket to which nobody listens. Anything else stays.
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|entry| entry.file_type().is_socket());
            let answer = tokio::net::UnixStream::connect(path).await;
            if !is_socket || !answer.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            tokio::net::UnixListener::bind(path)?
        }
        bound => bound?,
    };
    Ok(Listener::Ipc(listener, path.to_owned()))
}

#[cfg(not(unix))]
async fn connect_ipc(_path: &std::path::Path) -> std::io::Result<Halves> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(not(unix))]
async fn listen_ipc(_path: &std::path::Path) -> std::io::Result<Listener> {
    Err(ErrorKind::Unsupported.into())
}

pub(super) fn refused(reason: String) -> TransportError {
    TransportError::Config { transport: NAME, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, wanted) in [
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
            ("tcp://[::1]:5557", "tcp://[::1]:5557"),
            ("tcp://localhost:*", "tcp://localhost:0"),
            ("ipc:///run/kvbm.sock", "ipc:///run/kvbm.sock"),
        ] {
            assert_eq!(Endpoint::read(text, false).unwrap().to_string(), wanted);
        }
        for wrong in ["", "tcp://", "tcp://:1", "tcp://host", "tcp://host:99999", "udp://host:1", "ipc://"] {
            let error = Endpoint::read(wrong, true).unwrap_err().to_string();
            assert!(error.contains("tcp://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn other_machines_need_a_word() {
        for remote in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://host.example:5557"]
        {
            let error = Endpoint::read(remote, false).unwrap_err().to_string();
            assert!(error.contains(remote) && error.contains("insecure"), "{error}");
            assert!(Endpoint::read(remote, true).is_ok());
        }
    }
}
