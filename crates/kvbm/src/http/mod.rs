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
//! | `fuzz` | a part of the fuzz target `request` | `request`, `limits`, `connection` |
//! | `server` | listens, and has a thread for each connection | `security`, `token`, `request`, `limits`, `tls`, `error`, `response`, `connection`, `stream` |
//! | `security` | who may send requests, and whether they are encrypted | `token`, `tls`, `error` |
//! | `token` | the token that requests carry | `error` |
//! | `request` | reading a request | `limits`, `response`, `connection` |
//! | `limits` | what a server and its clients may use | - |
//! | `tls` | TLS 1.3 for both sides of a connection | `error`, `connection`, `stream` |
//! | `tls_absent` | errors in place of `tls`, where the feature is off | `error`, `connection`, `stream` |
//! | `error` | why a server does not listen, or a client has no TLS | - |
//! | `response` | an answer | - |
//! | `connection` | a connection, in the clear or over TLS | `stream` |
//! | `stream` | a connection with one deadline | - |

mod connection;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod fuzz;
mod limits;
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
pub use error::HttpError;
pub use limits::HttpLimits;
pub use request::HttpRequest;
pub use response::HttpResponse;
pub use security::HttpSecurity;
pub use server::{HttpServer, HttpService};
pub use stream::DeadlineStream;
pub use tls::TlsClient;

// Part of this module's errors.
pub use kvbm_link::TlsError;
