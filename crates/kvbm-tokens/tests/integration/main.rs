//! The integration tests of `kvbm-tokens`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod golden;
mod identity;
mod properties;
