//! Connecting: who we are, and whom we trust.

use super::denied::Denied;
use super::{Login, NatsConfig, unavailable};
use crate::TransportError;
use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that the client buffers on their way out: so many batches, no more, are lost with a
/// connection.
const OUTGOING: usize = 16;
/// Messages that the client buffers for one subscription. They are moved to the subscriber's own
/// queue at once.
const INCOMING: usize = 1024;

/// Connects, or says what is in the way. What the server does not permit is noted in `denied` from
/// then on.
pub(super) async fn connect(
    config: &NatsConfig,
    deadline: Instant,
    denied: &Arc<Denied>,
) -> Result<Client, TransportError> {
    let failed =
        |reason: String| unavailable(config.name(), format!("connecting to {}: {reason}", config.url));
    let denied = Arc::clone(denied);
    // rustls panics where a program links two providers and installs none. An installed one stays.
    let _installed = rustls::crypto::ring::default_provider().install_default();
    let options = options(config).map_err(failed)?.event_callback(move |event| {
        denied.observe(&event);
        std::future::ready(())
    });
    match tokio::time::timeout_at(deadline.into(), options.connect(&config.url)).await {
        Ok(Ok(client)) => Ok(client),
        Ok(Err(error)) => Err(failed(explain(config, &error))),
        Err(_) => Err(failed("it took too long; check the address, and that a server listens there".into())),
    }
}

fn options(config: &NatsConfig) -> Result<ConnectOptions, String> {
    let mut options = ConnectOptions::new()
        .name("kvbm-events")
        .connection_timeout(config.connect_timeout)
        .client_capacity(OUTGOING)
        .subscription_capacity(INCOMING)
        .require_tls(config.require_tls)
        .ping_interval(Duration::from_secs(10))
        .reconnect_delay_callback(|attempt| Duration::from_millis(1000.min(20 << attempt.min(6))));
    if let Some(certificates) = &config.root_certificates {
        readable("the authority's certificates", certificates)?;
        options = options.add_root_certificates(certificates.clone());
    }
    if let Some((certificate, key)) = &config.client_certificate {
        readable("the client's certificate", certificate)?;
        readable("the client's key", key)?;
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    match &config.login {
        Login::None => Ok(options),
        Login::Token(token) => Ok(options.token(token.clone())),
        Login::User(user, password) => Ok(options.user_and_password(user.clone(), password.clone())),
        Login::CredentialsFile(file) => {
            let text = read("credentials", file)?;
            // What the parser says may quote the file.
            let wrong =
                |_| format!("{} is no credentials file: it holds a user's JWT and seed", file.display());
            options.credentials(&text).map_err(wrong)
        }
        Login::NkeyFile(file) => {
            let text = read("the key", file)?;
            let seed = text.lines().map(str::trim).find(|line| line.starts_with("SU"));
            let wrong = || format!("{} holds no user's seed: a line that begins with SU", file.display());
            Ok(options.nkey(seed.ok_or_else(wrong)?.to_owned()))
        }
    }
}

/// Said here by its name; the client would only say that something could not be opened.
fn readable(what: &str, file: &Path) -> Result<(), String> {
    std::fs::File::open(file)
        .map(drop)
        .map_err(|error| format!("cannot read {what} {}: {error}", file.display()))
}

fn read(what: &str, file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("cannot read {what} {}: {error}", file.display()))
}

/// What went wrong, and the way out.
fn explain(config: &NatsConfig, error: &ConnectError) -> String {
    let text = error.to_string();
    // What rustls says of certificates comes as an error of the connection.
    let is_tls = error.kind() == ConnectErrorKind::Tls || text.contains("peer certificate");
    let way_out = match error.kind() {
        _ if is_tls => {
            "check that the server's certificate is valid for this host's name, and name its authority's certificates with ca=FILE"
        }
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => match &config.login {
            Login::None => {
                "the server requires credentials: put USER:PASSWORD@ or TOKEN@ before the host, or add creds=FILE or nkey=FILE"
            }
            Login::CredentialsFile(_) | Login::NkeyFile(_) => {
                "the server rejects this key: check that the file is of a user of the server, and that its JWT has not expired"
            }
            Login::User(..) | Login::Token(_) => {
                "the server does not take this user and password, or token: check what stands before the host"
            }
        },
        ConnectErrorKind::Dns => "check the host's name",
        _ => {
            "check the address, that a nats-server listens there, and whether it wants TLS (and a certificate: cert=FILE&key=FILE)"
        }
    };
    format!("{text}; {way_out}")
}
