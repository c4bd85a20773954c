//! Calls of operators to a running manager, over a Unix socket and HTTP.
//!
//! `admin.socket` and `admin.http` of the configuration say where it listens. Both have the same
//! calls with JSON, which `kvbm ctl` makes; docs/operate.md lists them. The socket serves processes
//! of the same user, HTTP whoever has the token, over TLS where `admin.tls_cert` is set.
//!
//! ```
//! use kvbm::KvBlockManager;
//! use kvbm::config::{Blocks, ModelConfig};
//! use kvbm::Namespace;
//! use std::io::{Read, Write};
//! use std::os::unix::net::UnixStream;
//!
//! # let folder = std::env::temp_dir().join(format!("kvbm-admin-{}", std::process::id()));
//! let path = folder.join("admin.sock");
//! let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
//! let manager = KvBlockManager::<kvbm::Owned>::builder()
//!     .model(model)
//!     .namespace(Namespace::new("llama-3-8b"))
//!     .device(Blocks(64))
//!     .configure(|config| config.admin.socket = Some(path.clone()))
//!     .build()?;
//! let mut call = UnixStream::connect(&path)?;
//! call.write_all(b"GET /v1/status HTTP/1.1\r\nHost: kvbm\r\n\r\n")?;
//! let mut answer = String::new();
//! call.read_to_string(&mut answer)?;
//! assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"capacity\":64"));
//! # drop(manager);
//! # std::fs::remove_dir_all(folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | a part of the fuzz target `request` | `call_arguments` |
//! | `calls` | each call, carried out | `call_arguments`, `host`, `status_json` |
//! | `status_json` | the status as JSON | `host` |
//! | `call_arguments` | what a call asks for | - |
//! | `host` | what only the process knows that the manager is in | - |

mod call_arguments;
mod calls;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod host;
mod status_json;

pub(crate) use calls::AdminCalls;
pub use host::{AdminEngine, AdminHost};

use crate::config::AdminConfig;
use crate::http::{HttpError, HttpLimits, HttpRequest, HttpResponse, HttpServer, HttpService};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A prompt of a million tokens fits.
const LIMITS: HttpLimits = HttpLimits {
    client_time: Duration::from_secs(5),
    head_bytes: 16 << 10,
    body_bytes: 8 << 20,
    connections: 32,
};

/// A manager that cannot be administered as it is configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The socket cannot be listened at.
    #[error("admin.socket = {}: {source}", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The address cannot be listened at, or a file cannot be used.
    #[error("admin.{0}")]
    Http(#[from] HttpError),
}

/// Where a manager is administered. It listens until the manager is dropped.
#[derive(Debug)]
pub struct Admin {
    servers: Vec<HttpServer>,
    calls: Arc<AdminCalls>,
}

impl Admin {
    /// Whether the files that `config` names can be used: before anything is started.
    ///
    /// # Errors
    /// [`AdminError::Http`].
    pub(crate) fn check(config: &AdminConfig) -> Result<(), AdminError> {
        config.http.map_or(Ok(()), |addr| Ok(config.security().check(addr)?))
    }

    pub(crate) fn start(config: &AdminConfig, calls: AdminCalls) -> Result<Self, AdminError> {
        let calls = Arc::new(calls);
        let mut servers = Vec::new();
        if let Some(path) = &config.socket {
            let of_user = Calls(Arc::clone(&calls));
            let server = HttpServer::unix(path, "kvbm-admin", LIMITS, of_user);
            servers.push(server.map_err(|source| AdminError::Socket { path: path.clone(), source })?);
        }
        if let Some(addr) = config.http {
            let of_clients = Calls(Arc::clone(&calls));
            servers.push(HttpServer::tcp(addr, "kvbm-admin-http", LIMITS, &config.security(), of_clients)?);
        }
        Ok(Self { servers, calls })
    }

    /// The Unix socket that it listens at.
    pub fn socket(&self) -> Option<&Path> {
        self.servers.iter().find_map(HttpServer::path)
    }

    /// The address that it listens at: with the port that was chosen, if 0 was configured.
    pub fn http(&self) -> Option<SocketAddr> {
        self.servers.iter().find_map(HttpServer::addr)
    }

    /// Says what only this process knows, or can do. The first one counts.
    pub fn hosted_by(&self, host: Arc<dyn AdminHost>) {
        self.calls.set_host(host);
    }
}

/// Calls of whom the server lets in: it has asked the kernel for the user, or for the token.
struct Calls(Arc<AdminCalls>);

impl HttpService for Calls {
    fn answer(&self, request: &HttpRequest) -> HttpResponse {
        self.0.answer(request)
    }
}
