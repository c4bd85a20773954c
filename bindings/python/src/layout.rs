//! `Layout`: where the engine's blocks lie in memory.

use crate::cuda;
use crate::errors::{Error, Result};
use crate::tensor::{Place, TensorView};
use kvbm::G1Memory;
use kvbm::config::ModelConfig;
use kvbm::device::{CudaDevice, Owner};
use kvbm::layout::{BlockLayout, OpaqueLayout, OpaqueTensor};
use kvbm::storage::{BoundLayout, DeviceStorage, HostStorage, RegionBinding, Storage};
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where the engine's blocks lie, in host memory or on one CUDA device: for each tensor an address,
/// a block stride and a number of bytes. A block is the bytes at its place in every tensor; kvbm
/// copies them as they are and knows no axes.
#[pyclass(module = "kvbm_rs")]
pub(crate) struct Layout {
    num_blocks: u32,
    page_size: u32,
    tensors: Vec<BlockTensor>,
}

/// One tensor of the engine.
struct BlockTensor {
    block_bytes: usize,
    /// None where the tensor is in a worker's process.
    memory: Option<TensorMemory>,
}

/// Where a tensor lies.
struct TensorMemory {
    address: usize,
    length: usize,
    block_stride: usize,
    place: Place,
    owner: Py<PyAny>,
}

/// The engine's memory, and its device where it lies on one.
pub(crate) struct EngineMemory {
    pub(crate) bound: BoundLayout,
    pub(crate) device: Option<CudaDevice>,
}

impl EngineMemory {
    /// As a worker takes it.
    pub(crate) fn g1(&self) -> G1Memory {
        let bound = self.bound.clone();
        match self.device.clone() {
            Some(device) => G1Memory::EngineDevice(Arc::new(device), bound),
            None => G1Memory::EngineHost(bound),
        }
    }
}

#[pymethods]
impl Layout {
    /// `num_blocks` blocks of `page_size` tokens, without tensors yet.
    #[new]
    fn new(num_blocks: u32, page_size: u32) -> Result<Self> {
        if num_blocks == 0 || page_size == 0 {
            let text = format!("{num_blocks} blocks of {page_size} tokens: both must be above 0");
            return Err(Error::argument(text));
        }
        Ok(Self { num_blocks, page_size, tensors: Vec::new() })
    }

    /// Adds a tensor: block `i` is the `block_bytes` bytes at `address + i * block_stride`. The
    /// memory is `length` bytes long and stays valid while `owner` lives, which the manager keeps
    /// alive. `device` is `"cpu"`, or `"cuda:0"` and so on, one for all tensors of a layout.
    ///
    /// Whoever calls this promises that the address is right: kvbm reads and writes there.
    #[pyo3(signature = (address, length, *, block_stride, block_bytes, owner, device = "cpu"))]
    fn add(
        &mut self,
        address: usize,
        length: usize,
        block_stride: usize,
        block_bytes: usize,
        owner: Py<PyAny>,
        device: &str,
    ) -> Result<()> {
        let memory = TensorMemory { address, length, block_stride, place: device.parse()?, owner };
        self.push(memory, block_bytes)
    }

    /// Adds a tensor with one axis of blocks: a `Tensor`, or whatever speaks DLPack. The bytes of a
    /// block must lie together, in any order of the other axes. The manager keeps the tensor alive.
    #[pyo3(signature = (tensor, *, block_axis = 0))]
    fn add_tensor(&mut self, tensor: &Bound<'_, PyAny>, block_axis: i64) -> PyResult<()> {
        let at = self.tensors.len();
        let view = TensorView::from_any(tensor, &format!("tensor {at}"))?;
        let (memory, block_bytes) = self.blocks_of(tensor.py(), view.get(), block_axis)?;
        Ok(self.push(memory, block_bytes)?)
    }

