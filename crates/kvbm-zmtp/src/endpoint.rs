//! Addresses, and sockets bound to them.

use std::fmt;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

/// `tcp://HOST:PORT` or `ipc://PATH`. To bind, the host `*` means every interface and the port `*`
/// or 0 any free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ZmtpEndpoint {
    /// A host name or address, without brackets, and a port.
    Tcp {
        /// Name, address or `*`.
        host: String,
        /// 0 for any free port.
        port: u16,
    },
    /// The path of a Unix socket.
    Ipc(PathBuf),
}

/// A text that is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address: write tcp://HOST:PORT or ipc://PATH")]
pub struct EndpointError(String);

/// Time between two attempts to bind.
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// The reading half of a socket.
pub type SocketReader = Box<dyn AsyncRead + Send + Unpin>;
/// The writing half of a socket.
pub type SocketWriter = Box<dyn AsyncWrite + Send + Unpin>;

type Halves = (SocketReader, SocketWriter);

impl ZmtpEndpoint {
    /// Whether only this machine reaches it.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            }
            Self::Ipc(_) => true,
        }
    }

    /// Connects; see [`connect`](crate::connect) for a time limit.
    pub(crate) async fn connect(&self) -> std::io::Result<Halves> {
        match self {
            Self::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                if stream.local_addr()? == stream.peer_addr()? {
                    // No socket listens there, and the system chose that very port as our own: this
                    // connection would keep the peer from binding it.
                    return Err(ErrorKind::ConnectionRefused.into());
                }
                tcp_halves(stream)
            }
            Self::Ipc(path) => connect_ipc(path).await,
        }
    }

    /// Binds the address. While it is in use this tries again until `deadline`: the process that
    /// used it before may still be ending.
    ///
    /// # Errors
    /// Of the operating system.
    pub async fn listen(&self, deadline: Instant) -> std::io::Result<EndpointListener> {
        loop {
            match self.bind().await {
                Err(error)
                    if error.kind() == ErrorKind::AddrInUse && Instant::now() + BIND_PAUSE < deadline =>
                {
                    tokio::time::sleep(BIND_PAUSE).await;
                }
                bound => return bound,
            }
        }
    }

    async fn bind(&self) -> std::io::Result<EndpointListener> {
        match self {
            Self::Tcp { host, port } => {
                let name = if host == "*" { "0.0.0.0" } else { host.as_str() };
                // Sets SO_REUSEADDR: closed connections in TIME_WAIT do not block the port.
                let listener = TcpListener::bind((name, *port)).await?;
                Ok(EndpointListener(Bound::Tcp { listener, host: host.clone(), port: *port }))
            }
            Self::Ipc(path) => bind_ipc(path).await,
        }
    }
}

impl FromStr for ZmtpEndpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = || EndpointError(text.to_owned());
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

impl fmt::Display for ZmtpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

/// A bound socket. Dropping it removes the file of an ipc address.
#[derive(Debug)]
pub struct EndpointListener(Bound);

#[derive(Debug)]
enum Bound {
    Tcp {
        listener: TcpListener,
        host: String,
        port: u16,
    },
    #[cfg(unix)]
    Ipc {
        listener: tokio::net::UnixListener,
        path: PathBuf,
    },
}

impl EndpointListener {
    /// Where it listens, with the port that it got.
    pub fn endpoint(&self) -> ZmtpEndpoint {
        match &self.0 {
            Bound::Tcp { listener, host, port } => {
                let port = listener.local_addr().map_or(*port, |address| address.port());
                ZmtpEndpoint::Tcp { host: host.clone(), port }
            }
            #[cfg(unix)]
            Bound::Ipc { path, .. } => ZmtpEndpoint::Ipc(path.clone()),
        }
    }

    pub(crate) async fn accept(&self) -> std::io::Result<Halves> {
        match &self.0 {
            Bound::Tcp { listener, .. } => tcp_halves(listener.accept().await?.0),
            #[cfg(unix)]
            Bound::Ipc { listener, .. } => Ok(unix_halves(listener.accept().await?.0)),
        }
    }
}

#[cfg(unix)]
impl Drop for EndpointListener {
    fn drop(&mut self) {
        if let Bound::Ipc { path, .. } = &self.0 {
            // Without this the next process has to remove it, which it does as well.
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
async fn bind_ipc(path: &std::path::Path) -> std::io::Result<EndpointListener> {
    use std::os::unix::fs::FileTypeExt;
    let listener = match tokio::net::UnixListener::bind(path) {
        // A killed process leaves a socket file that no process serves. Any other file stays.
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
    Ok(EndpointListener(Bound::Ipc { listener, path: path.to_owned() }))
}

#[cfg(not(unix))]
async fn connect_ipc(_path: &std::path::Path) -> std::io::Result<Halves> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(not(unix))]
async fn bind_ipc(_path: &std::path::Path) -> std::io::Result<EndpointListener> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, wanted, local) in [
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", true),
            ("tcp://[::1]:5557", "tcp://[::1]:5557", true),
            ("tcp://localhost:*", "tcp://localhost:0", true),
            ("ipc:///run/sock", "ipc:///run/sock", true),
            ("tcp://*:5557", "tcp://*:5557", false),
            ("tcp://host.example:5557", "tcp://host.example:5557", false),
        ] {
            let endpoint: ZmtpEndpoint = text.parse().unwrap();
            assert_eq!((endpoint.to_string().as_str(), endpoint.is_local()), (wanted, local));
        }
        for wrong in ["", "tcp://", "tcp://:1", "tcp://host", "tcp://host:99999", "udp://host:1", "ipc://"] {
            let error = wrong.parse::<ZmtpEndpoint>().unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("tcp://HOST:PORT"), "{error}");
        }
    }
}
