//! The agent over real NIXL. `NIXL_CAPI_LIBRARY` names the library, or it lies in one of the usual
//! places; without it these tests fail, so that a build that moves nothing is noticed.

mod kills;
mod namespaces;
mod objects;
mod pitfalls;
mod processes;
mod shapes;
#[path = "../support/shapes.rs"]
mod support;

use std::path::PathBuf;

use kvbm_nixl::{LibrarySearch, NixlAgent, NixlOptions, RemoteAgent, conformance};

/// An agent of this process.
fn agent(name: &str) -> NixlAgent {
    NixlAgent::new(&NixlOptions::new(name)).expect("NIXL's library is needed: `cargo xtask test --only nixl`")
}

fn library() -> PathBuf {
    match NixlOptions::new("any").find_library() {
        LibrarySearch::Found(path) => path,
        missing @ LibrarySearch::NotFound { .. } => panic!("{missing}"),
    }
}

#[test]
fn nixl_conforms() {
    conformance::run(&|name| Box::new(agent(name)) as Box<dyn RemoteAgent>);
}

/// The stub aborts at the first call: what answers is NIXL.
#[test]
fn the_library_is_nixl_and_not_the_stub() {
    assert!(!answers_nothing());
    assert_eq!(agent("not-a-stub").library(), library());
}

fn answers_nothing() -> bool {
    agent("loads-the-library").metadata().expect("metadata of UCX").is_empty()
}
