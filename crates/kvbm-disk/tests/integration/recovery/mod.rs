//! What is found after a restart, a crash, and in directories that are not ours.

mod directories;
mod journal;
mod restart;
mod syncs;

const HEADER: usize = 4096;
const RECORD: usize = 80;
