//! `kvbm events serve-index`: who has which prefix, over HTTP.

mod api;
#[cfg(feature = "zmq")]
mod engines;
mod index;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use kvbm::events_plane::{KvIndex, Subscriber};
use kvbm::http::{HttpError, HttpLimits, HttpRequest, HttpResponse, HttpSecurity, HttpServer, TlsError};

use super::follow::{self, FollowArgs, Source};
use crate::args::{WrongUsage, metrics_addr};
use crate::features::command_with;
use crate::interrupt;
use crate::note::note;
use crate::number::whole;
use api::Served;
use index::Index;

/// Options of `kvbm events serve-index`.
#[derive(Clone, Debug, Args)]
pub struct ServeIndexArgs {
    /// Whom to follow.
    #[command(flatten)]
    pub follow: FollowArgs,

    /// Where to listen. A port alone means 127.0.0.1, port 0 any free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8089", value_parser = metrics_addr)]
    pub listen: SocketAddr,

    /// File with the token that every request carries (`Authorization: Bearer TOKEN`), mode 0600.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// PEM file with a certificate: the server speaks TLS 1.3 alone.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the private key of --tls-cert, mode 0600.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// PEM file with the authorities of clients: who has no certificate of theirs is not served.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,

    /// Allow an address that other machines reach also without TLS, or for whoever connects.
    #[arg(long)]
    pub public: bool,

    /// Forget a source that sent nothing for so long; 0 for never [default: 30]. Not for
    /// engines (format=vllm): they have no heartbeat, so a silent one may still run.
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = whole::<u64>(0..=u64::MAX))]
    pub forget_after: Option<u64>,

    /// Different blocks that the index takes in; it takes up to 48 bytes for each block of each
    /// worker, and for those of engines (format=vllm) up to 100 more.
    #[arg(long, value_name = "N", default_value_t = KvIndex::DEFAULT_MAX_BLOCKS, allow_negative_numbers = true, value_parser = whole::<usize>(1..=usize::MAX as u64))]
    pub max_blocks: usize,

    /// Connections that are served at a time, each by a thread; others are answered with 503.
    #[arg(long, value_name = "N", default_value_t = LIMITS.connections, allow_negative_numbers = true, value_parser = whole::<usize>(1..=4096))]
    pub connections: usize,
}

impl ServeIndexArgs {
    fn security(&self) -> HttpSecurity {
        let Self { token_file, tls_cert, tls_key, client_ca, public, .. } = self.clone();
        HttpSecurity { token_file, tls_cert, tls_key, client_ca, insecure: public }
    }
}

/// The error in the words of the options.
fn explain(error: &HttpError) -> String {
    match error {
        HttpError::Bind { addr, source } => {
            format!("cannot listen on {addr}: {source}; choose a free port, or port 0 for any")
        }
        HttpError::Exposed { addr, .. } => format!(
            "--listen {addr}: other machines could reach it: use --tls-cert and --tls-key with --token-file or --client-ca, or 127.0.0.1, or allow it with --public"
        ),
        HttpError::Tls(TlsError::NoTls) => format!("{error}: {}", command_with("tls")),
        other => format!("--{other}").replacen('_', "-", 1),
    }
}

/// Hashes in a query make a long head, those in a body a long body.
const LIMITS: HttpLimits = HttpLimits {
    client_time: Duration::from_secs(5),
    head_bytes: 64 << 10,
    body_bytes: 4 << 20,
    connections: 32,
};

/// Seconds without a sign of life after which a source is forgotten.
const SILENCE: u64 = 30;

/// Serves until it was asked to stop.
pub(super) fn run(args: &ServeIndexArgs) -> Result<()> {
    interrupt::catch();
    let security = args.security();
    security.check_settings(args.listen).map_err(|error| WrongUsage(explain(&error)))?;
    let (url, source) = follow::open(&args.follow)?;
    let index: Arc<dyn Served> = match source {
        Source::Kvbm(transport, receiver) => {
            let silence = Duration::from_secs(args.forget_after.unwrap_or(SILENCE));
            let (subscriber, index) = (Subscriber::new(receiver), KvIndex::new(args.max_blocks));
            Arc::new(Index::new(subscriber, transport, index, silence))
        }
        #[cfg(feature = "zmq")]
        Source::Engines(_) if args.forget_after.is_some_and(|seconds| seconds > 0) => {
            let problem =
                "--forget-after: engines have no heartbeat, so a silent engine may still run; leave it out";
            return Err(WrongUsage(problem.to_owned()).into());
        }
        #[cfg(feature = "zmq")]
        Source::Engines(engines) => Arc::new(engines::EngineIndex::new(engines, args.max_blocks)),
    };
    let served = Arc::clone(&index);
    let answer = move |request: &HttpRequest| {
        let api::Response { status, body } = api::answer(served.as_ref(), request);
        HttpResponse::json(status, &body)
    };
    let limits = HttpLimits { connections: args.connections, ..LIMITS };
    let server = HttpServer::tcp(args.listen, "index", limits, &security, answer)
        .map_err(|error| anyhow::anyhow!(explain(&error)))?;
    let scheme = if args.tls_cert.is_some() { "https" } else { "http" };
    note(&format!("index of {url}: {scheme}://{}", server.addr().unwrap_or(args.listen)));
    while !interrupt::asked() {
        index.follow(follow::TICK)?;
    }
    Ok(())
}
