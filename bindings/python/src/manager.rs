//! `KvBlockManager`: a manager over the engine's own blocks.

#![expect(clippy::needless_pass_by_value, reason = "what Python arguments become")]

use crate::closable::Closable;
use crate::config::Config;
use crate::cuda::EngineEvents;
use crate::errors::{Error, Result};
use crate::events::{Event, Events, held};
use crate::fence::Fence;
use crate::guard::{caught, detached};
use crate::integers::{block_ids, block_ids_of_groups, duration, seconds};
use crate::layout::Layout;
use crate::loads::{FinishedLoad, OffloadStarted, Ticket};
use crate::options::{comparison, deadline, load_options, pinnable, tier_of};
use crate::parked::Parked;
use crate::sequence::{AnySequence, Namespace};
use crate::status::{lost, status_of};
use kvbm::config::Config as Settings;
use kvbm::{
    BatchPosition, BlockId, BlockMetadata, Engine, GroupId, KvBlockManager as Manager, OffloadOptions, Tier,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

/// A block manager over blocks that the engine allocates and names.
///
/// Close it (or use it in a `with` statement): what is not on disk by then is lost.
#[pyclass(module = "kvbm_rs", frozen, subclass)]
pub(crate) struct KvBlockManager {
    namespace: kvbm::Namespace,
    block_bytes: usize,
    open: Closable<Arc<Open>>,
}

/// A manager that was not closed yet.
struct Open {
    manager: Manager<Engine>,
    /// Where the engine's tensors lie on a device of this process.
    events: Option<EngineEvents>,
}

impl KvBlockManager {
    fn open(&self) -> Result<Arc<Open>> {
        self.open.get(Arc::clone)
    }

    /// Where blocks lie in a sequence of `namespace`, or of the manager's own.
    fn position(&self, namespace: Option<&Namespace>, group: u16, position: u32) -> BatchPosition {
        let namespace = namespace.map_or(&self.namespace, |namespace| &namespace.inner).tag();
        BatchPosition { namespace: namespace.into(), group: GroupId(group), position }
    }

    /// Runs `call` without the GIL.
    fn call<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&Open) -> Result<T> + Send) -> PyResult<T> {
        let open = self.open()?;
        detached(py, move || call(&open))
    }
}

#[pymethods]
impl KvBlockManager {
    /// A manager over the engine's blocks as `layout` describes them. `config` says what else there
    /// is: host memory, disk, volumes; its `[model]` and `[namespace]` are taken from `layout` and
    /// `namespace`. With `shadow` it keeps the books and moves no byte: what it finds was never
    /// stored, so nothing of it may be loaded.
    ///
    /// `workers` are the sockets of workers in other processes (`Worker`), one for each rank in
    /// order: `layout` is `Layout.of_workers` then. The workers may start later; this waits for
    /// them, a minute at most.
    #[new]
    #[pyo3(signature = (config, layout, namespace, *, shadow = false, workers = Vec::new()))]
    fn new(
        py: Python<'_>,
        config: &Config,
        layout: &Layout,
        namespace: &Namespace,
        shadow: bool,
        workers: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let model = layout.model()?;
        let elsewhere = shadow || !workers.is_empty();
        let bound = if elsewhere { None } else { Some(layout.bind(py)?) };
        let settings = config.settings.clone();
        let namespace = namespace.with_settings(&settings.namespace)?;
        let block_bytes = layout.block_bytes();
        let num_blocks = layout.num_blocks();
        let open = detached(py, move || {
            let events = bound.as_ref().and_then(|bound| bound.device.clone());
            let events = events.map(EngineEvents::new).transpose()?;
            let configure = move |built: &mut Settings| {
                let (model, namespace) = (built.model.clone(), built.namespace.clone());
                *built = settings;
                (built.model, built.namespace) = (model, namespace);
            };
            let builder = Manager::<Engine>::builder().model(model).namespace(namespace);
            let manager = match bound {
                Some(bound) => {
                    let memory = (bound.device(), bound.groups);
                    builder.engine_groups(vec![memory]).configure(configure).build()?
                }
                None if shadow => {
                    builder.engine_blocks(num_blocks).configure(configure).build_metadata_only()?
                }
                None => {
                    let ranks = u32::try_from(workers.len()).unwrap_or(u32::MAX);
                    let builder = builder.engine_blocks(num_blocks).configure(configure);
                    builder.tensor_parallel(ranks).remote_workers(workers).build()?
                }
            };
            Ok(Open { manager, events })
        })?;
        let namespace = open.manager.namespace().clone();
        Ok(Self { namespace, block_bytes, open: Closable::new("KvBlockManager", Arc::new(open)) })
    }

