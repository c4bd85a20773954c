//! What an object of Python holds until it is closed.

use crate::errors::{Error, Kind, Result};
use crate::guard::{Process, caught, detached, drop_detached};
use parking_lot::RwLock;
use pyo3::prelude::*;

/// What an object of Python holds until it is closed. Only the process that made it may use it.
/// What is still open when the object is dropped is dropped without the GIL.
pub(crate) struct Closable<T: Send> {
    /// What errors call the object.
    name: &'static str,
    made: Process,
    open: RwLock<Option<T>>,
}

impl<T: Send> Closable<T> {
    pub(crate) fn new(name: &'static str, open: T) -> Self {
        Self { name, made: Process::this(), open: RwLock::new(Some(open)) }
    }

    /// What `part` takes out of it; an error once it is closed.
    pub(crate) fn get<P>(&self, part: impl FnOnce(&T) -> P) -> Result<P> {
        self.made.check(self.name)?;
        let open = self.open.read();
        open.as_ref().map(part).ok_or_else(|| {
            Error::new(Kind::Closed, format!("the {} was closed: make another one", self.name))
        })
    }

    /// Takes what it holds; `None` where it is closed already.
    pub(crate) fn take(&self) -> Result<Option<T>> {
        self.made.check(self.name)?;
        Ok(self.open.write().take())
    }

    /// Drops what it holds, without the GIL. A second call does nothing.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(open) = self.take()? else { return Ok(()) };
        detached(py, move || {
            caught(move || {
                drop(open);
                Ok(())
            })
        })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.open.read().is_none()
    }
}

impl<T: Send> Drop for Closable<T> {
    fn drop(&mut self) {
        if let Some(open) = self.open.get_mut().take() {
            drop_detached(self.made, open);
        }
    }
}
