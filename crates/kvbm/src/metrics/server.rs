//! An HTTP server for `GET /metrics` alone.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::Metrics;
use crate::http::{HttpLimits, HttpRequest, HttpResponse, HttpServer};

/// Nobody has more to say than a request line.
const LIMITS: HttpLimits =
    HttpLimits { client_time: Duration::from_secs(2), head_bytes: 8 << 10, body_bytes: 0, connections: 16 };

/// The endpoint could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be bound, or the system refuses a thread.
    #[error("cannot serve metrics on {addr}: {source}; choose a free port, or port 0 for any")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The address can be reached from other machines, and there is no authentication.
    #[error(
        "will not serve metrics on {addr}: other machines could reach it and there is no authentication; \
         use 127.0.0.1, or serve_public if that is meant"
    )]
    NotLoopback {
        /// The address.
        addr: SocketAddr,
    },
}

/// Serves `GET /metrics` until dropped.
#[derive(Debug)]
pub struct MetricsServer {
    addr: SocketAddr,
    _server: HttpServer,
}

impl MetricsServer {
    pub(super) fn start(metrics: Metrics, addr: SocketAddr, public: bool) -> Result<Self, ServeError> {
        if !public && !addr.ip().is_loopback() {
            return Err(ServeError::NotLoopback { addr });
        }
        let server = HttpServer::tcp(addr, "kvbm-metrics", LIMITS, move |request: &HttpRequest| {
            respond(request, &metrics)
        })
        .map_err(|source| ServeError::Bind { addr, source })?;
        Ok(Self { addr: server.addr().unwrap_or(addr), _server: server })
    }

    /// Where it listens: the port that was chosen, if 0 was asked for.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

fn respond(request: &HttpRequest, metrics: &Metrics) -> HttpResponse {
    let only = "kvbm serves GET /metrics\n";
    match (request.method.as_str(), request.path.as_str()) {
        ("GET" | "HEAD", "/metrics") => metrics.response(),
        (_, "/metrics") => HttpResponse { headers: "Allow: GET, HEAD\r\n", ..HttpResponse::text(405, only) },
        _ => HttpResponse::text(404, only),
    }
}
