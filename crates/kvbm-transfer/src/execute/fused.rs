//! Blocks between a GPU and host memory through a staging area on the GPU. A kernel gathers,
//! scatters or converts there. What crosses the link is whole blocks in the order of host memory.

use super::copy::{Item, Route, push_block, refused};
use crate::config::bad;
use crate::error::StartError;
use crate::slot_layout::layouts;
use kvbm_device::{CopyBatch, CopyEngine, CudaDevice, CudaStream, DeviceError, Direction, Event, Stream};
use kvbm_kernels::{Backend, BlockForm, BlockShape, Conversion, Converter, CudaKernels, Operand, Piece};
use kvbm_layout::{AxisOrder, BlockLayout, Cell, LayoutType};
use kvbm_plan::{LayerRange, Path};
use kvbm_storage::{BoundLayout, DeviceAllocator, RegionBytes};
use std::sync::Arc;

/// How copies of one path get over the link.
pub(crate) enum Way {
    /// Fragment by fragment.
    Copies(CopyEngine),
    /// Through the staging area.
    Fused(Box<Fused>),
}

/// The kernels of a CUDA device, and which way its copies are to go.
pub(crate) struct Kernels {
    device: CudaDevice,
    converter: Arc<Converter<CudaKernels>>,
    wanted: Backend,
}

impl Kernels {
    /// Of the worker's device; `None` if it is no CUDA device, which has no choice.
    ///
    /// # Errors
    /// A way that this device does not offer.
    pub(crate) fn of(device: &dyn kvbm_device::Device, wanted: Backend) -> Result<Option<Self>, StartError> {
        let refuse = |why: String| bad("copies", wanted.to_string(), why);
        let Some(device) = device.as_any().downcast_ref::<CudaDevice>() else {
            return match wanted {
                Backend::Auto => Ok(None),
                _ => Err(refuse("is for CUDA devices; use auto".into())),
            };
        };
        let device = device.clone();
        let driver = CudaKernels::new(device.clone()).map_err(|error| refuse(error.to_string()))?;
        let converter = Arc::new(Converter::new(driver));
        if let Err(error) = converter.kernels() {
            tracing::warn!(%error, "the kernels cannot be used: fragments are copied one by one");
        }
        // What was asked for by name is there, or an error.
        wanted.choose(converter.capabilities(), None, 1).map_err(|error| refuse(error.to_string()))?;
        Ok(Some(Self { device, converter, wanted }))
    }

    /// The way for a route between the device and host memory, for batches of up to `blocks`
    /// blocks.
    ///
    /// # Errors
    /// No memory for the staging area.
    pub(crate) fn way(
        &self,
        path: Path,
        route: &Route,
        direction: Direction,
        blocks: usize,
    ) -> Result<Way, StartError> {
        let (pieces, bytes) = route.fragments();
        if pieces <= 1 && self.wanted != Backend::Kernel {
            return Ok(Way::Copies(CopyEngine::Auto));
        }
        let measured = match self.wanted {
            Backend::Auto => self.converter.host_copies().inspect_err(|error| {
                tracing::warn!(%error, "ways of copying could not be measured on this device");
            }),
            _ => Err(DeviceError::Abandoned { what: "a measurement that nobody needs" }),
        };
        let crossover = measured.ok().and_then(|measured| match direction {
            Direction::HostToDevice => measured.from_host.crossover,
            _ => measured.to_host.crossover,
        });
        let chosen =
            self.wanted.choose(self.converter.capabilities(), crossover.as_ref(), bytes / pieces.max(1));
        let chosen = chosen.map_err(|error| bad("copies", self.wanted.to_string(), error.to_string()))?;
        tracing::info!(%path, way = %chosen, fragment_bytes = bytes / pieces.max(1), "copies of this path");
        Ok(match chosen {
            Backend::Batch => Way::Copies(CopyEngine::Batch),
            Backend::Async => Way::Copies(CopyEngine::Single),
            Backend::Kernel | Backend::Auto => {
                Way::Fused(Box::new(Fused::new(self, path, route, direction, blocks)?))
            }
        })
    }
}

