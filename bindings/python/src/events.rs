//! `Events` and `KvIndex`: what a manager stores and removes, and who holds which prefix.

#![expect(clippy::needless_pass_by_value, reason = "what Python arguments become")]

use crate::errors::{Error, Result};
use crate::guard::{Process, detached};
use crate::sequence::AnySequence;
use kvbm::KvBlockManager;
use kvbm::events_plane::{self as plane, Delivery, EventKind, KvEvent, SourceId, StreamId, Subscriber};
use kvbm::plan::{Epoch, GroupId};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;
use std::time::Duration;

/// A block that was stored or removed, or everything of a source that was.
#[pyclass(module = "kvbm_rs", frozen)]
pub(crate) struct Event {
    stream: StreamId,
    event: KvEvent,
}

/// What a manager holds on the tiers of this machine.
pub(crate) fn held<G>(manager: &KvBlockManager<G>) -> Vec<Event> {
    let snapshot = manager.events().snapshot();
    let stream = StreamId { source: manager.events().source(), epoch: manager.epoch(), shard: 0 };
    let event = |block| KvEvent::new(snapshot.next_sequence, EventKind::Store(block));
    snapshot.blocks.into_iter().map(|block| Event { stream, event: event(block) }).collect()
}

#[pymethods]
impl Event {
    /// `"store"`, `"remove"` or `"cleared"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.event.kind {
            EventKind::Store(_) => "store",
            EventKind::Remove(_) => "remove",
            EventKind::Cleared => "cleared",
        }
    }

    /// Number within its stream.
    #[getter]
    fn sequence(&self) -> u64 {
        self.event.sequence
    }

    /// Who published it.
    #[getter]
    fn source(&self) -> u64 {
        self.stream.source.0
    }

    /// The block's sequence hash; `None` for `"cleared"`.
    #[getter]
    fn hash<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.event.kind.block().map(|block| PyBytes::new(py, block.identity.hash.as_bytes()))
    }

    /// The sequence hash of the block before it.
    #[getter]
    fn parent<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let parent = self.event.kind.block().and_then(|block| block.identity.parent);
        parent.map(|hash| PyBytes::new(py, hash.as_bytes()))
    }

    /// `"g1"` to `"g4"`; `None` for `"cleared"`.
    #[getter]
    fn tier(&self) -> Option<&'static str> {
        self.event.kind.block().map(|block| block.location.tier.as_str())
    }

    /// The block's index in its sequence; `None` for `"cleared"`.
    #[getter]
    fn position(&self) -> Option<u32> {
        self.event.kind.block().map(|block| block.identity.position)
    }

    /// The block's cache group; `None` for `"cleared"`.
    #[getter]
    fn group(&self) -> Option<u16> {
        self.event.kind.block().map(|block| block.identity.group.0)
    }

    fn __repr__(&self) -> String {
        format!(
            "Event({}, {}, sequence={})",
            self.kind(),
            self.tier().unwrap_or("all tiers"),
            self.event.sequence
        )
    }
}

/// Events that will not come: what is known of their stream may be wrong.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
pub(crate) struct Gap {
    /// Who published them.
    source: u64,
    /// The first missing number.
    first: u64,
    /// The number behind the last missing one.
    end: u64,
    /// Whether the source began a new life instead: forget all that came from it.
    restarted: bool,
}

/// A subscriber of a manager's events, from the time it was made on.
#[pyclass(module = "kvbm_rs", frozen)]
pub(crate) struct Events {
    made: Process,
    subscriber: Mutex<Subscriber>,
}

impl Events {
    pub(crate) fn new(subscriber: Subscriber) -> Self {
        Self { made: Process::this(), subscriber: Mutex::new(subscriber) }
    }
}

#[pymethods]
impl Events {
    /// Most events of one call of `take`.
    #[classattr]
    const MOST: usize = 4096;