    /// The layout of blocks that workers in other processes hold: `tensor_bytes[i]` bytes of each
    /// block lie in tensor `i` of every rank. For `KvBlockManager(..., workers=...)`.
    #[staticmethod]
    fn of_workers(num_blocks: u32, page_size: u32, tensor_bytes: Vec<u32>) -> Result<Self> {
        let mut layout = Self::new(num_blocks, page_size)?;
        if let Some(at) = tensor_bytes.iter().position(|bytes| *bytes == 0) {
            return Err(Error::argument(format!("tensor {at}: 0 bytes a block: give 1 or more")));
        }
        let tensor = |bytes: u32| BlockTensor { block_bytes: bytes as usize, memory: None };
        layout.tensors = tensor_bytes.into_iter().map(tensor).collect();
        Ok(layout)
    }

    /// Blocks.
    #[getter]
    pub(crate) fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Tokens of a block.
    #[getter]
    fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Bytes of a block in all tensors.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.block_bytes).sum()
    }

    /// Bytes of a block in each tensor: what `of_workers` takes.
    #[getter]
    fn tensor_bytes(&self) -> Vec<usize> {
        self.tensors.iter().map(|tensor| tensor.block_bytes).collect()
    }

    /// What a node daemon has to be told of these blocks: the section `[model]` of its
    /// configuration.
    #[getter]
    fn daemon_model(&self) -> Result<String> {
        let model = self.model()?;
        let (tokens, tensors) = (model.page_size, &model.opaque_tensors);
        Ok(format!("[model]\npage_size = {tokens}\nopaque_tensors = \"{tensors}\"\n"))
    }

    /// Tensors.
    #[getter]
    fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// `"cpu"`, or the device that the tensors lie on; `None` before there is one, or where they are
    /// in workers' processes.
    #[getter]
    fn device(&self) -> Option<String> {
        self.place().map(|place| place.to_string())
    }

    fn __repr__(&self) -> String {
        let (blocks, bytes, tensors) = (self.num_blocks, self.block_bytes(), self.tensors.len());
        format!("Layout({blocks} blocks of {bytes} bytes in {tensors} tensors)")
    }
}

