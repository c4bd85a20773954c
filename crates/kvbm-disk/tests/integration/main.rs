//! The integration tests of `kvbm-disk`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod access;
mod corpus;
mod encrypted;
mod encrypted_keys;
#[path = "../support/fake_io.rs"]
mod fake_io;
mod follow;
mod forged;
mod invariants;
mod io;
mod recovery;
mod ring;
mod scrub;
mod slot_io;
mod stripes;
#[path = "../support/mod.rs"]
mod support;
