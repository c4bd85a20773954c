//! Calls without the GIL, without panics, and only in the process that made an object.

use crate::errors::{Error, Kind, Result};
use pyo3::prelude::*;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The process that made an object. Threads do not survive a fork, so a child must not use what its
/// parent made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    pub(crate) fn is_this(self) -> bool {
        self == Self::this()
    }

    pub(crate) fn check(self, what: &str) -> Result<()> {
        if self.is_this() {
            return Ok(());
        }
        let (made, here) = (self.0, std::process::id());
        Err(Error::new(
            Kind::Forked,
            format!(
                "{what} was made in process {made} and is used in process {here}, which was forked from it: \
                 its threads are not here; make {what} after the fork, or start processes with `spawn`"
            ),
        ))
    }
}

/// Runs `call` with the GIL; a panic becomes an error.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // What a panic leaves half done is behind locks of kvbm's own, which do not poison.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(internal(&*panic)))
}

/// Runs `call` without the GIL; a panic becomes an error.
pub(crate) fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    Ok(py.detach(|| caught(call))?)
}

/// Drops `object` without the GIL where this thread holds it. In a process that was forked it is
/// leaked: what it would join is not there.
pub(crate) fn drop_detached<T: Send>(made: Process, object: T) {
    if !made.is_this() {
        std::mem::forget(object);
        return;
    }
    let mut object = Some(object);
    let dropped = Python::try_attach(|py| {
        let object = object.take();
        py.detach(|| drop_quietly(object));
    });
    if dropped.is_none() {
        drop_quietly(object);
    }
}

fn drop_quietly<T>(object: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(object))) {
        tracing::error!(panic = message(&*panic), "a panic while an object was dropped");
    }
}

fn internal(panic: &(dyn Any + Send)) -> Error {
    Error::new(
        Kind::Internal,
        format!("kvbm panicked: {}; this is a defect of kvbm, please report it", message(panic)),
    )
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Panics inside a guarded call, so that tests see what a panic becomes.
#[pyfunction]
pub(crate) fn _panic_for_tests(py: Python<'_>) -> PyResult<()> {
    detached(py, || panic!("asked for by a test"))
}
