//! The leader and its ranks under one seed.
//!
//! **Knows:** the leader and nodes of remote memory as their users see them, the wire form of plans
//! and reports, and the rules that ARCHITECTURE.md calls invariants.
//! **Must never know:** the inside of any crate that it tests. Nothing uses it: it is a test.
//!
//! `SeedRun` drives a real manager over a simulated clock, links and ranks that crash, stall,
//! repeat themselves and lie. Their disks and volumes are real too, over simulated media. After
//! each step it compares what the manager says with what the world knows. docs/simulation.md says
//! how a seed is replayed. `NodesRun` drives many nodes of remote memory, which read from each
//! other.
//!
//! Only a build with `RUSTFLAGS="--cfg kvbm_sim"` has any of it; `cargo xtask sim` makes one.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `nodes` | many nodes that read from each other | `run`, `random` |
//! | `run` | one seed from the first step to the last | `named`, `owned`, `bench`, `plan`, `world` |
//! | `named` | an engine whose G1 is its own memory | `bench`, `plan`, `world` |
//! | `owned` | an engine whose G1 is a pool of kvbm's | `bench`, `prompts`, `plan`, `world` |
//! | `check` | the invariants | `bench` |
//! | `bench` | what both engines share: requests, an operator, accidents | `prompts`, `plan`, `world`, `random` |
//! | `plan` | what a seed decides before the first step | `world`, `random` |
//! | `world` | ranks, disks, links, a store, and what happens next | `prompts`, `random` |
//! | `prompts` | the prompts of a run | `random` |
//! | `random` | numbers that a seed decides | - |

#![cfg(kvbm_sim)]
#![deny(unsafe_code)]

mod bench;
mod check;
mod named;
#[allow(unsafe_code, reason = "memory that transfers write; one thread runs a simulation")]
mod nodes;
mod owned;
mod plan;
mod prompts;
mod random;
mod run;
mod world;

pub use nodes::{Counts, NodesRun};
pub use run::{Outcome, SeedRun, note_panics};
