//! Who may send requests over TCP, and whether they are encrypted.

use super::error::HttpError;
use super::tls::TlsAcceptor;
use super::token::BearerToken;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Who may send requests to a server on TCP, and how they travel. The default is for addresses of
/// this machine: no token, no encryption.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpSecurity {
    /// File with the token that every request carries, as `Authorization: Bearer TOKEN`: 16 to
    /// 4,096 bytes, mode 0600.
    pub token_file: Option<PathBuf>,
    /// PEM file with the server's certificate and those that lead to its authority. With it the
    /// server speaks TLS 1.3 alone.
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key, mode 0600.
    pub tls_key: Option<PathBuf>,
    /// PEM file with the authorities of clients. Without a certificate of theirs no client is
    /// served.
    pub client_ca: Option<PathBuf>,
    /// Serves at an address that other machines reach also without TLS, or whoever connects.
    pub insecure: bool,
}

impl HttpSecurity {
    /// Whether it goes with `addr`, and its files can be used: before anything is started.
    ///
    /// # Errors
    /// [`HttpError::Exposed`], [`HttpError::File`], [`HttpError::Tls`].
    pub fn check(&self, addr: SocketAddr) -> Result<(), HttpError> {
        self.prepare(addr).map(drop)
    }

    /// Whether these settings go together and with `addr`, without a look at the files.
    ///
    /// # Errors
    /// [`HttpError::Exposed`], [`HttpError::File`].
    pub fn check_settings(&self, addr: SocketAddr) -> Result<(), HttpError> {
        let alone = |setting, path: &Option<PathBuf>, other: &str| {
            let path = path.clone().unwrap_or_default();
            Err(HttpError::File { setting, path, why: format!("needs {other} too") })
        };
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => return alone("tls_cert", &self.tls_cert, "tls_key"),
            (None, Some(_)) => return alone("tls_key", &self.tls_key, "tls_cert"),
            (None, None) if self.client_ca.is_some() => {
                return alone("client_ca", &self.client_ca, "tls_cert and tls_key");
            }
            _ => {}
        }
        if self.insecure || addr.ip().is_loopback() {
            return Ok(());
        }
        if self.tls_cert.is_none() {
            let lacks =
                "nothing is encrypted: set tls_cert and tls_key, use 127.0.0.1, or allow it with insecure";
            return Err(HttpError::Exposed { addr, lacks });
        }
        if self.token_file.is_none() && self.client_ca.is_none() {
            let lacks = "any client would be served: set token_file or client_ca, use 127.0.0.1, or allow it with \
                         insecure";
            return Err(HttpError::Exposed { addr, lacks });
        }
        Ok(())
    }

    pub(super) fn prepare(&self, addr: SocketAddr) -> Result<Prepared, HttpError> {
        self.check_settings(addr)?;
        let token = self.token_file.as_deref().map(BearerToken::read).transpose()?;
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some(TlsAcceptor::load(cert, key, self.client_ca.as_deref())?),
            _ => None,
        };
        Ok(Prepared { token, tls })
    }
}

/// What the files of a server's security say.
pub(super) struct Prepared {
    pub(super) token: Option<BearerToken>,
    pub(super) tls: Option<TlsAcceptor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_reach_needs_encryption_and_a_check_of_the_client() {
        let file = |name: &str| Some(PathBuf::from(name));
        let open = HttpSecurity::default();
        let tls = HttpSecurity { tls_cert: file("c"), tls_key: file("k"), ..open.clone() };
        let checked = |security: &HttpSecurity, addr: &str| {
            security.check_settings(addr.parse().unwrap()).map_err(|error| error.to_string())
        };
        for local in ["127.0.0.1:1", "[::1]:1"] {
            assert_eq!((checked(&open, local), checked(&tls, local)), (Ok(()), Ok(())));
        }
        for far in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            let with_token = HttpSecurity { token_file: file("t"), ..open.clone() };
            for plain in [&open, &with_token] {
                let error = checked(plain, far).unwrap_err();
                assert!(error.contains(far) && error.contains("set tls_cert and tls_key"), "{error}");
                assert_eq!(checked(&HttpSecurity { insecure: true, ..plain.clone() }, far), Ok(()));
            }
            let error = checked(&tls, far).unwrap_err();
            assert!(error.contains("set token_file or client_ca"), "{error}");
            assert_eq!(checked(&HttpSecurity { token_file: file("t"), ..tls.clone() }, far), Ok(()));
            assert_eq!(checked(&HttpSecurity { client_ca: file("a"), ..tls.clone() }, far), Ok(()));
        }
        for (half, why) in [
            (HttpSecurity { tls_cert: file("c"), ..open.clone() }, "tls_cert = c: needs tls_key too"),
            (HttpSecurity { tls_key: file("k"), ..open.clone() }, "tls_key = k: needs tls_cert too"),
            (HttpSecurity { client_ca: file("a"), ..open }, "client_ca = a: needs tls_cert and tls_key too"),
        ] {
            assert_eq!(checked(&half, "127.0.0.1:1").unwrap_err(), why);
        }
    }
}
