//! Settings of servers over HTTP.

use super::{AdminConfig, ConfigError, MetricsConfig};
use crate::http::HttpSecurity;
use std::net::SocketAddr;

impl AdminConfig {
    /// Whom `admin.http` serves, and how.
    pub fn security(&self) -> HttpSecurity {
        let Self { socket: _, http: _, token_file, tls_cert, tls_key, client_ca, insecure } = self.clone();
        HttpSecurity { token_file, tls_cert, tls_key, client_ca, insecure }
    }
}

impl MetricsConfig {
    /// Whom `metrics.http` serves, and how.
    pub fn security(&self) -> HttpSecurity {
        let Self { http: _, token_file, tls_cert, tls_key, client_ca, insecure } = self.clone();
        HttpSecurity { token_file, tls_cert, tls_key, client_ca, insecure }
    }
}

/// Whether the settings of a section go together. Without an address none may be set.
pub(super) fn validate(
    section: &'static str,
    addr: Option<SocketAddr>,
    security: &HttpSecurity,
) -> Result<(), ConfigError> {
    if let Some(addr) = addr {
        return security.check_settings(addr).map_err(|source| ConfigError::Http { section, source });
    }
    let HttpSecurity { token_file, tls_cert, tls_key, client_ca, insecure } = security;
    if *insecure {
        let (key, value) =
            if section == "admin" { ("admin.insecure", "true") } else { ("metrics.insecure", "true") };
        let rule = format!("has no use without {section}.http");
        return Err(ConfigError::Rule { key, value: value.to_owned(), rule });
    }
    let files =
        [("token_file", token_file), ("tls_cert", tls_cert), ("tls_key", tls_key), ("client_ca", client_ca)];
    let unused = files.into_iter().find_map(|(setting, path)| Some((setting, path.clone()?)));
    unused.map_or(Ok(()), |(setting, path)| {
        let why = format!("has no use without {section}.http");
        let source = crate::http::HttpError::File { setting, path, why };
        Err(ConfigError::Http { section, source })
    })
}
