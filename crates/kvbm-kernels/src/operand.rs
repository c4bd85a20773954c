//! One side of a conversion on a device: where its blocks lie.

use crate::form::RowStrides;
use crate::{Argument, BlockForm, BlockShape, ChunkOrder, Heads, KernelError};

/// Where the chunks of a side lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The address of each chunk, block by block.
    Pointers(Vec<u64>),
    /// Chunk (layer, outer) of block b at `base + b * block + layer * layer_stride + outer *
    /// outer_stride`.
    Strided { base: u64, blocks: u64, block: u64, chunk: Option<[u64; 2]> },
}

/// One side of a conversion on a device: its form and where its blocks lie. Addresses are the
/// device's.
///
/// Chunks that are written must not share bytes with any other chunk of the conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    form: BlockForm,
    memory: Memory,
    heads: Option<Heads>,
    device: Option<u32>,
}

impl Operand {
    /// The address of each chunk, block by block, the chunks of a block in the order of the form.
    pub fn pointers(form: BlockForm, addresses: Vec<u64>) -> Self {
        Self::new(form, Memory::Pointers(addresses))
    }

    /// `blocks` blocks, each in one piece, every `block_stride` bytes from `base` on. The chunks of
    /// a stack lie one behind the other.
    pub fn strided(form: BlockForm, base: u64, blocks: u64, block_stride: u64) -> Self {
        Self::new(form, Memory::Strided { base, blocks, block: block_stride, chunk: None })
    }

    /// `blocks` stacks: chunk (layer, outer) of block b lies
    /// `b * block_stride + layer * layer_stride + outer * outer_stride` bytes behind `base`.
    pub fn strided_stack(
        order: ChunkOrder,
        base: u64,
        blocks: u64,
        [block_stride, layer_stride, outer_stride]: [u64; 3],
    ) -> Self {
        let chunk = Some([layer_stride, outer_stride]);
        Self::new(BlockForm::Stack(order), Memory::Strided { base, blocks, block: block_stride, chunk })
    }

    fn new(form: BlockForm, memory: Memory) -> Self {
        Self { form, memory, heads: None, device: None }
    }

    /// The blocks of this side have more heads than the conversion's shape: it touches a slice of
    /// them.
    #[must_use]
    pub fn heads(mut self, heads: Heads) -> Self {
        self.heads = Some(heads);
        self
    }

    /// Says which device the addresses belong to, so that mixing devices is found.
    #[must_use]
    pub fn on_device(mut self, device: u32) -> Self {
        self.device = Some(device);
        self
    }

    /// The device, where it is known.
    pub fn device(&self) -> Option<u32> {
        self.device
    }
}

/// An operand that was checked against a shape; everything in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Side {
    /// Addresses to put into a table; empty if none is needed.
    pub(crate) table: Vec<u64>,
    /// Addresses of each block in the table.
    pub(crate) entries: u64,
    /// Added to every address; the first block's address where there is no table.
    pub(crate) base: u64,
    pub(crate) blocks: u64,
    // Strides.
    pub(crate) block: u64,
    pub(crate) layer: u64,
    pub(crate) outer: u64,
    pub(crate) head: u64,
    pub(crate) token: u64,
    /// Bytes of each chunk, heads that are not touched included.
    pub(crate) chunk_bytes: u64,
}

impl Side {
    /// Checks `operand`, which is the `argument` of a conversion of blocks of this shape.
    pub(crate) fn new(shape: &BlockShape, argument: Argument, operand: Operand) -> Result<Self, KernelError> {
        let heads = operand.heads.unwrap_or(Heads { first: 0, of: shape.num_heads });
        let whole = heads.whole(shape, argument)?;
        let strides = operand.form.strides(&whole);
        let row = shape.row_bytes() as u64;
        let bytes = |rows: usize| rows as u64 * row;
        let mut side = Self {
            table: Vec::new(),
            entries: 1,
            base: bytes(heads.first * strides.head),
            blocks: 0,
            block: 0,
            layer: bytes(strides.layer),
            outer: bytes(strides.outer),
            head: bytes(strides.head),
            token: bytes(strides.token),
            chunk_bytes: operand.form.chunk_bytes(&whole) as u64,
        };
        match operand.memory {
            Memory::Pointers(table) => side.take_table(shape, argument, operand.form, table)?,
            Memory::Strided { base, blocks, block, chunk } => {
                (side.blocks, side.block) = (blocks, block);
                let dense = [shape.num_outer as u64 * side.chunk_bytes, side.chunk_bytes];
                if let BlockForm::Stack(_) = operand.form {
                    [side.layer, side.outer] = chunk.unwrap_or(dense);
                }
                side.check_strides(shape, argument, &strides)?;
                side.place(shape, argument, base)?;
            }
        }
        Ok(side)
    }

