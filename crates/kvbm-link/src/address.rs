//! Where a worker listens, and what both ends of a line over TCP show each other.

#[cfg(feature = "tls")]
use crate::pem::PemFile;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// How an address on TCP begins.
const TCP: &str = "tcp://";
/// Longest name of a host in bytes (RFC 1035).
const MAX_HOST: usize = 253;

/// Where a worker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerAddress {
    /// A Unix socket, for processes of the same user.
    Unix(PathBuf),
    /// TCP, over TLS alone.
    Tcp {
        /// A name, or an address. The worker's certificate is for it.
        host: String,
        /// Port; a worker that listens at port 0 gets any free one.
        port: u16,
        /// What this end shows, and whom it trusts.
        files: TlsFiles,
    },
}

/// PEM files of one end of a line over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This end's certificate, and those that lead to its authority.
    pub cert: PathBuf,
    /// The certificate's private key, mode 0600.
    pub key: PathBuf,
    /// The authorities of the other end. Whoever has a certificate of theirs is trusted: they are
    /// for leaders and workers alone.
    pub ca: PathBuf,
}

/// A text that says no place where a worker may listen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerAddressError {
    /// Not an address.
    #[error("must be tcp://HOST:PORT, such as tcp://10.0.0.5:7700, or the path of a Unix socket")]
    Malformed,
    /// TCP without certificates.
    #[error(
        "a line over TCP needs certificates of both ends: set tls_cert, tls_key and tls_ca, or name a Unix socket"
    )]
    NeedsTls,
    /// This build cannot use certificates.
    #[error("this build has no TLS: build it with the feature tls, or name a Unix socket")]
    NoTls,
}

impl WorkerAddress {
    /// Reads `tcp://HOST:PORT`, or else the path of a Unix socket.
    ///
    /// # Errors
    /// [`WorkerAddressError`]: TCP without certificates, or in a build that has no TLS.
    pub fn parse(text: &Path, files: Option<&TlsFiles>) -> Result<Self, WorkerAddressError> {
        let Some(address) = text.to_str().and_then(|text| text.strip_prefix(TCP)) else {
            return Ok(Self::Unix(text.to_owned()));
        };
        let (host, port) = address.rsplit_once(':').ok_or(WorkerAddressError::Malformed)?;
        let port = port.parse().map_err(|_| WorkerAddressError::Malformed)?;
        let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match literal {
            Some(literal) if literal.parse::<IpAddr>().is_ok() => literal,
            None if is_host(host) => host,
            _ => return Err(WorkerAddressError::Malformed),
        };
        if cfg!(not(feature = "tls")) {
            return Err(WorkerAddressError::NoTls);
        }
        let files = files.ok_or(WorkerAddressError::NeedsTls)?.clone();
        Ok(Self::Tcp { host: host.to_owned(), port, files })
    }

    /// The same place with the port that the system chose.
    pub(crate) fn at_port(&self, chosen: u16) -> Self {
        match self {
            Self::Unix(_) => self.clone(),
            Self::Tcp { host, files, .. } => {
                Self::Tcp { host: host.clone(), port: chosen, files: files.clone() }
            }
        }
    }
}

fn is_host(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !text.is_empty() && text.len() <= MAX_HOST && text.bytes().all(allowed)
}

impl<P: AsRef<Path>> From<P> for WorkerAddress {
    fn from(path: P) -> Self {
        Self::Unix(path.as_ref().to_owned())
    }
}

impl fmt::Display for WorkerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port, .. } if host.contains(':') => write!(f, "{TCP}[{host}]:{port}"),
            Self::Tcp { host, port, .. } => write!(f, "{TCP}{host}:{port}"),
        }
    }
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// Certificate, key and authorities, with the settings that name them.
    pub(crate) fn named(&self) -> [PemFile; 3] {
        [("tls_cert", &self.cert), ("tls_key", &self.key), ("tls_ca", &self.ca)]
            .map(|(setting, path)| PemFile { setting, path: path.clone() })
    }
}

/// The addresses of a host. The system's resolver may take longer than `time`, and is not waited
/// for then.
pub(crate) fn resolve(host: &str, port: u16, time: Duration) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (send, found) = mpsc::sync_channel(1);
    let name = host.to_owned();
    let ask = move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        // Nobody waits any more where that fails.
        let _late = send.send(addresses);
    };
    std::thread::Builder::new().name("kvbm-link-name".into()).spawn(ask)?;
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no address of {host} was found in time"));
    found.recv_timeout(time).map_err(late)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_shown() {
        let files = TlsFiles { cert: "c".into(), key: "k".into(), ca: "a".into() };
        let read = |text: &str| WorkerAddress::parse(Path::new(text), Some(&files));
        assert_eq!(read("/run/kvbm/0.sock"), Ok(WorkerAddress::Unix("/run/kvbm/0.sock".into())));
        for text in ["tcp://10.0.0.5:7700", "tcp://[::1]:7700", "tcp://rank-0.kvbm.local:0"] {
            if cfg!(feature = "tls") {
                assert_eq!(read(text).unwrap().to_string(), text);
                assert_eq!(WorkerAddress::parse(Path::new(text), None), Err(WorkerAddressError::NeedsTls));
            } else {
                assert_eq!(read(text), Err(WorkerAddressError::NoTls));
            }
        }
        for wrong in
            ["tcp://", "tcp://x", "tcp://x:", "tcp://:1", "tcp://x:99999", "tcp://::1:7", "tcp://a b:1"]
        {
            assert_eq!(read(wrong), Err(WorkerAddressError::Malformed), "{wrong}");
        }
        assert_eq!(read("tcp://[x]:1"), Err(WorkerAddressError::Malformed));
    }

    #[test]
    fn a_name_is_looked_up_within_its_time() {
        let found = resolve("localhost", 7, Duration::from_secs(30)).unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 7), "{found:?}");
        assert_eq!(resolve("::1", 7, Duration::ZERO).unwrap(), ["[::1]:7".parse().unwrap()]);
    }
}
