//! The integration tests of `kvbm-volume`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod compressed;
mod corpus;
mod encrypted;
mod lossy;
mod model;
#[path = "../support/random.rs"]
mod random;
mod volumes;
