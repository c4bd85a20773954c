//! Blocks of a preempted request, in host memory.

use crate::errors::{Error, Kind, Result};
use crate::guard::{Process, detached, drop_detached};
use kvbm::{EngineError, ParkRejected, ParkedGroups};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// Private blocks of a preempted request, in host memory. `KvBlockManager.resume` brings them
/// back, `resume_groups` those of several cache groups. Dropping it, or `close`, forgets them.
#[pyclass(module = "kvbm_rs", frozen)]
pub(crate) struct Parked {
    made: Process,
    blocks: Mutex<Option<ParkedGroups>>,
}

impl Parked {
    pub(crate) fn new(blocks: ParkedGroups) -> Self {
        Self { made: Process::this(), blocks: Mutex::new(Some(blocks)) }
    }

    /// Gives the blocks away; what is rejected stays.
    pub(crate) fn with(
        &self,
        resume: impl FnOnce(ParkedGroups) -> std::result::Result<(), ParkRejected<ParkedGroups, EngineError>>,
    ) -> Result<()> {
        self.made.check("parked blocks")?;
        // Held during the copies: a second call waits, and finds nothing.
        let mut parked = self.blocks.lock();
        let gone = || Error::new(Kind::Closed, "the parked blocks were resumed or closed before");
        let blocks = parked.take().ok_or_else(gone)?;
        resume(blocks).map_err(|rejected| {
            *parked = rejected.blocks;
            Error::from(rejected.error)
        })
    }
}

#[pymethods]
impl Parked {
    /// Blocks that are parked; 0 once they were resumed or closed, and during a resume.
    fn __len__(&self) -> usize {
        // While a resume waits for its copies, the blocks are on their way.
        self.blocks.try_lock().and_then(|blocks| blocks.as_ref().map(ParkedGroups::len)).unwrap_or(0)
    }

    /// Forgets the blocks. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.made.check("parked blocks")?;
        detached(py, || {
            drop(self.blocks.lock().take());
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("Parked({} blocks)", self.__len__())
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if let Some(blocks) = self.blocks.get_mut().take() {
            drop_detached(self.made, blocks);
        }
    }
}
