//! A daemon and its engines, in one process: what is found, what is copied, who is refused.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod attach;
mod calls;
mod copies;
mod groups;
mod hostile;
mod restarts;
mod successor;
