//! An HTTP server for `GET /metrics` alone.

use std::net::SocketAddr;
use std::time::Duration;

use super::Metrics;
use crate::http::{HttpError, HttpLimits, HttpRequest, HttpResponse, HttpSecurity, HttpServer};

/// Nobody has more to say than a request line.
const LIMITS: HttpLimits =
    HttpLimits { client_time: Duration::from_secs(2), head_bytes: 8 << 10, body_bytes: 0, connections: 16 };

/// Serves `GET /metrics` until dropped.
#[derive(Debug)]
pub struct MetricsServer {
    addr: SocketAddr,
    _server: HttpServer,
}

impl MetricsServer {
    pub(super) fn start(
        metrics: Metrics,
        addr: SocketAddr,
        security: &HttpSecurity,
    ) -> Result<Self, HttpError> {
        let answer = move |request: &HttpRequest| respond(request, &metrics);
        let server = HttpServer::tcp(addr, "kvbm-metrics", LIMITS, security, answer)?;
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
