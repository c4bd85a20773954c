//! Hints of the caller, under every policy, against a naive model of what they promise.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ends;
mod pins;
mod table;
mod ttl;
mod world;
