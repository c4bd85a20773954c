//! `Layout`: where the engine's blocks lie in memory.

use crate::cuda;
use crate::errors::{Error, Result};
use crate::view::{Place, TensorView};
use kvbm::config::{CacheGroup, LayerContent, ModelConfig};
use kvbm::device::{CudaDevice, Device, Owner};
use kvbm::layout::{BlockLayout, OpaqueLayout, OpaqueTensor};
use kvbm::storage::{BoundLayout, DeviceStorage, HostStorage, RegionBinding, Storage};
use kvbm::{G1Memory, GroupKind};
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where the engine's blocks lie, in host memory or on one CUDA device: for each tensor an address,
/// a block stride and a number of bytes. A block is the bytes at its place in every tensor; kvbm
/// copies them as they are and knows no axes.
///
/// A model whose layers cache differently has several cache groups (`begin_group`). They share the
/// block ids: an id means a block of one group at a time, so tensors of groups may overlap.
#[pyclass(module = "kvbm_rs")]
pub(crate) struct Layout {
    num_blocks: u32,
    page_size: u32,
    /// One at least; a tensor is added to the last.
    groups: Vec<TensorGroup>,
    /// Ranks that hold the same bytes.
    replicas: u32,
}

/// The tensors of a cache group.
struct TensorGroup {
    kind: GroupKind,
    /// Whether `begin_group` named it.
    is_named: bool,
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

/// The engine's memory by cache group, and its device where it lies on one.
pub(crate) struct EngineMemory {
    pub(crate) groups: Vec<BoundLayout>,
    pub(crate) device: Option<CudaDevice>,
}

impl EngineMemory {
    /// As a worker takes it.
    pub(crate) fn g1(&self) -> G1Memory {
        G1Memory::EngineGroups(self.device(), self.groups.clone())
    }

    pub(crate) fn device(&self) -> Option<Arc<dyn Device>> {
        self.device.clone().map(|device| Arc::new(device) as Arc<dyn Device>)
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
        let groups = vec![TensorGroup { kind: GroupKind::Full, is_named: false, tensors: Vec::new() }];
        Ok(Self { num_blocks, page_size, groups, replicas: 1 })
    }

    /// The tensors that are added from now on are those of a cache group of this kind: `"full"`
    /// (each token's data, of all tokens), `"window=TOKENS"` (of the last tokens) or `"state"` (a
    /// state after the block's last token). Tensors of one group have blocks of the same bytes.
    /// Without a call, all tensors are one `"full"` group.
    fn begin_group(&mut self, kind: &str) -> Result<()> {
        let kind = kind_of(kind)?;
        let number = self.groups.len();
        let last = self.last();
        if !last.tensors.is_empty() {
            if !last.is_named {
                let text =
                    "there are tensors before the first group: begin a group before each tensor is added";
                return Err(Error::argument(text));
            }
            self.groups.push(TensorGroup { kind, is_named: true, tensors: Vec::new() });
        } else if last.is_named {
            let text = format!("group {} has no tensors: add them before the next group", number - 1);
            return Err(Error::argument(text));
        } else {
            (last.kind, last.is_named) = (kind, true);
        }
        Ok(())
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
        let at = self.last().tensors.len();
        let view = TensorView::from_any(tensor, &format!("tensor {at}"))?;
        let (memory, block_bytes) = self.blocks_of(tensor.py(), view.get(), block_axis)?;
        Ok(self.push(memory, block_bytes)?)
    }

    /// The layout of blocks that workers in other processes hold: `tensor_bytes[i]` bytes of each
    /// block lie in tensor `i` of every rank. For `KvBlockManager(..., workers=...)`. Of a model
    /// with several cache groups give `groups`: for each its kind, as `begin_group` takes it, and
    /// its `tensor_bytes`.
    #[staticmethod]
    #[pyo3(signature = (num_blocks, page_size, tensor_bytes = Vec::new(), *, groups = Vec::new()))]
    fn of_workers(
        num_blocks: u32,
        page_size: u32,
        tensor_bytes: Vec<u32>,
        groups: Vec<(String, Vec<u32>)>,
    ) -> Result<Self> {
        let mut layout = Self::new(num_blocks, page_size)?;
        if !tensor_bytes.is_empty() && !groups.is_empty() {
            return Err(Error::argument("both tensor_bytes and groups: give one of them"));
        }
        layout.add_elsewhere(tensor_bytes)?;
        for (kind, tensor_bytes) in groups {
            layout.begin_group(&kind)?;
            layout.add_elsewhere(tensor_bytes)?;
        }
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

    /// Bytes of a block in all tensors; of the longest group's block, where there are several.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        let bytes = |group: &TensorGroup| group.tensors.iter().map(|tensor| tensor.block_bytes).sum();
        self.groups.iter().map(bytes).max().unwrap_or(0)
    }

