//! The integration tests of `kvbm-tokens`, one module a subject, in one program.

mod golden;
mod identity;
mod properties;
