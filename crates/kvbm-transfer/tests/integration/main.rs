//! The integration tests of `kvbm-transfer`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod agent_io;
mod control;
mod direct;
mod faults;
mod paths;
mod random;
#[path = "../support/mod.rs"]
mod support;
mod volumes;
