//! The integration tests of `kvbm-pool`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod arrivals;
mod bad_policies;
mod batches;
mod entries;
mod invariants;
mod losses;
mod offload;
mod policies;
mod races;
mod transitions;
#[path = "../threads/world.rs"]
mod world;
