//! kvbm: the KV-cache block manager.

pub mod config;
pub mod metrics;
