//! `Layout`: where the engine's blocks lie in memory.

use crate::errors::{Error, Result};
use kvbm::config::ModelConfig;
use kvbm::device::Owner;
use kvbm::layout::{BlockLayout, OpaqueLayout, OpaqueTensor};
use kvbm::storage::{BoundLayout, HostStorage, RegionBinding};
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where the engine's blocks lie in host memory: for each tensor an address, a block stride and a
/// number of bytes. A block is the bytes at its place in every tensor; kvbm copies them as they are
/// and knows no axes.
#[pyclass(module = "kvbm_rs")]
pub(crate) struct Layout {
    num_blocks: u32,
    page_size: u32,
    tensors: Vec<EngineTensor>,
}

/// One tensor of the engine.
struct EngineTensor {
    block_bytes: usize,
    /// None where the tensor is in a worker's process.
    memory: Option<TensorMemory>,
}

/// Where a tensor lies.
struct TensorMemory {
    address: usize,
    length: usize,
    block_stride: usize,
    owner: Py<PyAny>,
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
    /// alive.
    ///
    /// Whoever calls this promises that the address is right: kvbm reads and writes there.
    #[pyo3(signature = (address, length, *, block_stride, block_bytes, owner))]
    fn add(
        &mut self,
        address: usize,
        length: usize,
        block_stride: usize,
        block_bytes: usize,
        owner: Py<PyAny>,
    ) -> Result<()> {
        let at = self.tensors.len();
        let refuse = |text: String| Err(Error::argument(format!("tensor {at}: {text}")));
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
        let memory = Some(TensorMemory { address, length, block_stride, owner });
        self.tensors.push(EngineTensor { block_bytes, memory });
        Ok(())
    }

    /// The layout of blocks that workers in other processes hold: `tensor_bytes[i]` bytes of each
    /// block lie in tensor `i` of every rank. For `KvBlockManager(..., workers=...)`.
    #[staticmethod]
    fn of_workers(num_blocks: u32, page_size: u32, tensor_bytes: Vec<u32>) -> Result<Self> {
        let mut layout = Self::new(num_blocks, page_size)?;
        if let Some(at) = tensor_bytes.iter().position(|bytes| *bytes == 0) {
            return Err(Error::argument(format!("tensor {at}: 0 bytes a block: give 1 or more")));
        }
        let tensor = |bytes: u32| EngineTensor { block_bytes: bytes as usize, memory: None };
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

    /// Tensors.
    #[getter]
    fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    fn __repr__(&self) -> String {
        let (blocks, bytes, tensors) = (self.num_blocks, self.block_bytes(), self.tensors.len());
        format!("Layout({blocks} blocks of {bytes} bytes in {tensors} tensors)")
    }
}

impl Layout {
    /// The shape that the manager's other tiers have: bytes, tensor by tensor.
    pub(crate) fn model(&self) -> Result<ModelConfig> {
        if self.tensors.is_empty() {
            return Err(Error::argument("the layout has no tensors: add the engine's KV tensors to it"));
        }
        Ok(ModelConfig::opaque(self.page_size, self.tensors.iter().map(|tensor| tensor.block_bytes as u32)))
    }

    /// The layout, bound to the engine's memory; the owners live as long as it does.
    pub(crate) fn bind(&self, py: Python<'_>) -> Result<BoundLayout> {
        let (mut places, mut bindings) = (Vec::new(), Vec::new());
        for (region, tensor) in (0..).zip(&self.tensors) {
            let Some(memory) = &tensor.memory else {
                let text = "the layout is that of workers in other processes: name their sockets (`workers`), \
                            or add tensors of this process";
                return Err(Error::argument(text));
            };
            let (block_stride, block_bytes) = (memory.block_stride as u64, tensor.block_bytes as u32);
            places.push(OpaqueTensor { region, offset: 0, block_stride, block_bytes });
            bindings.push(RegionBinding::new(Arc::new(memory.bind(py)?)));
        }
        let layout: Arc<dyn BlockLayout> = Arc::new(OpaqueLayout::new(self.num_blocks, places)?);
        Ok(BoundLayout::bind(layout, bindings)?)
    }
}

impl TensorMemory {
    fn bind(&self, py: Python<'_>) -> Result<HostStorage> {
        let owner: Owner = Arc::new(self.owner.clone_ref(py));
        let start =
            NonNull::new(std::ptr::with_exposed_provenance_mut(self.address)).unwrap_or(NonNull::dangling());
        // SAFETY: `add` documents that its caller promises `length` valid bytes there while the
        // owner lives. Python makes no Rust references into them, and neither does this crate; the
        // manager's protocol says who writes when.
        Ok(unsafe { HostStorage::from_external(start, self.length as u64, owner) }?)
    }
}
