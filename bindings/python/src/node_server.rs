//! `NodeServer`: the node daemon, for programs in Python.

use crate::closable::Closable;
use crate::config::Config;
use crate::errors::{Error, Kind, Result};
use crate::guard::{caught, detached};
use crate::integers::seconds;
use crate::status::{lost, status_of};
use kvbm_node::{LineTimes, NodeServer as Server};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Name, blocks on each rank, processes, whether all movers can copy.
type EngineRow = (String, u32, Vec<i32>, bool);

/// A node daemon in this process, as `kvbm serve` is: engines attach to its socket.
///
/// Close it, or use it in a `with` statement: what is not on disk by then is lost.
#[pyclass(module = "kvbm_rs", frozen, subclass)]
pub(crate) struct NodeServer {
    open: Closable<Open>,
}

/// A daemon that was not closed yet.
struct Open {
    server: Arc<Server>,
    thread: Option<JoinHandle<()>>,
}

impl Open {
    fn end(&mut self) {
        self.server.stopper()();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a node daemon panicked");
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end();
    }
}

impl NodeServer {
    fn server(&self) -> Result<Arc<Server>> {
        self.open.get(|open| Arc::clone(&open.server))
    }
}

#[pymethods]
impl NodeServer {
    /// Builds the manager of `config` and listens at `socket`, or at its `node.socket`: a private
    /// socket, in a folder in which no other user writes.
    #[new]
    #[pyo3(signature = (config, socket = None))]
    fn new(py: Python<'_>, config: &Config, socket: Option<PathBuf>) -> PyResult<Self> {
        let settings = config.settings.clone();
        let Some(socket) = socket.or_else(|| settings.node.socket.clone()) else {
            return Err(Error::argument("no socket to listen at: give `socket`, or set node.socket").into());
        };
        let open = detached(py, move || {
            let blocks = settings.node.engine_blocks;
            let server = Arc::new(Server::bind(&settings, &socket, blocks, LineTimes::default())?);
            let serving = Arc::clone(&server);
            let thread = std::thread::Builder::new().name("kvbm-node".into()).spawn(move || serving.serve());
            let thread = thread.map_err(|error| {
                let text = format!("cannot start the daemon's thread: {error}; raise the limit of threads");
                Error::new(Kind::Build, text)
            })?;
            Ok(Open { server, thread: Some(thread) })
        })?;
        Ok(Self { open: Closable::new("NodeServer", open) })
    }

    /// Where it listens.
    #[getter]
    fn socket(&self) -> Result<PathBuf> {
        Ok(self.server()?.path().to_owned())
    }

    /// Whether another daemon has taken its place (`kvbm serve --take-over`): close it then, and
    /// end the process.
    #[getter]
    fn handed_over(&self) -> Result<bool> {
        Ok(self.server()?.is_handed_over())
    }

    /// The engines that are attached: name, blocks on each rank, processes, and whether all its
    /// movers can copy.
    fn engines(&self, py: Python<'_>) -> PyResult<Vec<EngineRow>> {
        let server = self.server()?;
        detached(py, move || {
            let engines = server.engines().into_iter();
            Ok(engines.map(|engine| (engine.name, engine.blocks, engine.pids, engine.ready)).collect())
        })
    }

    /// As of a manager: tiers and their blocks.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let server = self.server()?;
        let status = detached(py, move || Ok(server.manager().status()))?;
        status_of(py, &status)
    }

    /// All metrics in the OpenMetrics text format.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        let server = self.server()?;
        detached(py, move || Ok(server.manager().metrics().encode()))
    }

    /// Closes the lines of engines, saves what time allows and stops. What could not be saved, as
    /// text; `None` where all was, or where another daemon has taken over. A second call does
    /// nothing.
    #[pyo3(signature = (timeout = 30.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let timeout: Duration = seconds(timeout)?;
        let Some(mut open) = self.open.take()? else { return Ok(None) };
        detached(py, move || {
            caught(move || {
                open.end();
                if open.server.is_handed_over() {
                    // Host memory lives on, and what else there was is saved.
                    return Ok(None);
                }
                Ok(lost(&open.server.shutdown(timeout)))
            })
        })
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
        self.close(py, 30.0).map(drop)
    }
}
