//! Why a server does not listen, or a client has no TLS.

use kvbm_link::TlsError;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// A server that cannot listen as it is asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address cannot be bound, or the system refuses a thread.
    #[error("http = {addr}: {source}; choose a free port, or port 0 for any")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Other machines reach the address, and could read what is sent or send requests.
    #[error("http = {addr}: other machines can reach it, and {lacks}")]
    Exposed {
        /// The address.
        addr: SocketAddr,
        /// What is missing, and the way out.
        lacks: &'static str,
    },
    /// The file of the token cannot be used, or a file does not go with the other settings.
    #[error("{setting} = {}: {why}", path.display())]
    File {
        /// Which setting names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}
