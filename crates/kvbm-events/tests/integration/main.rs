//! The integration tests of `kvbm-events`, one module a subject, in one program.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod deadlines;
mod follower;
mod libzmq;
mod loss;
mod nats;
mod nats_bucket;
mod nats_login;
mod publisher;
mod publishing;
mod snapshot;
#[path = "../support/mod.rs"]
mod support;
mod tracker;
mod vllm;
mod wire;
mod zmq;
mod zmq_engine;
mod zmq_restarts;
