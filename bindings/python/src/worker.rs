//! `Worker`: the worker of one rank, for a manager in another process.

use crate::closable::Closable;
use crate::config::Config;
use crate::cuda::EngineEvents;
use crate::errors::{Error, Kind, Result};
use crate::guard::detached;
use crate::integers::{block_ids, seconds};
use crate::layout::Layout;
use crate::loads::FinishedPlan;
use kvbm::config::Capacity;
use kvbm::plan::deadline_after;
use kvbm::{Rank, WorkerServer};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// The worker of one rank: it has the engine's tensors of that rank and listens at a socket for the
/// manager, which is in another process.
///
/// Close it (or use it in a `with` statement): the socket's file is removed then.
#[pyclass(module = "kvbm_rs", frozen, subclass)]
pub(crate) struct Worker {
    socket: PathBuf,
    open: Closable<Open>,
}

/// A worker that was not closed yet.
struct Open {
    server: Arc<WorkerServer>,
    thread: Option<JoinHandle<()>>,
    /// Where the engine's tensors lie on a device.
    events: Option<Arc<EngineEvents>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        // No copy writes to the engine's tensors when the thread is over.
        (self.server.stopper())();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a worker panicked");
        }
    }
}

impl Worker {
    fn server(&self) -> Result<Arc<WorkerServer>> {
        Ok(self.parts()?.0)
    }

    fn parts(&self) -> Result<(Arc<WorkerServer>, Option<Arc<EngineEvents>>)> {
        self.open.get(|open| (Arc::clone(&open.server), open.events.clone()))
    }
}

#[pymethods]
impl Worker {
    /// Allocates the host memory of `rank`, one of `ranks`, and listens at `socket`, whose folder
    /// only this user may write to. `config` and `model` (the namespace's) are those of the
    /// manager. Does not wait for the manager, which may start earlier or later.
    #[new]
    #[pyo3(signature = (config, layout, *, model, rank, ranks, socket))]
    fn new(
        py: Python<'_>,
        config: &Config,
        layout: &Layout,
        model: String,
        rank: u16,
        ranks: u32,
        socket: PathBuf,
    ) -> PyResult<Self> {
        let mut settings = config.settings.clone();
        settings.model = layout.model()?;
        // G1 is the engine's.
        settings.device.capacity = Capacity::NONE;
        settings.namespace.model = model;
        settings.parallelism.tensor_parallel = ranks;
        let bound = layout.bind(py)?;
        let at = socket.clone();
        let open = detached(py, move || {
            let events = bound.device.clone().map(EngineEvents::new).transpose()?.map(Arc::new);
            let server = Arc::new(WorkerServer::bind(&settings, Rank(rank), &bound.g1(), &at)?);
            let serving = Arc::clone(&server);
            let thread = std::thread::Builder::new().name(format!("kvbm-worker-{rank}"));
            let thread = thread.spawn(move || serving.serve());
            let thread = thread.map_err(|error| {
                let text = format!("cannot start the worker's thread: {error}; raise the limit of threads");
                Error::new(Kind::Build, text)
            })?;
            Ok(Open { server, thread: Some(thread), events })
        })?;
        Ok(Self { socket, open: Closable::new("Worker", open) })
    }

    /// Where it listens.
    #[getter]
    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    /// The engine has passed the point that the manager calls `number` (`KvBlockManager.fence`), or
    /// has when `after` is complete: copies that wait for it start then. `after` is for tensors on
    /// a CUDA device: a `torch.cuda.Event` or the number of a `CUevent`, recorded once on the
    /// engine's stream and not destroyed before it is complete; an object is kept until then.
    #[pyo3(signature = (number, after = None))]
    fn signal(&self, py: Python<'_>, number: u64, after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (server, events) = self.parts()?;
        let event = EngineEvents::signalled(events.as_deref(), after, "worker")?;
        detached(py, move || {
            server.register_event(number, &event);
            Ok(())
        })
    }

    /// Waits until no copy of this rank touches these blocks. The ids that are still busy after
    /// `timeout` seconds.
    fn wait_idle(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, timeout: f64) -> PyResult<Vec<u32>> {
        let (ids, timeout, server) = (block_ids(ids)?, seconds(timeout)?, self.server()?);
        detached(py, move || {
            let busy = server.wait_idle(&ids, deadline_after(Instant::now(), timeout)).err();
            Ok(busy.map_or_else(Vec::new, |busy| busy.blocks.iter().map(|id| id.0).collect()))
        })
    }

    /// Parts of loads that are over on this rank, oldest first, each once.
    /// `KvBlockManager.load_tags` says which load one belongs to. The last 4096 are kept until they
    /// are taken.
    fn drain_finished(&self, py: Python<'_>) -> PyResult<Vec<FinishedPlan>> {
        let server = self.server()?;
        let finished = detached(py, move || Ok(server.drain_finished()))?;
        Ok(finished.into_iter().map(FinishedPlan::from).collect())
    }

    /// Stops when no copy touches the engine's tensors any more. With a `timeout`, the manager is
    /// told before, and saves what only this worker holds: that is waited for, so many seconds at
    /// most. Whether the manager let it go, or there is none; the manager's log says what it
    /// could not save. A second call does nothing.
    #[pyo3(signature = (timeout = 0.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        let is_saved = match self.server() {
            Ok(server) if !timeout.is_zero() => detached(py, move || Ok(server.leave(timeout)))?,
            _ => true,
        };
        self.open.close(py)?;
        Ok(is_saved)
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
        self.close(py, 0.0).map(drop)
    }

    fn __repr__(&self) -> String {
        format!("Worker({})", self.socket.display())
    }
}
