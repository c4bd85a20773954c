//! As much of HTTP/1.1 as metrics, the index and administration need: one request a connection,
//! over TCP or a Unix socket, bounded in bytes, time and connections.
//!
//! ```
//! use kvbm::http::{HttpLimits, HttpRequest, HttpResponse, HttpServer};
//! use std::io::{Read, Write};
//!
//! let answer = |request: &HttpRequest| HttpResponse::text(200, format!("{}\n", request.path));
//! let server = HttpServer::tcp("127.0.0.1:0".parse()?, "hello", HttpLimits::default(), answer)?;
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
//! | `server` | listens, and has a thread for each connection | `request`, `response`, `stream` |
//! | `request` | reading a request | `response`, `stream` |
//! | `response` | an answer | - |
//! | `stream` | a connection with one deadline | - |

mod request;
mod response;
mod server;
mod stream;
#[cfg(test)]
mod tests;

pub use request::HttpRequest;
pub use response::HttpResponse;
pub use server::{HttpLimits, HttpServer, HttpService};
pub use stream::DeadlineStream;
