//! Blocks in device memory, in each form, as an engine and a store would have them.

use std::time::{Duration, Instant};

use kvbm_device::{CopyBatch, Device, DeviceMemory, Direction, HostBuffer, Stream};
use kvbm_kernels::{BlockForm, BlockShape, ChunkOrder, Heads, Operand, convert_heads};

use crate::{Failure, Gpu};

/// Every form.
pub(crate) const FORMS: [BlockForm; 5] = [
    BlockForm::Stack(ChunkOrder::Nhd),
    BlockForm::Stack(ChunkOrder::Hnd),
    BlockForm::Operational(ChunkOrder::Nhd),
    BlockForm::Operational(ChunkOrder::Hnd),
    BlockForm::Universal,
];

/// Nothing here takes longer; a device that hangs is an error.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// Random numbers that repeat (`SplitMix64`).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(len).collect()
    }
}

/// `[nl, no, nh, nt, hd, element bytes]`
pub(crate) type Dims = [usize; 6];

pub(crate) fn shape_of([nl, no, nh, nt, hd, width]: Dims) -> Result<BlockShape, Failure> {
    Ok(BlockShape::new(nl, no, nh, nt, hd, width)?)
}

/// Blocks of a form in one allocation. A stack lies as engines have it: for each layer and outer
/// part, all blocks.
pub(crate) struct Blocks {
    pub(crate) form: BlockForm,
    pub(crate) memory: DeviceMemory,
    dims: Dims,
    count: usize,
}

impl Blocks {
    pub(crate) fn new(gpu: &Gpu, form: BlockForm, dims: Dims, count: usize) -> Result<Self, Failure> {
        let bytes = (shape_of(dims)?.block_bytes() * count) as u64;
        Ok(Self { form, memory: gpu.device.allocate(bytes, 256)?, dims, count })
    }

    fn chunk_bytes(&self) -> usize {
        let [nl, no, nh, nt, hd, width] = self.dims;
        let inner = nh * nt * hd * width;
        if matches!(self.form, BlockForm::Stack(_)) { inner } else { nl * no * inner }
    }

    /// By base and strides: a launch needs no table.
    pub(crate) fn operand(&self) -> Operand {
        let (base, blocks, chunk) = (self.memory.address(), self.count as u64, self.chunk_bytes() as u64);
        let operand = match self.form {
            BlockForm::Stack(order) => {
                let outer = blocks * chunk;
                Operand::strided_stack(order, base, blocks, [chunk, self.dims[1] as u64 * outer, outer])
            }
            form => Operand::strided(form, base, blocks, chunk),
        };
        operand.on_device(self.memory.device().0)
    }

    /// By the address of every chunk, as an engine names its blocks.
    pub(crate) fn pointers(&self) -> Operand {
        let chunk = self.chunk_bytes() as u64;
        let addresses = self.order().map(|at| self.memory.address() + at as u64 * chunk).collect();
        Operand::pointers(self.form, addresses).on_device(self.memory.device().0)
    }

    /// Where the chunks lie in memory, block by block.
    fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let chunks = if matches!(self.form, BlockForm::Stack(_)) { self.dims[0] * self.dims[1] } else { 1 };
        let count = self.count;
        (0..count).flat_map(move |block| (0..chunks).map(move |chunk| chunk * count + block))
    }

    pub(crate) fn upload(&self, stream: &dyn Stream, bytes: &[u8]) -> Result<(), Failure> {
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        let host = HostBuffer::from_bytes(bytes);
        batch.push_host_to_device(&host, 0, &self.memory, 0, bytes.len() as u64)?;
        Ok(stream.copy(batch).map_err(|refused| refused.error)?.wait(soon())?)
    }

    pub(crate) fn download(&self, stream: &dyn Stream) -> Result<Vec<u8>, Failure> {
        let mut host = HostBuffer::zeroed(self.memory.len() as usize);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&self.memory, 0, &host, 0, host.len())?;
        stream.copy(batch).map_err(|refused| refused.error)?.wait(soon())?;
        Ok(host.exclusive_bytes()?.to_vec())
    }
}

/// What `to` must hold after a conversion of `from`, by the CPU; `shape` is that of the heads that
/// are touched.
pub(crate) fn expected(
    shape: &BlockShape,
    (from, from_heads, source): (&Blocks, Heads, &[u8]),
    (to, to_heads, before): (&Blocks, Heads, &[u8]),
) -> Result<Vec<u8>, Failure> {
    let mut result = before.to_vec();
    let sources: Vec<&[u8]> = source.chunks_exact(from.chunk_bytes()).collect();
    let sources: Vec<&[u8]> = from.order().map(|at| sources[at]).collect();
    let mut parts: Vec<Option<&mut [u8]>> = result.chunks_exact_mut(to.chunk_bytes()).map(Some).collect();
    let mut targets: Vec<&mut [u8]> = to.order().filter_map(|at| parts[at].take()).collect();
    convert_heads(shape, (from.form, from_heads), &sources, (to.form, to_heads), &mut targets)?;
    Ok(result)
}