    /// The namespace of the manager, complete: sequences are made in it.
    #[getter]
    fn namespace(&self) -> Namespace {
        Namespace { inner: self.namespace.clone() }
    }

    /// Bytes of a block.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Blocks that each tier holds at most, G1 to G4.
    #[getter]
    fn capacity(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.call(py, |open| Ok(open.manager.status().tiers.iter().map(|tier| tier.capacity).collect()))
    }

    /// What can be loaded of `sequence` from its block `first` on, the first that the engine lacks.
    /// The same answer and the same pins for the same request until `commit`, `abandon`, or the
    /// ticket is too old. `None`: ask again later. `end`: the sequence's blocks from this one on
    /// are not asked for. With several cache groups, as far as all of them can serve it.
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
        let chain = chain.slice(0..end.unwrap_or(usize::MAX));
        self.call(py, |open| {
            let tickets = open.manager.tickets();
            match tickets.look_up(request, chain, first)? {
                kvbm::LookUp::Ready { blocks, by_tier } => {
                    let groups = tickets.promised(request);
                    let groups = groups.into_iter().map(|range| (range.start, range.end)).collect();
                    Ok(Some(Ticket { blocks, by_tier, groups }))
                }
                kvbm::LookUp::Pending => Ok(None),
            }
        })
    }

    /// Like `look_up`, for engines that have no way to learn of a failed load: only blocks whose
    /// verified bytes are in host memory are promised. Blocks on disk are copied there first; what
    /// has not arrived after `timeout` seconds is not promised. How many blocks are.
    #[pyo3(signature = (request, sequence, first = 0, *, timeout))]
    fn stage(
        &self,
        py: Python<'_>,
        request: &str,
        sequence: AnySequence<'_>,
        first: usize,
        timeout: f64,
    ) -> PyResult<usize> {
        let (deadline, chain) = (deadline(timeout)?, sequence.chain());
        self.call(py, |open| Ok(open.manager.tickets().stage(request, chain, first, deadline)?))
    }

    /// Names a point of the engine's work that every worker has passed when it was told so
    /// (`Worker.signal(number)`). For workers in other processes. Numbers grow from call to call.
    fn fence(&self, py: Python<'_>, number: u64) -> PyResult<Fence> {
        self.call(py, |open| Ok(Fence::from(open.manager.fence_at(number)?)))
    }

    /// Names a point of the engine's work on a CUDA device of this process: what the engine had
    /// submitted to a stream when it recorded `event` there, a `torch.cuda.Event` or the number of
    /// a `CUevent`. The event is recorded once, and is not destroyed before it is complete; an
    /// object is kept until then.
    fn fence_after(&self, py: Python<'_>, event: &Bound<'_, PyAny>) -> PyResult<Fence> {
        let open = self.open()?;
        let event = EngineEvents::needed(open.events.as_ref())?.follow(event)?;
        self.call(py, move |open| Ok(Fence::from(open.manager.fence(&[event])?)))
    }

    /// Starts the load of the first `len(ids)` promised blocks into the engine's blocks `ids`, when
    /// the engine has passed `after`. With `timeout` the load is over after so many seconds, with
    /// what has arrived. `by_layer`: what host memory has is copied tensor by tensor, the first of
    /// the layout first, and `layer_ready` says what is in place.
    #[pyo3(signature = (request, ids, after = None, *, timeout = None, by_layer = false))]
    fn commit(
        &self,
        py: Python<'_>,
        request: &str,
        ids: &Bound<'_, PyAny>,
        after: Option<&Fence>,
        timeout: Option<f64>,
        by_layer: bool,
    ) -> PyResult<()> {
        let (ids, options) = (block_ids(ids)?, load_options(after, timeout, by_layer)?);
        self.call(py, |open| Ok(open.manager.tickets().commit_with(request, &ids, options)?))
    }

    /// Like `commit`, for models with several cache groups: `ids[g]` has an engine block for each
    /// block that `Ticket.groups[g]` names. All arrive or none does. Blocks are copied whole:
    /// `layer_ready` says the same of all tensors.
    #[pyo3(signature = (request, ids, after = None, *, timeout = None, by_layer = false))]
    fn commit_groups(
        &self,
        py: Python<'_>,
        request: &str,
        ids: Vec<Bound<'_, PyAny>>,
        after: Option<&Fence>,
        timeout: Option<f64>,
        by_layer: bool,
    ) -> PyResult<()> {
        let ids = block_ids_of_groups(&ids)?;
        let options = load_options(after, timeout, by_layer)?;
        self.call(py, |open| {
            let ids: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
            Ok(open.manager.tickets().commit_groups(request, &ids, options)?)
        })
    }

    /// Whether the bytes of all blocks of the request's load that lie in tensor `layer` of the
    /// layout are in place, verified: the engine may compute with them. `False` where a block
    /// failed, and where the request has no load or `finished` has told its end.
    fn layer_ready(&self, py: Python<'_>, request: &str, layer: u32) -> PyResult<bool> {
        self.call(py, |open| Ok(open.manager.tickets().layer_ready(request, layer)))
    }

    /// Waits until it is known whether tensor `layer` of all blocks of the request's load arrives,
    /// at most `timeout` seconds. Whether it has arrived, as `layer_ready` says.
    fn wait_layer(&self, py: Python<'_>, request: &str, layer: u32, timeout: f64) -> PyResult<bool> {
        let deadline = deadline(timeout)?;
        self.call(py, |open| Ok(open.manager.tickets().wait_layer(request, layer, deadline)))
    }

    /// Whether a load of `blocks` blocks from host memory with `by_layer` takes no longer than
    /// computing `tokens` tokens, so that the engine may begin its step at once. `False` where too
    /// little was loaded lately, where `prefilled` has not said what computing takes, and where
    /// such blocks go whole.
    fn hides_load(&self, py: Python<'_>, blocks: usize, tokens: u64) -> PyResult<bool> {
        self.call(py, |open| Ok(open.manager.hides_load(blocks, tokens)))
    }

    /// By which workers in other processes name the plans of the request's load
    /// (`Worker.drain_finished`): a number for each part of it that has plans. Empty where the
    /// request has no load, and when `finished` has told its end.
    fn load_tags(&self, py: Python<'_>, request: &str) -> PyResult<Vec<u64>> {
        self.call(py, |open| Ok(open.manager.tickets().load_tags(request)))
    }

    /// Like `commit`, where the engine has computed the promised blocks into `ids` and wants to
    /// know whether the stored copies are the same. Nothing is written to `ids`. The outcome comes
    /// from `finished`; copies that are not the same are quarantined.
    ///
    /// `elements` says what the bytes are: `"float32"`, `"float16"`, `"bfloat16"`, or `"bytes"`.
    /// Numbers may differ by `tolerance` times the larger of their magnitudes or of the root mean
    /// square of the block's numbers in the same tensor.
    #[pyo3(signature = (request, ids, after = None, *, elements = "bytes", tolerance = 0.0))]
    fn audit(
        &self,
        py: Python<'_>,
        request: &str,
        ids: &Bound<'_, PyAny>,
        after: Option<&Fence>,
        elements: &str,
        tolerance: f64,
    ) -> PyResult<()> {
        let (ids, after) = (block_ids(ids)?, Fence::of_manager(after)?);
        let comparison = comparison(elements, tolerance)?;
        self.call(py, |open| Ok(open.manager.tickets().audit(request, &ids, after, comparison)?))
    }

    /// Drops the request's ticket, or gives up its load, which comes from `finished` when no copy
    /// can write to its blocks any more. Whether there was one.
    fn abandon(&self, py: Python<'_>, request: &str) -> PyResult<bool> {
        self.call(py, |open| Ok(open.manager.tickets().abandon(request)))
    }

    /// Loads that are over, each once, and only when no copy can write to their blocks any more.
    fn finished(&self, py: Python<'_>) -> PyResult<Vec<FinishedLoad>> {
        self.call(py, |open| {
            let finished = open.manager.tickets().finished().into_iter();
            Ok(finished.map(FinishedLoad::from).collect())
        })
    }

    /// A file descriptor that is readable when `finished` may have something: for `select`, `poll`
    /// and event loops. It is the manager's, and closed with it. `None` where the system has none
    /// to give.
    #[getter]
    fn finished_fd(&self, py: Python<'_>) -> PyResult<Option<i32>> {
        self.call(py, |open| Ok(open.manager.tickets().finished_fd().map(|fd| fd.as_raw_fd())))
    }

    /// The ids that a copy may still read or write.
    fn busy(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let ids = block_ids(ids)?;
        self.call(py, |open| Ok(open.manager.busy(&ids)?.iter().map(|id| id.0).collect()))
    }

    /// Tickets and loads that are open.
    #[getter]
    fn open_tickets(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        self.call(py, |open| Ok(open.manager.tickets().counts()))
    }

    /// Copies engine blocks to host memory in the background: `ids[i]` holds block `first + i` of
    /// `sequence`. The blocks hold their final bytes when this is called, or when the engine has
    /// passed `after`. `group` is the cache group of the blocks, where the layout has several;
    /// those of a window or state may begin anywhere in the sequence. The larger `priority` (0 to
    /// 255) is, the longer blocks stay that are on no tier yet, on every tier.
    #[pyo3(signature = (ids, sequence, first = 0, after = None, *, group = 0, priority = 0))]
    #[expect(clippy::too_many_arguments, reason = "Python names most of them")]
    fn offload(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        sequence: AnySequence<'_>,
        first: usize,
        after: Option<&Fence>,
        group: u16,
        priority: u8,
    ) -> PyResult<OffloadStarted> {
        let (ids, after) = (block_ids(ids)?, Fence::of_manager(after)?);
        let chain = sequence.chain();
        let options = OffloadOptions::default().group(GroupId(group)).metadata(BlockMetadata { priority });
        let options = after.map_or(options, |after| options.after(after));
        self.call(py, |open| {
            let begun = open.manager.offload_with(&ids, chain, first, options)?;
            Ok(OffloadStarted::from(begun))
        })
    }

    /// Like `offload`, for blocks that the running iteration computes: tensor by tensor, each as
    /// soon as `layer_done` says that it is written, and all when `step` ends the iteration. The
    /// blocks count as read from now on: call `before_reuse(ids, timeout)` before they are given to
    /// something else.
    #[pyo3(signature = (ids, sequence, first = 0))]
    fn offload_by_layer(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        sequence: AnySequence<'_>,
        first: usize,
    ) -> PyResult<OffloadStarted> {
        let (ids, chain) = (block_ids(ids)?, sequence.chain());
        self.call(py, |open| Ok(open.manager.offload_by_layer(&ids, chain, first)?.into()))
    }

    /// The running iteration has written tensor `layer` of the layout, and those before it, in all
    /// its blocks: not submitted, written. With `event`, as of `fence_after`, it has when the
    /// engine's stream has passed that.
    #[pyo3(signature = (layer, event = None))]
    fn layer_done(&self, py: Python<'_>, layer: u32, event: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let open = self.open()?;
        let event =
            event.map(|event| EngineEvents::needed(open.events.as_ref())?.follow(event)).transpose()?;
        self.call(py, move |open| {
            match &event {
                None => open.manager.layer_done(layer),
                Some(event) => open.manager.layer_done_after(layer, event),
            }
            Ok(())
        })
    }

    /// Copies what host memory has of `sequence` to a tier below, `"g3"` or `"g4"`, in the
    /// background and now, rather than when a trigger says so. How many blocks host memory has;
    /// those that are on the tier are not copied again. Of a model with several cache groups, those
    /// of the first.
    fn offload_down(&self, py: Python<'_>, sequence: AnySequence<'_>, to: &str) -> PyResult<usize> {
        let (chain, to) = (sequence.chain(), tier_of(to)?);
        self.call(py, |open| {
            // Of blocks that are known here, so no volume is asked.
            let known = open.manager.look_up(chain).len();
            let blocks = open.manager.match_prefix(chain.slice(0..known)).into_parts().g2;
            open.manager.offload_down(&blocks, to)?;
            Ok(blocks.len())
        })
    }

    /// Copies blocks to host memory as they are, for a request that is preempted: blocks that are
    /// not whole, or that no other request may find. They count for the tenant of `namespace`, or
    /// of the manager's own. Waits until the copies are over, at most the deadline of transfers;
    /// then the engine may reuse the blocks. With `after` the copies wait for a fence first. Where
    /// it fails, a late copy may still read the blocks: call `before_reuse(ids, timeout)` before
    /// then.
    #[pyo3(signature = (ids, after = None, *, position = 0, group = 0, namespace = None))]
    fn park(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        after: Option<&Fence>,
        position: u32,
        group: u16,
        namespace: Option<&Namespace>,
    ) -> PyResult<Parked> {
        let (ids, after) = (block_ids(ids)?, Fence::of_manager(after)?);
        let origin = self.position(namespace, group, position);
        self.call(py, |open| Ok(Parked::new(open.manager.park_groups(&[(origin, &ids)], after)?)))
    }

    /// Like `park`, for a request with private blocks in several cache groups: `ids[g]` has
    /// those of group `g`, from block `positions[g]` of the sequence on (0 where `positions` is
    /// `None`). All groups are parked or none is.
    #[pyo3(signature = (ids, after = None, *, positions = None, namespace = None))]
    fn park_groups(
        &self,
        py: Python<'_>,
        ids: Vec<Bound<'_, PyAny>>,
        after: Option<&Fence>,
        positions: Option<Vec<u32>>,
        namespace: Option<&Namespace>,
    ) -> PyResult<Parked> {
        let ids = block_ids_of_groups(&ids)?;
        let positions = positions.unwrap_or_else(|| vec![0; ids.len()]);
        if positions.len() != ids.len() {
            let (positions, groups) = (positions.len(), ids.len());
            let text =
                format!("{positions} positions for blocks of {groups} cache groups: give one for each");
            return Err(Error::argument(text).into());
        }
        let after = Fence::of_manager(after)?;
        let origins = (0..).zip(positions);
        let origins = origins.map(|(group, position)| self.position(namespace, group, position));
        let batches: Vec<_> = origins.zip(ids.iter().map(Vec::as_slice)).collect();
        self.call(py, |open| Ok(Parked::new(open.manager.park_groups(&batches, after)?)))
    }

    /// Copies parked blocks into the engine's blocks `ids`, one for each, in order, and ends the
    /// parking. Waits as `park` does. Where it fails, the blocks stay parked, and a late copy may
    /// still write to `ids`: call `before_reuse(ids, timeout)` before another request gets them.
    #[pyo3(signature = (parked, ids, after = None))]
    fn resume(
        &self,
        py: Python<'_>,
        parked: &Parked,
        ids: &Bound<'_, PyAny>,
        after: Option<&Fence>,
    ) -> PyResult<()> {
        let (ids, after) = (block_ids(ids)?, Fence::of_manager(after)?);
        self.call(py, |open| parked.with(|blocks| open.manager.resume_groups(blocks, &[&ids], after)))
    }

    /// Like `resume`, for what `park_groups` parked: `ids[g]` has an engine block for each block
    /// of group `g`. All arrive, or all stay parked.
    #[pyo3(signature = (parked, ids, after = None))]
    fn resume_groups(
        &self,
        py: Python<'_>,
        parked: &Parked,
        ids: Vec<Bound<'_, PyAny>>,
        after: Option<&Fence>,
    ) -> PyResult<()> {
        let ids = block_ids_of_groups(&ids)?;
        let after = Fence::of_manager(after)?;
        self.call(py, |open| {
            let ids: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
            parked.with(|blocks| open.manager.resume_groups(blocks, &ids, after))
        })
    }

    /// Whether blocks of `sequence` are on a tier: for each block up to the first that is nowhere,
    /// the tiers' names.
    fn places(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<Vec<Vec<&'static str>>> {
        let chain = sequence.chain();
        self.call(py, |open| {
            let places = open.manager.look_up(chain);
            let names = |places: &kvbm::Places| {
                Tier::ALL.into_iter().filter(|tier| places.contains(*tier)).map(Tier::as_str).collect()
            };
            Ok(places.iter().map(names).collect())
        })
    }

    /// The engine has no more use for what these blocks hold. The ids that a copy still touches.
    fn released(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let ids = block_ids(ids)?;
        self.call(py, |open| Ok(open.manager.released(&ids)?.iter().map(|id| id.0).collect()))
    }

    /// Makes sure that these blocks can be overwritten: discards copies of them and waits until no
    /// copy touches them. The ids that are still busy after `timeout` seconds; wait again for
    /// these.
    fn before_reuse(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, timeout: f64) -> PyResult<Vec<u32>> {
        let (ids, deadline) = (block_ids(ids)?, deadline(timeout)?);
        self.call(py, |open| {
            let busy = open.manager.before_reuse(&ids, deadline).err();
            Ok(busy.map_or_else(Vec::new, |busy| busy.blocks.iter().map(|id| id.0).collect()))
        })
    }

    /// An iteration of the engine is over. Its number.
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |open| Ok(open.manager.step()))
    }

    /// The number of the running iteration of the engine.
    #[getter]
    fn iteration(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |open| Ok(open.manager.iteration()))
    }

    /// Keeps what is there of `sequence` on `tiers` (`"g2"`, `"g3"`) from eviction until iteration
    /// `until`, or until it is unpinned. How many blocks are pinned. A block that comes to a tier
    /// later is not. More than half of a tier is refused (`NoRoomError`), and nothing changes.
    fn pin(
        &self,
        py: Python<'_>,
        sequence: AnySequence<'_>,
        tiers: Vec<String>,
        until: u64,
    ) -> PyResult<usize> {
        let (chain, tiers) = (sequence.chain(), pinnable(&tiers)?);
        self.call(py, |open| Ok(open.manager.pin(chain, tiers, until)?))
    }

    /// Like `pin`, for so many seconds.
    fn pin_for(
        &self,
        py: Python<'_>,
        sequence: AnySequence<'_>,
        tiers: Vec<String>,
        seconds: f64,
    ) -> PyResult<usize> {
        let (chain, tiers, time) = (sequence.chain(), pinnable(&tiers)?, duration(seconds)?);
        self.call(py, |open| Ok(open.manager.pin_for(chain, tiers, time)?))
    }

    /// Takes the pins of `sequence` on `tiers` back, but for blocks that another pinned one
    /// continues. How many ended; a block on two tiers has two.
    fn unpin(&self, py: Python<'_>, sequence: AnySequence<'_>, tiers: Vec<String>) -> PyResult<usize> {
        let (chain, tiers) = (sequence.chain(), pinnable(&tiers)?);
        self.call(py, |open| Ok(open.manager.unpin(chain, tiers)))
    }

    /// Blocks of `namespace` leave every tier after so many iterations (`step`) without use; `None`
    /// lifts that. Blocks in use, pinned ones and those that another continues stay until they are
    /// not.
    fn set_ttl(&self, py: Python<'_>, namespace: &Namespace, iterations: Option<u64>) -> PyResult<()> {
        let namespace = namespace.inner.clone();
        self.call(py, |open| Ok(open.manager.set_ttl(&namespace, iterations)?))
    }

    /// Like `set_ttl`, after so many seconds without use, from 1 to a year. Both may be set.
    fn set_ttl_time(&self, py: Python<'_>, namespace: &Namespace, seconds: Option<f64>) -> PyResult<()> {
        let namespace = namespace.inner.clone();
        let time = seconds.map(duration).transpose()?;
        self.call(py, |open| Ok(open.manager.set_ttl_time(&namespace, time)?))
    }

    /// Nothing will continue `sequence`: a hint to the eviction policy.
    fn branch_ends(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<()> {
        let chain = sequence.chain();
        self.call(py, |open| {
            open.manager.branch_ends(chain);
            Ok(())
        })
    }

    /// The engine computed `tokens` tokens of prompts in a step of so many seconds: what computing
    /// costs, where `policy.prefill_tokens_per_s` does not say it. Whether the step counts: one of
    /// fewer than 64 tokens, or of more than 30 s, does not.
    fn prefilled(&self, py: Python<'_>, tokens: u64, elapsed: f64) -> PyResult<bool> {
        let elapsed = seconds(elapsed)?;
        self.call(py, |open| Ok(open.manager.prefilled(tokens, elapsed)))
    }

    /// A request for `sequence` will come: copies what only the disk has of it to host memory, in
    /// the background and within `policy.prefetch_share`. How many blocks are copied.
    fn prefetch(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<usize> {
        let chain = sequence.chain();
        self.call(py, |open| Ok(open.manager.prefetch(chain).started))
    }

    /// The session of `sequence` goes on soon: its blocks count as used now, and a prefetch begins.
    /// How many blocks it copies.
    fn session_resumes(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<usize> {
        let chain = sequence.chain();
        self.call(py, |open| Ok(open.manager.session_resumes(chain).started))
    }

    /// Waits until no offload is queued or running. Whether that was reached within `timeout`
    /// seconds.
    fn wait_offloads(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let deadline = deadline(timeout)?;
        self.call(py, |open| Ok(open.manager.wait_offloads(deadline)))
    }

    /// Makes what is on disk and volumes durable. How many blocks are.
    fn flush(&self, py: Python<'_>, timeout: f64) -> PyResult<u64> {
        let timeout = seconds(timeout)?;
        self.call(py, |open| Ok(open.manager.flush(timeout)?.durable_blocks))
    }

    /// Removes every block that nobody uses from a tier (`"g2"` or `"g3"`). How many went. With
    /// `wait=False` the disks make it durable later; `flush` waits for that.
    #[pyo3(signature = (tier, *, wait = true))]
    fn clear(&self, py: Python<'_>, tier: &str, wait: bool) -> PyResult<u64> {
        let tier = tier_of(tier)?;
        self.call(py, |open| {
            let manager = &open.manager;
            Ok(if wait { manager.clear(tier)? } else { manager.clear_in_background(tier)? })
        })
    }

    /// Removes a namespace from all tiers. How many blocks went. `wait` as with `clear`.
    #[pyo3(signature = (namespace, *, wait = true))]
    fn forget(&self, py: Python<'_>, namespace: &Namespace, wait: bool) -> PyResult<u64> {
        let namespace = namespace.inner.clone();
        self.call(py, |open| {
            let manager = &open.manager;
            Ok(if wait { manager.forget(&namespace) } else { manager.forget_in_background(&namespace) })
        })
    }

    /// A subscriber that sees every event from now on.
    fn events(&self, py: Python<'_>) -> PyResult<Events> {
        self.call(py, |open| Ok(Events::new(open.manager.events().subscribe()?)))
    }

    /// The blocks that the tiers of this machine hold now, parents first: `"store"` events with the
    /// number of the next event. It repairs what is known after a `Gap`. Blocks of volumes are not
    /// among them.
    fn held_blocks(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        self.call(py, |open| Ok(held(&open.manager)))
    }

    /// Publishes what happened so far rather than at the next tick. Whether that worked within a
    /// second.
    fn pump_events(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, |open| Ok(open.manager.events().pump()))
    }

    /// All metrics in the OpenMetrics text format.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |open| Ok(open.manager.metrics().encode()))
    }

    /// Tiers and their blocks, the volumes' ids, and whether the disk is down.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        status_of(py, &self.call(py, |open| Ok(open.manager.status()))?)
    }

    /// Saves what time allows and stops the threads. What could not be saved, as text; `None` where
    /// all was. A second call does nothing.
    #[pyo3(signature = (timeout = 10.0))]
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let timeout = seconds(timeout)?;
        let Some(open) = self.open.take()? else { return Ok(None) };
        detached(py, move || {
            let report = open.manager.shutdown(timeout);
            caught(move || {
                drop(open);
                Ok(())
            })?;
            Ok(lost(&report))
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
        self.close(py, 10.0).map(drop)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("KvBlockManager({:?}, {state})", self.namespace.model_id())
    }
}
