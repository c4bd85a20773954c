//! As much of HTTP/1.1 as metrics, the index and administration need: one request a connection,
//! over TCP, TLS or a Unix socket, bounded in bytes, time and connections.
//!
//! ```
//! use kvbm::http::{HttpLimits, HttpRequest, HttpResponse, HttpSecurity, HttpServer};
//! use std::io::{Read, Write};
//!
//! let answer = |request: &HttpRequest| HttpResponse::text(200, format!("{}\n", request.path));
//! let (limits, security) = (HttpLimits::default(), HttpSecurity::default());
//! let server = HttpServer::tcp("127.0.0.1:0".parse()?, "hello", limits, &security, answer)?;
//! let mut client = std::net::TcpStream::connect(server.addr().expect("it listens on TCP"))?;
//! client.write_all(b"GET /here HTTP/1.1\r\nHost: x\r\n\r\n")?;
//! let mut text = String::new();
//! client.read_to_string(&mut text)?;
//! assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("/here\n"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | a part of the fuzz target `request` | `server`, `request`, `response`, `connection` |
//! | `server` | listens, and has a thread for each connection | `security`, `token`, `request`, `tls`, `response`, `connection`, `stream` |
//! | `security` | who may send requests, and whether they are encrypted | `token`, `tls` |
//! | `token` | the token that requests carry | - |
//! | `request` | reading a request | `response`, `connection` |
//! | `tls` | TLS 1.3 for both sides of a connection | `connection`, `stream` |
//! | `response` | an answer | - |
//! | `connection` | a connection, in the clear or over TLS | `stream` |
//! | `stream` | a connection with one deadline | - |

mod connection;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod request;
mod response;
mod security;
mod server;
mod stream;
#[cfg(test)]
mod tests;
#[cfg_attr(not(feature = "tls"), path = "tls_absent.rs")]
mod tls;
mod token;

pub use connection::Connection;
pub use request::HttpRequest;
pub use response::HttpResponse;
pub use security::{HttpError, HttpSecurity};
pub use server::{HttpLimits, HttpServer, HttpService};
pub use stream::DeadlineStream;
pub use tls::TlsClient;

// Part of this module's errors.
pub use kvbm_link::TlsError;