    fn take_table(
        &mut self,
        shape: &BlockShape,
        argument: Argument,
        form: BlockForm,
        table: Vec<u64>,
    ) -> Result<(), KernelError> {
        let per_block = form.chunks_per_block(shape);
        if !table.len().is_multiple_of(per_block) {
            return Err(KernelError::ChunkCount { argument, form, count: table.len(), per_block });
        }
        for (index, address) in table.iter().enumerate() {
            check_address(
                shape,
                argument,
                *address,
                self.chunk_bytes,
                (index / per_block, index % per_block),
            )?;
        }
        (self.blocks, self.entries) = ((table.len() / per_block) as u64, per_block as u64);
        self.table = table;
        Ok(())
    }

    /// Strides must be whole elements, and no two chunks may overlap: ordered by size, each stride
    /// has to pass what the smaller ones span.
    fn check_strides(
        &self,
        shape: &BlockShape,
        argument: Argument,
        strides: &RowStrides,
    ) -> Result<(), KernelError> {
        let mut axes = vec![("block_stride", self.block, self.blocks)];
        let mut span = self.chunk_bytes;
        if strides.separate {
            axes.push(("layer_stride", self.layer, shape.num_layers as u64));
            axes.push(("outer_stride", self.outer, shape.num_outer as u64));
        }
        axes.retain(|(_, _, count)| *count > 1);
        axes.sort_by_key(|(_, stride, _)| *stride);
        for (stride, bytes, count) in axes {
            let fail = |rule| Err(KernelError::Stride { argument, stride, bytes, rule });
            if bytes % shape.element_bytes() as u64 != 0 {
                return fail("it must be a multiple of the element's size");
            }
            if bytes < span {
                return fail("neighbours along it would overlap");
            }
            let Some(end) = (count - 1).checked_mul(bytes).and_then(|last| last.checked_add(span)) else {
                return fail("the last chunk would lie outside the address space");
            };
            span = end;
        }
        Ok(())
    }

    fn place(&mut self, shape: &BlockShape, argument: Argument, base: u64) -> Result<(), KernelError> {
        let last = self.blocks.saturating_sub(1).saturating_mul(self.block);
        let inner = (shape.num_layers as u64 - 1).saturating_mul(self.layer);
        let inner = inner.saturating_add((shape.num_outer as u64 - 1).saturating_mul(self.outer));
        let span = last.saturating_add(inner).saturating_add(self.chunk_bytes);
        if self.blocks > 0 {
            check_address(shape, argument, base, span, (0, 0))?;
        }
        self.base = base.wrapping_add(self.base);
        Ok(())
    }

    /// Bitwise OR of all addresses and strides: its trailing zeros are the alignment of each row.
    pub(crate) fn address_bits(&self, shape: &BlockShape) -> u64 {
        let when = |more: bool, stride| if more { stride } else { 0 };
        self.table.iter().fold(self.base, |bits, address| bits | address)
            | when(self.blocks > 1, self.block)
            | when(shape.num_layers > 1, self.layer)
            | when(shape.num_outer > 1, self.outer)
            | when(shape.num_heads > 1, self.head)
            | when(shape.num_tokens > 1, self.token)
    }

    /// Address of chunk (layer, outer) of a block, `chunk` being its number.
    pub(crate) fn chunk_address(&self, block: u64, chunk: u64, layer: u64, outer: u64) -> u64 {
        let entry = block * self.entries + if self.entries > 1 { chunk } else { 0 };
        let start = self.table.get(entry as usize).copied().unwrap_or(block * self.block);
        start + self.base + layer * self.layer + outer * self.outer
    }
}

fn check_address(
    shape: &BlockShape,
    argument: Argument,
    address: u64,
    span: u64,
    (block, chunk): (usize, usize),
) -> Result<(), KernelError> {
    let fail = |rule| Err(KernelError::Address { argument, block, chunk, address, rule });
    if address == 0 {
        return fail("it must not be null");
    }
    if !address.is_multiple_of(shape.element_bytes() as u64) {
        return fail("it must be a multiple of the element's size");
    }
    if address.checked_add(span).is_none() {
        return fail("it would end outside the address space");
    }
    Ok(())
}
