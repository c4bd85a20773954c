//! Tests of the public interface: every layout, copy plan and serialized form against naive
//! oracles.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap as tests do")]

mod configs;
mod conformance;
mod fragments;
mod groups;
mod layouts;
mod naive;
mod opaque;
mod plan_errors;
mod plan_oracle;
mod plan_runs;
mod reshard;
mod shapes;
mod slices;
mod strided;
mod wire;