    /// Bytes of a block in each tensor: what `of_workers` takes.
    #[getter]
    fn tensor_bytes(&self) -> Vec<usize> {
        self.tensors().map(|tensor| tensor.block_bytes).collect()
    }

    /// Kind of each cache group, and bytes of its block in each of its tensors: what `of_workers`
    /// takes as `groups`. Empty for a layout without `begin_group`.
    #[getter]
    fn groups(&self) -> Vec<(String, Vec<usize>)> {
        let bytes = |group: &TensorGroup| group.tensors.iter().map(|tensor| tensor.block_bytes).collect();
        let named = self.groups.iter().filter(|group| group.is_named);
        named.map(|group| (group.kind.to_string(), bytes(group))).collect()
    }

    /// What a node daemon has to be told of these blocks: the section `[model]` of its
    /// configuration.
    #[getter]
    fn daemon_model(&self) -> Result<String> {
        let model = self.model()?;
        let tokens = model.page_size;
        let replicas = match model.replicas {
            1 => String::new(),
            replicas => format!("replicas = {replicas}\n"),
        };
        if model.has_groups() {
            let group = |group: &CacheGroup| format!("    \"{group}\",\n");
            let groups: String = model.groups.as_slice().iter().map(group).collect();
            return Ok(format!("[model]\npage_size = {tokens}\n{replicas}groups = [\n{groups}]\n"));
        }
        let tensors = &model.opaque_tensors;
        Ok(format!("[model]\npage_size = {tokens}\n{replicas}opaque_tensors = \"{tensors}\"\n"))
    }

    /// Tensors of all groups.
    #[getter]
    fn num_tensors(&self) -> usize {
        self.tensors().count()
    }

    /// Ranks, one after another, whose tensors hold the same bytes: all ranks with MLA, those that
    /// share a KV head else. Disk and volumes then have one copy of their blocks. 1 unless it is
    /// set; it must divide the number of ranks.
    #[getter]
    pub(crate) fn replicas(&self) -> u32 {
        self.replicas
    }

    #[setter]
    fn set_replicas(&mut self, replicas: u32) -> Result<()> {
        if replicas == 0 {
            return Err(Error::argument("replicas = 0: give 1 or more"));
        }
        self.replicas = replicas;
        Ok(())
    }

    /// `"cpu"`, or the device that the tensors lie on; `None` before there is one, or where they
    /// are in workers' processes.
    #[getter]
    fn device(&self) -> Option<String> {
        self.place().map(|place| place.to_string())
    }

    fn __repr__(&self) -> String {
        let (blocks, bytes, tensors) = (self.num_blocks, self.block_bytes(), self.num_tensors());
        format!("Layout({blocks} blocks of {bytes} bytes in {tensors} tensors)")
    }
}

/// As `begin_group` takes it.
fn kind_of(text: &str) -> Result<GroupKind> {
    let window = text.strip_prefix("window=").and_then(|tokens| tokens.parse().ok());
    match (text, window) {
        ("full", _) => Ok(GroupKind::Full),
        ("state", _) => Ok(GroupKind::State),
        (_, Some(tokens)) if tokens > 0 => Ok(GroupKind::SlidingWindow(tokens)),
        _ => {
            let text =
                format!("{text:?} is no kind of cache group: give \"full\", \"window=TOKENS\" or \"state\"");
            Err(Error::argument(text))
        }
    }
}

impl Layout {
    /// What the layers of each cache group keep.
    pub(crate) fn kinds(&self) -> Vec<GroupKind> {
        self.groups.iter().map(|group| group.kind).collect()
    }

    /// Whether its tensors lie in memory of this process.
    pub(crate) fn has_memory(&self) -> bool {
        self.tensors().any(|tensor| tensor.memory.is_some())
    }

    fn place(&self) -> Option<Place> {
        self.tensors().next().and_then(|tensor| tensor.memory.as_ref()).map(|memory| memory.place)
    }

    fn tensors(&self) -> impl Iterator<Item = &BlockTensor> {
        self.groups.iter().flat_map(|group| &group.tensors)
    }

