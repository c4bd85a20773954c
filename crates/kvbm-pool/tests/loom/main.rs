//! The lock and handle protocols under every order of events that threads can make (`--cfg
//! kvbm_loom`).
//!
//! In each model a few threads do one thing each; whatever the order, the last event of a block
//! tells the truth and no slot is lost.
#![cfg(kvbm_loom)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod blocks;
mod copies;
mod forks;
mod removal;
#[path = "../threads/world.rs"]
mod world;

use kvbm_plan::{BlockId, RecoveredBlock, Tier};
use kvbm_pool::{
    ArrivalOutcome, BlockMetadata, Duplicates, EventRecord, EventRecordKind, G1, G2, Lost, PolicyKind,
    RegisterError, TierMask,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use world::{GROUP, World, hashes};

/// Runs `model` in every order of its threads in which these are interrupted no more than a few
/// times.
fn every_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(4));
    builder.check(model);
}

const POLICIES: [PolicyKind; 2] = [PolicyKind::LruLeaf, PolicyKind::Hazard];

const G1_LOST: RegisterError = RegisterError::Lost(Lost { tier: Tier::G1 });
