//! `NodeEngine`: a scheduler whose cache a node daemon keeps.

#![expect(clippy::needless_pass_by_value, reason = "what Python arguments become")]

use crate::closable::Closable;
use crate::cuda::EngineEvents;
use crate::errors::{Error, Result};
use crate::fence::Fence;
use crate::guard::detached;
use crate::integers::{block_ids, block_ids_of_groups, seconds};
use crate::layout::{EngineMemory, Layout};
use crate::loads::{FinishedLoad, OffloadStarted, Ticket};
use crate::sequence::{AnySequence, Namespace};
use kvbm::plan::deadline_after;
use kvbm::{BlockId, GroupId, Rank};
use kvbm_node::{EngineTerms, MoverMemory, NodeEngine as Attached, NodePromise, NodeStatus};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The scheduler of an engine whose cache a node daemon keeps (`kvbm serve`). Its calls are those
/// of `KvBlockManager`.
///
/// It attaches in the background, and again whenever the daemon was gone; everything is a miss
/// meanwhile. Close it, or use it in a `with` statement: the engine's tensors may go away then.
#[pyclass(module = "kvbm_rs", frozen, subclass)]
pub(crate) struct NodeEngine {
    namespace: kvbm::Namespace,
    block_bytes: usize,
    open: Closable<Arc<Open>>,
}

/// An engine that was not closed yet.
struct Open {
    engine: Attached,
    /// Where the engine's tensors lie on a device of this process.
    events: Option<EngineEvents>,
    /// Points of the engine's work that `fence_after` has named.
    points: AtomicU64,
}

/// What a process of an engine attaches with.
pub(crate) fn terms_of(socket: PathBuf, layout: &Layout, engine: String, ranks: u16) -> EngineTerms {
    let (groups, replicas) = (layout.kinds(), layout.replicas());
    EngineTerms { ranks, replicas, groups, ..EngineTerms::new(socket, engine, layout.num_blocks()) }
}

/// The memory of a rank, for the movers of this process.
pub(crate) fn mover_of(rank: u16, memory: &EngineMemory) -> MoverMemory {
    MoverMemory { rank: Rank(rank), device: memory.device(), g1: memory.groups.clone() }
}

/// How a process is attached.
pub(crate) fn status_dict<'py>(py: Python<'py>, status: &NodeStatus) -> PyResult<Bound<'py, PyDict>> {
    let (attached, ready, pid, reason) = match status {
        NodeStatus::Attached { pid, ready, .. } => (true, *ready, Some(*pid), None),
        NodeStatus::Detached { reason } => (false, false, None, Some(reason)),
    };
    let out = PyDict::new(py);
    out.set_item("attached", attached)?;
    out.set_item("ready", ready)?;
    out.set_item("pid", pid)?;
    out.set_item("reason", reason)?;
    Ok(out)
}

impl NodeEngine {
    fn open(&self) -> Result<Arc<Open>> {
        self.open.get(Arc::clone)
    }

    /// Runs `call` without the GIL.
    fn call<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&Open) -> Result<T> + Send) -> PyResult<T> {
        let open = self.open()?;
        detached(py, move || call(&open))
    }
}

