//! `Fence`: a point of the engine's work that copies wait for.

use crate::errors::{Error, Result};
use pyo3::prelude::*;

/// A point of the engine's work, named by `fence` or `fence_after` of the object that it is given
/// to.
#[pyclass(module = "kvbm_rs", frozen)]
pub(crate) struct Fence(Point);

#[derive(Clone, Copy)]
enum Point {
    /// Of a manager.
    Manager(kvbm::Fence),
    /// Of an engine that a node daemon serves: the number by which its ranks pass it.
    Node(u64),
}

impl From<kvbm::Fence> for Fence {
    fn from(fence: kvbm::Fence) -> Self {
        Self(Point::Manager(fence))
    }
}

impl Fence {
    /// A point of an engine that a node daemon serves.
    pub(crate) fn node(number: u64) -> Self {
        Self(Point::Node(number))
    }

    /// As a manager takes it.
    pub(crate) fn of_manager(given: Option<&Self>) -> Result<Option<kvbm::Fence>> {
        match given.map(|fence| fence.0) {
            None => Ok(None),
            Some(Point::Manager(fence)) => Ok(Some(fence)),
            Some(Point::Node(_)) => Err(foreign("a NodeEngine", "this manager")),
        }
    }

    /// As a node daemon takes it.
    pub(crate) fn of_node(given: Option<&Self>) -> Result<Option<u64>> {
        match given.map(|fence| fence.0) {
            None => Ok(None),
            Some(Point::Node(number)) => Ok(Some(number)),
            Some(Point::Manager(_)) => Err(foreign("a KvBlockManager", "this NodeEngine")),
        }
    }
}

fn foreign(made: &str, here: &str) -> Error {
    Error::argument(format!("the fence was made by {made}: give one that {here} has made"))
}
