//! `NodeMover`: copies for one rank of an engine whose cache a node daemon keeps.

use crate::closable::Closable;
use crate::cuda::EngineEvents;
use crate::errors::{Error, Result};
use crate::guard::detached;
use crate::integers::{block_ids, seconds};
use crate::layout::Layout;
use crate::node_engine::{mover_of, status_dict, terms_of};
use kvbm::plan::deadline_after;
use kvbm_node::NodeEngine as Attached;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The mover of one rank, in a process of its own: it copies between the engine's tensors and the
/// daemon's host memory, as the scheduler (`NodeEngine`) asks for.
///
/// It attaches in the background, and again whenever the daemon was gone. Close it, or use it in a
/// `with` statement: the engine's tensors may go away then.
#[pyclass(module = "kvbm_rs", frozen, subclass)]
pub(crate) struct NodeMover {
    open: Closable<Arc<Open>>,
}

/// A mover that was not closed yet.
struct Open {
    engine: Attached,
    /// Where the engine's tensors lie on a device.
    events: Option<EngineEvents>,
}

impl NodeMover {
    fn open(&self) -> Result<Arc<Open>> {
        self.open.get(Arc::clone)
    }
}

#[pymethods]
impl NodeMover {
    /// Attaches to the daemon at `socket` as `rank`, one of `ranks`, of the engine with the name
    /// `engine`, which its scheduler gives too.
    #[new]
    #[pyo3(signature = (socket, layout, *, engine, rank, ranks))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        layout: &Layout,
        engine: String,
        rank: u16,
        ranks: u16,
    ) -> PyResult<Self> {
        if rank >= ranks {
            return Err(Error::argument(format!("rank {rank} of {ranks} ranks: ranks begin at 0")).into());
        }
        let memory = layout.bind(py)?;
        let terms = terms_of(socket, layout, engine, ranks);
        let open = detached(py, move || {
            let events = memory.device.clone().map(EngineEvents::new).transpose()?;
            let engine = Attached::attach(terms, false, vec![mover_of(rank, &memory)])?;
            Ok(Arc::new(Open { engine, events }))
        })?;
        Ok(Self { open: Closable::new("NodeMover", open) })
    }

    /// The engine has passed the point that the scheduler calls `number` (`NodeEngine.fence`) on
    /// this rank, or has when `after` is complete: see `Worker.signal`.
    #[pyo3(signature = (number, after = None))]
    fn signal(&self, py: Python<'_>, number: u64, after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let open = self.open()?;
        let event = EngineEvents::signalled(open.events.as_ref(), after, "mover")?;
        detached(py, move || {
            open.engine.signal(number, &event);
            Ok(())
        })
    }

    /// Waits until no copy of this rank touches these blocks. The ids that are still busy after
    /// `timeout` seconds.
    fn wait_idle(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, timeout: f64) -> PyResult<Vec<u32>> {
        let (ids, timeout, open) = (block_ids(ids)?, seconds(timeout)?, self.open()?);
        detached(py, move || {
            let busy = open.engine.wait_idle(&ids, deadline_after(Instant::now(), timeout)).err();
            Ok(busy.map_or_else(Vec::new, |busy| busy.blocks.iter().map(|id| id.0).collect()))
        })
    }

    /// How it is attached: see `NodeEngine.status`. `ready` is always false: the scheduler knows.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let status = detached(py, move || Ok(open.engine.status()))?;
        status_dict(py, &status)
    }

    /// Detaches; returns when nothing is copied any more. A second call does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.open.close(py)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.open.is_closed()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("NodeMover({})", if self.closed() { "closed" } else { "open" })
    }
}
