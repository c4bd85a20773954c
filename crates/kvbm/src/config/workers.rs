//! Where the workers of other processes listen.

use super::{ConfigError, ParallelismConfig};
use kvbm_link::{TlsFiles, WorkerAddress};
use std::path::Path;

impl ParallelismConfig {
    /// A socket, or `tcp://HOST:PORT`, as one of `workers` names it.
    ///
    /// # Errors
    /// [`ConfigError::Rule`]: it is no address, lacks certificates, or the build lacks TLS.
    pub fn worker_address(&self, text: &Path) -> Result<WorkerAddress, ConfigError> {
        let files = self.tls_files()?;
        WorkerAddress::parse(text, files.as_ref()).map_err(|error| ConfigError::Rule {
            key: "parallelism.workers",
            value: text.display().to_string(),
            rule: error.to_string(),
        })
    }

    /// The certificates of this end: all three files, or none.
    pub(super) fn tls_files(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let lacks = |key, path: &Path, missing| {
            let rule = format!("needs parallelism.{missing} too");
            Err(ConfigError::Rule { key, value: path.display().to_string(), rule })
        };
        match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (None, None, None) => Ok(None),
            (Some(cert), Some(key), Some(ca)) => {
                Ok(Some(TlsFiles { cert: cert.clone(), key: key.clone(), ca: ca.clone() }))
            }
            (Some(cert), None, _) => lacks("parallelism.tls_cert", cert, "tls_key"),
            (Some(cert), _, None) => lacks("parallelism.tls_cert", cert, "tls_ca"),
            (None, Some(key), _) => lacks("parallelism.tls_key", key, "tls_cert"),
            (None, None, Some(ca)) => lacks("parallelism.tls_ca", ca, "tls_cert"),
        }
    }
}
