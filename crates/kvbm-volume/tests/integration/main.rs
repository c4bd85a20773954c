//! The integration tests of `kvbm-volume`, one module a subject, in one program.

mod corpus;
mod model;
#[path = "../support/random.rs"]
mod random;
mod volumes;
