//! The agent over NIXL (feature `nixl`).
//!
//! # Modules of this folder
//! | module | what it is |
//! |---|---|
//! | `agent` | the agent: registration, peers, notifications |
//! | `objects` | bodies of objects in a bucket |
//! | `request` | one transfer, and what outlives its handle |
//! | `lists` | NIXL's lists and options, freed when dropped |
//! | `handle` | the agent's handle, its back ends, and the order in which all of it ends |
//! | `signals` | keeps the process's signal handlers |
//! | `library` | finds and loads the library |
//! | `sys` | NIXL's C functions |

mod agent;
mod handle;
mod library;
mod lists;
mod objects;
mod request;
mod signals;
mod sys;

pub use agent::NixlAgent;
pub use objects::{NixlObjects, ObjectError, ObjectTransfer};
