//! What is found after a restart, a crash, and in directories that are not ours.
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod directories;
mod journal;
mod restart;
mod syncs;

const HEADER: usize = 4096;
const RECORD: usize = 80;
