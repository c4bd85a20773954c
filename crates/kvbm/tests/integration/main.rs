//! The integration tests of `kvbm`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod admin;
mod admission;
mod bytes;
mod chains;
mod checksums;
mod compressed_volumes;
mod disk_faults;
mod disk_shapes;
mod disk_unwritable;
mod encrypted_files;
mod encryption;
mod encryption_volumes;
mod engine;
mod engine_promotion;
mod engine_staging;
mod engine_tickets;
mod errors;
mod event_engine_format;
mod event_engine_hashes;
mod event_transport;
mod events;
mod fail_closed;
mod forget;
mod g1_memory;
mod hints;
mod joins;
mod late_reads;
mod layers;
mod lifetime;
mod links;
mod losses;
mod lossy_volumes;
mod offload;
mod opaque;
mod park;
#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
mod priorities;
#[path = "../../../kvbm-volume/tests/support/random.rs"]
mod random;
mod rank_chaos;
mod recordings;
mod replicated;
mod shared_places;
mod signed;
mod slow_tiers;
mod speculation;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
mod tiers;
mod volume;
mod volume_races;
mod volume_shapes;
mod volume_verdicts;
mod volumes;
mod without_host;
mod without_host_volumes;
mod worker_server;
