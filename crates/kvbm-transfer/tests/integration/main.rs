//! The integration tests of `kvbm-transfer`, one module a subject, in one program.

mod control;
mod faults;
mod paths;
mod random;
#[path = "../support/mod.rs"]
mod support;
mod volumes;
