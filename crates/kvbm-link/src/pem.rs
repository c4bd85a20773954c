//! PEM files, and what is wrong with them.

use std::path::PathBuf;

/// A PEM file, and the setting that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PemFile {
    /// The setting, for errors.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
}

/// TLS that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be used.
    #[error("{setting} = {}: {why}", path.display())]
    File {
        /// Which setting names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Certificates are named, and this build cannot use them.
    #[error("this build has no TLS: build it with the feature tls")]
    NoTls,
}

/// A handshake of TLS that failed at one of the ends.
#[derive(Debug, thiserror::Error)]
#[error("TLS: {0}; see tls_cert and tls_ca of both ends")]
pub(crate) struct TlsRefused(pub(crate) String);

#[cfg(feature = "tls")]
impl PemFile {
    /// What is wrong with it.
    pub(crate) fn wrong(&self, why: impl std::fmt::Display) -> TlsError {
        TlsError::File { setting: self.setting, path: self.path.clone(), why: why.to_string() }
    }
}