/// A staging area of one path, and what joins it to both ends.
pub(crate) struct Fused {
    converter: Arc<Converter<CudaKernels>>,
    /// Between device memory and the staging area.
    inner: Route,
    /// Between the staging area and host memory.
    outer: Route,
    /// Of whole blocks whose rows the two sides order differently.
    conversion: Option<(BlockShape, Side, Side)>,
    into_device: bool,
    slots: usize,
}

/// One side of a conversion.
struct Side {
    form: BlockForm,
    memory: BoundLayout,
}

impl Fused {
    fn new(
        kernels: &Kernels,
        path: Path,
        route: &Route,
        direction: Direction,
        blocks: usize,
    ) -> Result<Self, StartError> {
        let into_device = direction == Direction::HostToDevice;
        let (device, host) =
            if into_device { (route.dst(), route.src()) } else { (route.src(), route.dst()) };
        let failed = |reason: String| StartError::Staging {
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            reason,
        };
        let slots = u32::try_from(blocks).unwrap_or(u32::MAX);
        let layout = crate::slot_layout::disk_layout(host.layout().as_ref(), slots)
            .map_err(|error| failed(error.to_string()))?;
        let allocator = DeviceAllocator::new(Arc::new(kernels.device.clone()));
        let staging =
            BoundLayout::allocate(Arc::new(layout), &allocator).map_err(|error| failed(error.to_string()))?;
        let join = |src: &BoundLayout, dst: &BoundLayout| {
            Route::new(src.clone(), dst.clone()).map_err(|error| layouts(path.src, path.dst, &error))
        };
        let (inner, outer) = if into_device {
            (join(&staging, device)?, join(host, &staging)?)
        } else {
            (join(device, &staging)?, join(&staging, host)?)
        };
        let side = |memory: &BoundLayout| {
            form_of(memory.layout().as_ref()).map(|form| Side { form, memory: memory.clone() })
        };
        let (from, to) = if into_device { (&staging, device) } else { (device, &staging) };
        let shape = BlockShape::of_config(device.layout().config()).ok();
        let conversion = match (shape, side(from), side(to)) {
            (Some(shape), Some(from), Some(to)) => Some((shape, from, to)),
            _ => None,
        };
        let converter = Arc::clone(&kernels.converter);
        Ok(Self { converter, inner, outer, conversion, into_device, slots: blocks })
    }

    /// Blocks that fit the staging area.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Queues blocks, at most as many as there are slots. Work of a stream is done in order, so
    /// whatever was in the slots has left them before. The event is complete when the blocks are
    /// where they belong.
    pub(crate) fn issue<T>(
        &mut self,
        stream: &CudaStream,
        items: &[Item<T>],
        layers: Option<LayerRange>,
    ) -> Result<Event, DeviceError> {
        let direction = if self.into_device { Direction::HostToDevice } else { Direction::DeviceToHost };
        let mut copies = CopyBatch::with_capacity(direction, items.len());
        let plan = self.outer.plan(layers).map_err(|error| refused(&error))?;
        for (slot, item) in (0_u32..).zip(items) {
            let (from, to) = if self.into_device { (item.from, slot) } else { (slot, item.to) };
            push_block(&mut copies, &self.outer, &plan, from, to)?;
        }
        if self.into_device {
            stream.copy(copies).map_err(DeviceError::from)?;
            self.rearrange(stream, items, layers)?;
            return stream.record();
        }
        self.rearrange(stream, items, layers)?;
        stream.copy(copies).map_err(DeviceError::from)
    }

