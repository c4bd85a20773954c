//! Certificates of both sides of TLS 1.3, read from PEM files.

use crate::pem::{PemFile, TlsError};
use crate::private_file;
use parking_lot::Mutex;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a PEM file.
const MAX_PEM: u64 = 1 << 20;
/// How often the files of a server are looked at, for certificates that were renewed.
const RELOAD: Duration = Duration::from_secs(1);

/// Certificate, key and authorities of a server. It reads its files again when they have changed.
pub struct TlsServer {
    files: ServerFiles,
    loaded: Mutex<Loaded>,
}

struct ServerFiles {
    cert: PemFile,
    key: PemFile,
    client_ca: Option<PemFile>,
}

struct Loaded {
    config: Arc<ServerConfig>,
    stamps: Vec<Stamp>,
    looked: Instant,
}

/// What changes with a file: device, inode, size, and the time of the last change.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

impl TlsServer {
    /// Reads the files. With `client_ca`, no client without a certificate of these authorities is
    /// served.
    ///
    /// # Errors
    /// [`TlsError::File`] names the one that cannot be used.
    pub fn load(cert: PemFile, key: PemFile, client_ca: Option<PemFile>) -> Result<Self, TlsError> {
        let files = ServerFiles { cert, key, client_ca };
        let (stamps, config, looked) = (files.stamps(), files.config()?, Instant::now());
        Ok(Self { files, loaded: Mutex::new(Loaded { config, stamps, looked }) })
    }

    /// What the next connection is served with.
    pub fn config(&self) -> Arc<ServerConfig> {
        let mut loaded = self.loaded.lock();
        if loaded.looked.elapsed() >= RELOAD {
            loaded.looked = Instant::now();
            let now = self.files.stamps();
            if now != loaded.stamps {
                match self.files.config() {
                    Ok(config) => {
                        (loaded.config, loaded.stamps) = (config, now);
                        tracing::info!(target: "kvbm", cert = %self.files.cert.path.display(), "a new certificate is in use");
                    }
                    // A file may be half written: the next look finds it whole.
                    Err(error) => {
                        tracing::warn!(target: "kvbm", "the certificate before stays in use: {error}");
                    }
                }
            }
        }
        Arc::clone(&loaded.config)
    }
}

impl ServerFiles {
    fn config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let Self { cert, key, client_ca } = self;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| cert.wrong(error))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let roots = Arc::new(authorities(ca)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| ca.wrong(error))?)
            }
        };
        let (chain, key) = (certificates(cert)?, private_key(key)?);
        let mut config = builder.with_single_cert(chain, key).map_err(|error| cert.wrong(error))?;
        // Nobody resumes a connection.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    fn stamps(&self) -> Vec<Stamp> {
        let stamp = |file: &PemFile| {
            let found = std::fs::metadata(&file.path).ok()?;
            Some((found.dev(), found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
        };
        [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()]
            .into_iter()
            .flatten()
            .map(stamp)
            .collect()
    }
}

/// A client that trusts servers with a certificate of the authorities in `ca`, and shows
/// `identity`, a certificate and its key, to servers that ask for one.
///
/// # Errors
/// [`TlsError::File`] names the file that cannot be used.
pub fn tls_client_config(
    ca: &PemFile,
    identity: Option<[&PemFile; 2]>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| ca.wrong(error))?
        .with_root_certificates(authorities(ca)?);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some([cert, key]) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|error| cert.wrong(error))?,
    };
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(file: &PemFile) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = private_file::read_unwritable(&file.path, MAX_PEM).map_err(|error| file.wrong(error))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(file.wrong("it has no certificate in PEM form")),
        Err(error) => Err(file.wrong(error)),
    }
}

fn private_key(file: &PemFile) -> Result<PrivateKeyDer<'static>, TlsError> {
    let bytes = private_file::read(&file.path, MAX_PEM).map_err(|error| file.wrong(error))?;
    PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|error| file.wrong(format!("no private key in PEM form: {error}")))
}

fn authorities(file: &PemFile) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|error| file.wrong(error))?;
    }
    Ok(roots)
}