    /// The events that came, in order, each an `Event` or a `Gap`; at most `timeout` seconds of
    /// waiting for the first.
    #[pyo3(signature = (timeout = 0.0))]
    fn take<'py>(&self, py: Python<'py>, timeout: f64) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.made.check("Events")?;
        let mut timeout = Duration::try_from_secs_f64(timeout)
            .map_err(|error| Error::argument(format!("timeout {timeout}: {error}; give seconds")))?;
        let deliveries = detached(py, || {
            let mut subscriber = self.subscriber.lock();
            let (mut deliveries, mut count) = (Vec::new(), 0);
            while count < Self::MOST
                && let Some(delivery) = subscriber.next(timeout)?
            {
                count += if let Delivery::Events { events, .. } = &delivery { events.len() } else { 1 };
                deliveries.push(delivery);
                timeout = Duration::ZERO;
            }
            Ok(deliveries)
        })?;
        let mut out = Vec::new();
        for delivery in deliveries {
            match delivery {
                Delivery::Events { stream, events } => {
                    for event in events {
                        out.push(Bound::new(py, Event { stream, event })?.into_any());
                    }
                }
                Delivery::Gap { stream, missing } => {
                    let (first, end) = (missing.start, missing.end);
                    let gap = Gap { source: stream.source.0, first, end, restarted: false };
                    out.push(Bound::new(py, gap)?.into_any());
                }
                Delivery::Restarted { source, .. } => {
                    let gap = Gap { source: source.0, first: 0, end: 0, restarted: true };
                    out.push(Bound::new(py, gap)?.into_any());
                }
            }
        }
        Ok(out)
    }
}

/// Who holds which prefix: fed with `Event` objects of any number of managers.
#[pyclass(module = "kvbm_rs", frozen)]
pub(crate) struct KvIndex {
    index: Arc<Mutex<plane::KvIndex>>,
}

#[pymethods]
impl KvIndex {
    /// At most `max_blocks` different blocks; what is beyond is refused and counted.
    #[new]
    #[pyo3(signature = (max_blocks = plane::KvIndex::DEFAULT_MAX_BLOCKS))]
    fn new(max_blocks: usize) -> Self {
        Self { index: Arc::new(Mutex::new(plane::KvIndex::new(max_blocks))) }
    }

    /// Applies events in their order. A gap has its source forgotten, so that nothing wrong is
    /// answered.
    fn apply(&self, py: Python<'_>, events: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let mut index = self.index.lock();
        for event in &events {
            if let Ok(event) = event.cast::<Event>() {
                let Event { stream, event } = event.get();
                index.apply(*stream, std::slice::from_ref(event));
            } else if let Ok(gap) = event.cast::<Gap>() {
                let gap = gap.get();
                let source = SourceId(gap.source);
                if gap.restarted {
                    index.forget(source);
                } else {
                    let stream = StreamId { source, epoch: Epoch(0), shard: 0 };
                    index.clear(stream.source, stream.shard);
                }
            } else {
                let shown = event.get_type().name()?.to_string();
                let _ = py;
                return Err(Error::argument(format!("{shown} is no Event and no Gap")).into());
            }
        }
        Ok(())
    }

    /// For each source that has the first block: `(source, blocks, by_tier)`, blocks from the
    /// front.
    fn find(&self, py: Python<'_>, sequence: AnySequence<'_>) -> PyResult<Vec<(u64, u32, [u32; 4])>> {
        let hashes = sequence.chain().hashes();
        detached(py, || -> Result<_> {
            let mut found = Vec::new();
            self.index.lock().find(GroupId(0), hashes, &mut found);
            Ok(found.iter().map(|found| (found.source.0, found.blocks, found.by_tier)).collect())
        })
    }

    /// Forgets a source.
    fn forget(&self, source: u64) {
        self.index.lock().forget(SourceId(source));
    }

    /// Blocks that somebody holds, each once.
    fn __len__(&self) -> usize {
        self.index.lock().stats().blocks as usize
    }

    /// Blocks that were not taken in because the index is full.
    #[getter]
    fn refused(&self) -> u64 {
        self.index.lock().stats().refused
    }
}