fn numbers(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

#[pymethods]
impl NodeEngine {
    /// Attaches to the daemon at `socket`. All processes of an engine give the same name `engine`,
    /// and no other engine does. Where `layout` has tensors, this process copies for rank 0; where
    /// it is `Layout.of_workers`, a `NodeMover` in another process does for each of `ranks`.
    #[new]
    #[pyo3(signature = (socket, layout, namespace, *, engine, ranks = 1))]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        layout: &Layout,
        namespace: &Namespace,
        engine: String,
        ranks: u16,
    ) -> PyResult<Self> {
        let namespace = layout.model()?.namespace(namespace.inner.clone());
        // Hashes of one process mean nothing to the next.
        namespace.check_persistable().map_err(Error::from)?;
        namespace.hasher().map_err(Error::from)?;
        let memory = if layout.has_memory() { Some(layout.bind(py)?) } else { None };
        let terms = terms_of(socket, layout, engine, ranks);
        let open = detached(py, move || {
            let device = memory.as_ref().and_then(|memory| memory.device.clone());
            let events = device.map(EngineEvents::new).transpose()?;
            let movers = memory.iter().map(|memory| mover_of(0, memory)).collect();
            let engine = Attached::attach(terms, true, movers)?;
            Ok(Arc::new(Open { engine, events, points: AtomicU64::new(0) }))
        })?;
        let open = Closable::new("NodeEngine", open);
        Ok(Self { namespace, block_bytes: layout.block_bytes(), open })
    }

    /// The namespace of the engine, complete: sequences are made in it.
    #[getter]
    fn namespace(&self) -> Namespace {
        Namespace { inner: self.namespace.clone() }
    }

    /// Bytes of a block.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// How it is attached: `attached`, `ready` (movers of all ranks can copy), `pid` of the daemon,
    /// and the `reason` where it is not attached.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let status = self.call(py, |open| Ok(open.engine.status()))?;
        status_dict(py, &status)
    }

    /// Waits until it is attached and movers of all ranks can copy. Whether that was reached within
    /// `timeout` seconds.
    fn wait_ready(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        self.call(py, |open| Ok(open.engine.wait_ready(timeout)))
    }

    /// As of a manager. Nothing is found while there is no daemon, or where it does not answer in
    /// half a second.
    #[pyo3(signature = (request, sequence, first = 0, *, end = None))]
    fn look_up(
        &self,
        py: Python<'_>,
        request: &str,
        sequence: AnySequence<'_>,
        first: usize,
        end: Option<usize>,
    ) -> PyResult<Option<Ticket>> {
        let chain = sequence.chain();
        let chain = chain.slice(0..end.unwrap_or(chain.len()));
        self.call(py, |open| {
            let NodePromise { found, groups } = open.engine.look_up_groups(request, chain, first)?;
            let groups = groups.into_iter().map(|range| (range.start, range.end)).collect();
            match found {
                kvbm::LookUp::Ready { blocks, by_tier } => Ok(Some(Ticket { blocks, by_tier, groups })),
                kvbm::LookUp::Pending => Ok(None),
            }
        })
    }

    /// Names a point of the engine's work that every mover has passed when it was told so
    /// (`NodeMover.signal(number)`). Numbers grow from call to call.
    fn fence(&self, number: u64) -> Result<Fence> {
        self.open()?;
        if number == 0 {
            let text =
                "point 0 of the engine's work is before all of it, so nothing would wait: count from 1";
            return Err(Error::argument(text));
        }
        Ok(Fence::node(number))
    }

    /// As of a manager: a point of the engine's work on a CUDA device of this process.
    fn fence_after(&self, py: Python<'_>, event: &Bound<'_, PyAny>) -> PyResult<Fence> {
        let open = self.open()?;
        let Some(events) = &open.events else {
            let text = "the engine's tensors do not lie on a device of this process: on the CPU no fence is \
                        needed, and movers in other processes have `fence` and `NodeMover.signal`";
            return Err(Error::argument(text).into());
        };
        let event = events.follow(event)?;
        self.call(py, move |open| {
            let number = open.points.fetch_add(1, Ordering::AcqRel) + 1;
            open.engine.signal(number, &event);
            Ok(Fence::node(number))
        })
    }

    /// As of a manager. Raises `KvbmError` where there is no daemon: nothing was started then.
    #[pyo3(signature = (request, ids, after = None, *, timeout = None))]
    fn commit(
        &self,
        py: Python<'_>,
        request: &str,
        ids: &Bound<'_, PyAny>,
        after: Option<&Fence>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (ids, after) = (block_ids(ids)?, Fence::of_node(after)?);
        let timeout = timeout.map(seconds).transpose()?;
        self.call(py, |open| Ok(open.engine.commit_with(request, &ids, after, timeout)?))
    }

    /// As of a manager, for models with several cache groups. Raises `KvbmError` where there is no
    /// daemon: nothing was started then.
    #[pyo3(signature = (request, ids, after = None, *, timeout = None))]
    fn commit_groups(
        &self,
        py: Python<'_>,
        request: &str,
        ids: Vec<Bound<'_, PyAny>>,
        after: Option<&Fence>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let ids = block_ids_of_groups(&ids)?;
        let (after, timeout) = (Fence::of_node(after)?, timeout.map(seconds).transpose()?);
        self.call(py, |open| {
            let ids: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
            Ok(open.engine.commit_groups(request, &ids, after, timeout)?)
        })
    }

    /// As of a manager.
    fn abandon(&self, py: Python<'_>, request: &str) -> PyResult<bool> {
        self.call(py, |open| Ok(open.engine.abandon(request)?))
    }

    /// As of a manager. Where the daemon goes, its loads end here without a block.
    fn finished(&self, py: Python<'_>) -> PyResult<Vec<FinishedLoad>> {
        self.call(py, |open| Ok(open.engine.finished().into_iter().map(FinishedLoad::from).collect()))
    }

    /// A file descriptor that is readable when `finished` may have something. It is closed with
    /// this object.
    #[getter]
    fn finished_fd(&self, py: Python<'_>) -> PyResult<Option<i32>> {
        self.call(py, |open| Ok(Some(open.engine.finished_fd().as_raw_fd())))
    }

    /// The ids that a copy may still read or write, as far as the daemon says.
    fn busy(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let ids = block_ids(ids)?;
        self.call(py, |open| Ok(numbers(&open.engine.busy(&ids)?)))
    }

    /// Tickets and loads that are open, of all engines of the daemon.
    #[getter]
    fn open_tickets(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.call(py, |open| Ok(open.engine.counts()?))
    }

    /// As of a manager. Nothing is started while there is no daemon.
    #[pyo3(signature = (ids, sequence, first = 0, after = None, *, group = 0))]
    fn offload(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        sequence: AnySequence<'_>,
        first: usize,
        after: Option<&Fence>,
        group: u16,
    ) -> PyResult<OffloadStarted> {
        let (ids, after) = (block_ids(ids)?, Fence::of_node(after)?);
        let chain = sequence.chain();
        self.call(py, |open| Ok(open.engine.offload_group(GroupId(group), &ids, chain, first, after)?.into()))
    }

    /// As of a manager: the engine may overwrite these blocks when it returns.
    fn released(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let ids = block_ids(ids)?;
        self.call(py, |open| Ok(numbers(&open.engine.released(&ids)?)))
    }

    /// As of a manager.
    fn before_reuse(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, timeout: f64) -> PyResult<Vec<u32>> {
        let (ids, timeout) = (block_ids(ids)?, seconds(timeout)?);
        self.call(py, |open| {
            let busy = open.engine.before_reuse(&ids, deadline_after(Instant::now(), timeout)).err();
            Ok(busy.map_or_else(Vec::new, |busy| numbers(&busy.blocks)))
        })
    }

    /// An iteration of the engine is over.
    fn step(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |open| {
            open.engine.step();
            Ok(())
        })
    }

    /// As of a manager; whether the daemon counts the step is not known here.
    fn prefilled(&self, py: Python<'_>, tokens: u64, elapsed: f64) -> PyResult<()> {
        let elapsed = seconds(elapsed)?;
        self.call(py, |open| {
            open.engine.prefilled(tokens, elapsed);
            Ok(())
        })
    }

    /// As of a manager. 0 while there is no daemon.
    fn prefetch(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<u64> {
        let chain = sequence.chain();
        self.call(py, |open| Ok(open.engine.prefetch(chain)?))
    }

    /// As of a manager. 0 while there is no daemon.
    fn session_resumes(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<u64> {
        let chain = sequence.chain();
        self.call(py, |open| Ok(open.engine.session_resumes(chain)?))
    }

    /// As of a manager: of all engines of the daemon.
    fn wait_offloads(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        self.call(py, |open| Ok(open.engine.wait_offloads(timeout)?))
    }

    /// Removes a namespace from all tiers, for all engines of the daemon. How many blocks went. The
    /// disks make it durable later: nobody waits for them.
    #[pyo3(signature = (namespace, *, wait = false))]
    fn forget(&self, py: Python<'_>, namespace: &Namespace, wait: bool) -> PyResult<u64> {
        if wait {
            let text = "wait=True: a daemon makes it durable in the background; leave `wait` out";
            return Err(Error::argument(text).into());
        }
        let tag = namespace.inner.tag();
        self.call(py, |open| Ok(open.engine.forget(tag)?))
    }

    /// Detaches; returns when nothing is copied any more. A second call does nothing. `timeout` is
    /// for callers that also know a manager: nothing has to be saved.
    #[pyo3(signature = (timeout = 10.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        seconds(timeout)?;
        self.open.close(py).map(|()| None)
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
        self.close(py, 10.0).map(drop)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("NodeEngine({:?}, {state})", self.namespace.model_id())
    }
}
