//! The integration tests of `kvbm-link`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod connecting;
mod echo;
mod hostile;
mod processes;
#[cfg(feature = "tls")]
mod tcp;