    /// The group to which tensors are added.
    fn last(&mut self) -> &mut TensorGroup {
        let last = self.groups.len() - 1;
        &mut self.groups[last]
    }

    /// Tensors of workers in other processes.
    fn add_elsewhere(&mut self, tensor_bytes: Vec<u32>) -> Result<()> {
        for (at, bytes) in tensor_bytes.into_iter().enumerate() {
            if bytes == 0 {
                return Err(Error::argument(format!("tensor {at}: 0 bytes a block: give 1 or more")));
            }
            self.add_to_group(BlockTensor { block_bytes: bytes as usize, memory: None })?;
        }
        Ok(())
    }

    /// Adds a tensor whose blocks are as long as those of the others.
    fn add_to_group(&mut self, tensor: BlockTensor) -> Result<()> {
        let number = self.groups.len() - 1;
        let last = self.last();
        let first = last.tensors.first().filter(|_| last.is_named).map(|first| first.block_bytes);
        if let Some(first) = first.filter(|first| *first != tensor.block_bytes) {
            let (at, bytes) = (last.tensors.len(), tensor.block_bytes);
            let text = format!(
                "tensor {at} of cache group {number}: {bytes} bytes a block, and tensor 0 has {first}: tensors of a group have \
                 blocks of the same bytes; begin another group for it"
            );
            return Err(Error::argument(text));
        }
        last.tensors.push(tensor);
        Ok(())
    }

    fn push(&mut self, memory: TensorMemory, block_bytes: usize) -> Result<()> {
        let at = self.last().tensors.len();
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
        self.add_to_group(BlockTensor { block_bytes, memory: Some(memory) })
    }

    /// Where the blocks of a tensor lie, and the bytes of each.
    fn blocks_of(&self, py: Python<'_>, view: &TensorView, block_axis: i64) -> Result<(TensorMemory, usize)> {
        let at = self.groups.last().map_or(0, |group| group.tensors.len());
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
        if let Some(empty) = self.groups.iter().position(|group| group.tensors.is_empty()) {
            let text = match self.groups.len() {
                1 => "the layout has no tensors: add the engine's KV tensors to it".to_owned(),
                _ => format!("cache group {empty} has no tensors: add the engine's KV tensors to it"),
            };
            return Err(Error::argument(text));
        }
        let bytes = |tensor: &BlockTensor| tensor.block_bytes as u32;
        if let [TensorGroup { is_named: false, tensors, .. }] = &self.groups[..] {
            let model = ModelConfig::opaque(self.page_size, tensors.iter().map(bytes));
            return Ok(ModelConfig { replicas: self.replicas, ..model });
        }
        let group = |TensorGroup { kind, tensors, .. }: &TensorGroup| {
            let content = LayerContent::Opaque { rank_bytes: tensors.first().map_or(0, bytes) };
            CacheGroup::new(*kind, tensors.len() as u32, content)
        };
        let groups = self.groups.iter().map(group).collect();
        let (page_size, replicas) = (self.page_size, self.replicas);
        Ok(ModelConfig { page_size, groups, replicas, ..ModelConfig::default() })
    }

    /// The layout, bound to the engine's memory; the owners live as long as it does.
    pub(crate) fn bind(&self, py: Python<'_>) -> Result<EngineMemory> {
        let device = match self.place() {
            Some(Place::Cuda(ordinal)) => Some(cuda::open(ordinal)?),
            _ => None,
        };
        let groups = self.groups.iter().map(|group| self.bind_group(py, group, device.as_ref()));
        Ok(EngineMemory { groups: groups.collect::<Result<_>>()?, device })
    }

    fn bind_group(
        &self,
        py: Python<'_>,
        group: &TensorGroup,
        device: Option<&CudaDevice>,
    ) -> Result<BoundLayout> {
        let (mut places, mut bindings) = (Vec::new(), Vec::new());
        for (region, tensor) in (0..).zip(&group.tensors) {
            let Some(memory) = &tensor.memory else {
                let text = "the layout is that of workers in other processes: name their sockets (`workers`), \
                            or add tensors of this process";
                return Err(Error::argument(text));
            };
            let (block_stride, block_bytes) = (memory.block_stride as u64, tensor.block_bytes as u32);
            places.push(OpaqueTensor { region, offset: 0, block_stride, block_bytes });
            bindings.push(RegionBinding::new(memory.bind(py, device)?));
        }
        let layout: Arc<dyn BlockLayout> = Arc::new(OpaqueLayout::new(self.num_blocks, places)?);
        Ok(BoundLayout::bind(layout, bindings)?)
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