    /// Queues the kernel between device memory and the staging area.
    fn rearrange<T>(
        &mut self,
        stream: &CudaStream,
        items: &[Item<T>],
        layers: Option<LayerRange>,
    ) -> Result<(), DeviceError> {
        let failed = |reason: &dyn std::fmt::Display| DeviceError::OperationFailed {
            stream: stream.name().into(),
            operation: format!("rearranging {} blocks by a kernel", items.len()),
            reason: reason.to_string(),
        };
        if let (Some((shape, from, to)), None) = (&self.conversion, layers) {
            let slot = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
            let ends = items
                .iter()
                .enumerate()
                .map(|(at, item)| if self.into_device { (slot(at), item.to) } else { (item.from, slot(at)) });
            let (sources, targets): (Vec<u32>, Vec<u32>) = ends.unzip();
            let conversion = from
                .operand(shape, &sources)
                .and_then(|from| Ok((from, to.operand(shape, &targets)?)))
                .map_err(|error| failed(&error))?;
            let conversion =
                Conversion::new(*shape, conversion.0, conversion.1).map_err(|error| failed(&error))?;
            // SAFETY: the routes hold the memory of both sides until the copier is dropped, which
            // is after the last event of its stream came back; the plan's claims keep others away
            // from the blocks, the order of the stream from the slots.
            let queued = unsafe { self.converter.convert(stream, &conversion, Backend::Kernel) };
            return queued.map(|_kernel| ()).map_err(|error| failed(&error));
        }
        let plan = self.inner.plan(layers).map_err(|error| refused(&error))?;
        let mut pieces = Vec::with_capacity(plan.num_runs() as usize * items.len());
        for (slot, item) in (0_u32..).zip(items) {
            let (from, to) = if self.into_device { (slot, item.to) } else { (item.from, slot) };
            for run in plan.runs(from, to).map_err(|error| refused(&error))? {
                let at = |memory: &BoundLayout, region: u32, offset: u64| match memory.region(region) {
                    Ok(RegionBytes::Device(bytes)) => bytes.address_of(offset, run.len),
                    _ => Err(failed(&"a region is not device memory")),
                };
                pieces.push(Piece {
                    from: at(self.inner.src(), run.src_region, run.src_offset)?,
                    to: at(self.inner.dst(), run.dst_region, run.dst_offset)?,
                    bytes: run.len,
                });
            }
        }
        // SAFETY: as above.
        let queued = unsafe { self.converter.copy_pairs(stream, &pieces, Backend::Kernel) };
        queued.map(|_kernel| ()).map_err(|error| failed(&error))
    }
}

impl Side {
    /// The chunks of these blocks.
    fn operand(&self, shape: &BlockShape, blocks: &[u32]) -> Result<Operand, DeviceError> {
        let layout = self.memory.layout();
        let (layers, outers) = (layout.config().num_layers, layout.config().outer_dim);
        let cells: Vec<(u32, u32)> = if self.form.chunks_per_block(shape) == 1 {
            vec![(0, 0)]
        } else {
            (0..layers).flat_map(|layer| (0..outers).map(move |outer| (layer, outer))).collect()
        };
        let bytes = self.form.chunk_bytes(shape) as u64;
        let wrong = |what: String| DeviceError::OperationFailed {
            stream: "none".into(),
            operation: "finding a block's chunks".into(),
            reason: what,
        };
        let mut addresses = Vec::with_capacity(cells.len() * blocks.len());
        for block in blocks {
            for (layer, outer) in &cells {
                let view = layout.view(*layer, Cell::Kv(*outer)).map_err(|error| wrong(error.to_string()))?;
                let offset = view.offset + view.block_stride * u64::from(*block);
                match self.memory.region(view.region) {
                    Ok(RegionBytes::Device(memory)) => addresses.push(memory.address_of(offset, bytes)?),
                    _ => return Err(wrong("a region is not device memory".into())),
                }
            }
        }
        Ok(Operand::pointers(self.form, addresses))
    }
}

/// The form of a layout's blocks, if they have one.
fn form_of(layout: &dyn BlockLayout) -> Option<BlockForm> {
    let contiguous = BlockForm::of_contiguous(layout.axis_order()).ok()?;
    match (layout.layout_type(), contiguous) {
        (LayoutType::FullyContiguous, form) => Some(form),
        (LayoutType::LayerSeparate(_), BlockForm::Operational(order))
            if matches!(layout.axis_order(), AxisOrder::Nhd | AxisOrder::Hnd) =>
        {
            Some(BlockForm::Stack(order))
        }
        _ => None,
    }
}