impl Layout {
    /// Whether its tensors lie in memory of this process.
    pub(crate) fn has_memory(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.memory.is_some())
    }

    fn place(&self) -> Option<Place> {
        self.tensors.first().and_then(|tensor| tensor.memory.as_ref()).map(|memory| memory.place)
    }

    fn push(&mut self, memory: TensorMemory, block_bytes: usize) -> Result<()> {
        let at = self.tensors.len();
        let refuse = |text: String| Err(Error::argument(format!("tensor {at}: {text}")));
        let TensorMemory { address, length, block_stride, place, .. } = memory;
        if address == 0 {
            return refuse("address 0; give the address of the first byte of block 0".to_owned());
        }
        if block_bytes == 0 || block_bytes > block_stride {
            return refuse(format!(
                "{block_bytes} bytes a block at a stride of {block_stride}: give 1 to the stride"
            ));
        }
        let needed = (self.num_blocks as usize - 1).checked_mul(block_stride);
        let needed = needed.and_then(|bytes| bytes.checked_add(block_bytes));
        if needed.is_none_or(|needed| needed > length) || address.checked_add(length).is_none() {
            let blocks = self.num_blocks;
            return refuse(format!(
                "{blocks} blocks at a stride of {block_stride} do not fit into {length} bytes"
            ));
        }
        if u32::try_from(block_bytes).is_err() {
            return refuse(format!("{block_bytes} bytes a block: at most {} are supported", u32::MAX));
        }
        if let Some(other) = self.place().filter(|other| *other != place) {
            return refuse(format!(
                "memory of {place}, and tensor 0 lies on {other}: all tensors of a layout lie in one place"
            ));
        }
        self.tensors.push(BlockTensor { block_bytes, memory: Some(memory) });
        Ok(())
    }

    /// Where the blocks of a tensor lie, and the bytes of each.
    fn blocks_of(&self, py: Python<'_>, view: &TensorView, block_axis: i64) -> Result<(TensorMemory, usize)> {
        let at = self.tensors.len();
        let refuse = |text: String| Err(Error::argument(format!("tensor {at}: {text}")));
        let TensorView { address, place, dtype, shape, strides, is_read_only, owner } = view;
        if *is_read_only {
            return refuse("read-only memory; kvbm writes loaded blocks there".to_owned());
        }
        let axes = if block_axis < 0 { i64::try_from(shape.len()).unwrap_or(0) } else { 0 };
        let Some(axis) = usize::try_from(block_axis + axes).ok().filter(|axis| *axis < shape.len()) else {
            return refuse(format!("no axis {block_axis} in the shape {shape:?}"));
        };
        if shape[axis] != u64::from(self.num_blocks) {
            let (blocks, expected) = (shape[axis], self.num_blocks);
            return refuse(format!("{blocks} blocks, and the layout has {expected}"));
        }
        let others =
            strides.iter().zip(shape).enumerate().filter(|(other, (_, size))| *other != axis && **size != 1);
        let mut inner: Vec<_> = others.map(|(_, (stride, size))| (*stride, *size)).collect();
        inner.sort_unstable();
        let mut elements = 1_u64;
        for (stride, size) in inner {
            if stride != elements {
                return refuse(format!(
                    "a block of the shape {shape:?}, strides {strides:?} of {dtype} on {place}, is not contiguous; \
                     give tensors in which the bytes of a block lie together"
                ));
            }
            elements = elements.saturating_mul(size);
        }
        let width = dtype.width() as u64;
        let block_bytes = elements.saturating_mul(width);
        let stride = if self.num_blocks > 1 { strides[axis].saturating_mul(width) } else { block_bytes };
        let length = stride.saturating_mul(u64::from(self.num_blocks) - 1).saturating_add(block_bytes);
        let [length, block_stride, block_bytes] =
            [length, stride, block_bytes].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let owner = owner.clone_ref(py);
        Ok((TensorMemory { address: *address, length, block_stride, place: *place, owner }, block_bytes))
    }

    /// The shape that the manager's other tiers have: bytes, tensor by tensor.
    pub(crate) fn model(&self) -> Result<ModelConfig> {
        if self.tensors.is_empty() {
            return Err(Error::argument("the layout has no tensors: add the engine's KV tensors to it"));
        }
        Ok(ModelConfig::opaque(self.page_size, self.tensors.iter().map(|tensor| tensor.block_bytes as u32)))
    }

    /// The layout, bound to the engine's memory; the owners live as long as it does.
    pub(crate) fn bind(&self, py: Python<'_>) -> Result<EngineMemory> {
        let device = match self.place() {
            Some(Place::Cuda(ordinal)) => Some(cuda::open(ordinal)?),
            _ => None,
        };
        let (mut places, mut bindings) = (Vec::new(), Vec::new());
        for (region, tensor) in (0..).zip(&self.tensors) {
            let Some(memory) = &tensor.memory else {
                let text = "the layout is that of workers in other processes: name their sockets (`workers`), \
                            or add tensors of this process";
                return Err(Error::argument(text));
            };
            let (block_stride, block_bytes) = (memory.block_stride as u64, tensor.block_bytes as u32);
            places.push(OpaqueTensor { region, offset: 0, block_stride, block_bytes });
            bindings.push(RegionBinding::new(memory.bind(py, device.as_ref())?));
        }
        let layout: Arc<dyn BlockLayout> = Arc::new(OpaqueLayout::new(self.num_blocks, places)?);
        let bound = BoundLayout::bind(layout, bindings)?;
        Ok(EngineMemory { bound, device })
    }
}

impl TensorMemory {
    fn bind(&self, py: Python<'_>, device: Option<&CudaDevice>) -> Result<Arc<dyn Storage>> {
        let owner: Owner = Arc::new(self.owner.clone_ref(py));
        if let Some(device) = device {
            // SAFETY: `add` documents that its caller promises `length` bytes of the device there
            // while the owner lives; a framework's tensor keeps its memory.
            let storage = unsafe {
                DeviceStorage::from_external(self.address as u64, self.length as u64, device, owner)
            };
            return Ok(Arc::new(storage?));
        }
        let start =
            NonNull::new(std::ptr::with_exposed_provenance_mut(self.address)).unwrap_or(NonNull::dangling());
        // SAFETY: `add` documents that its caller promises `length` valid bytes there while the
        // owner lives. Python makes no Rust references into them, and neither does this crate; the
        // manager's protocol says who writes when.
        Ok(Arc::new(unsafe { HostStorage::from_external(start, self.length as u64, owner) }?))
    }
}
