//! Moving rows from one form to another.

use crate::form::RowStrides;
use crate::{Argument, BlockForm, BlockShape, ChunkOrder, Heads, KernelError};

/// Converts blocks from one form to another.
///
/// `sources` and `destinations` are the chunks of all blocks, block by block, each block's chunks
/// in the order of its form (see [`BlockForm`]). Both sides name the same number of blocks; no
/// blocks at all is fine. Arguments are checked before anything is written.
pub fn convert(
    shape: &BlockShape,
    from: BlockForm,
    sources: &[&[u8]],
    to: BlockForm,
    destinations: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    let all = Heads { first: 0, of: shape.num_heads };
    convert_heads(shape, (from, all), sources, (to, all), destinations)
}

/// Converts a slice of the heads of blocks that have more of them, on either side. One rank of a
/// tensor-parallel group takes it from, or adds it to, blocks of a group of another size. `shape`
/// is the slice's. Other heads are not touched.
pub fn convert_heads(
    shape: &BlockShape,
    (from, from_heads): (BlockForm, Heads),
    sources: &[&[u8]],
    (to, to_heads): (BlockForm, Heads),
    destinations: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    let read = from_heads.whole(shape, Argument::Sources)?;
    let written = to_heads.whole(shape, Argument::Destinations)?;
    let blocks = check_chunks(&read, Argument::Sources, from, sources.iter().map(|chunk| chunk.len()))?;
    let lengths = destinations.iter().map(|chunk| chunk.len());
    let into = check_chunks(&written, Argument::Destinations, to, lengths)?;
    if blocks != into {
        return Err(KernelError::BlockCount { sources: blocks, destinations: into });
    }
    let sources = sources.chunks_exact(from.chunks_per_block(shape));
    let destinations = destinations.chunks_exact_mut(to.chunks_per_block(shape));
    let (from, to) = (from.strides(&read), to.strides(&written));
    let first = (from_heads.first * from.head, to_heads.first * to.head);
    for (source, destination) in sources.zip(destinations) {
        convert_block(shape, from, source, to, destination, first);
    }
    Ok(())
}

/// Stacked chunks to the universal form.
pub fn block_to_universal(
    shape: &BlockShape,
    order: ChunkOrder,
    chunks: &[&[u8]],
    universals: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    convert(shape, BlockForm::Stack(order), chunks, BlockForm::Universal, universals)
}

/// The universal form to stacked chunks.
pub fn universal_to_block(
    shape: &BlockShape,
    universals: &[&[u8]],
    order: ChunkOrder,
    chunks: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    convert(shape, BlockForm::Universal, universals, BlockForm::Stack(order), chunks)
}

/// Stacked chunks to the operational form. Chunks are copied as they are, in whatever order their
/// tokens and heads lie.
pub fn block_to_operational(
    shape: &BlockShape,
    chunks: &[&[u8]],
    operationals: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    let order = ChunkOrder::Nhd;
    convert(shape, BlockForm::Stack(order), chunks, BlockForm::Operational(order), operationals)
}

/// The operational form to stacked chunks. Chunks are copied as they are.
pub fn operational_to_block(
    shape: &BlockShape,
    operationals: &[&[u8]],
    chunks: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    let order = ChunkOrder::Nhd;
    convert(shape, BlockForm::Operational(order), operationals, BlockForm::Stack(order), chunks)
}

/// The universal form to the operational form with chunks of the given order.
pub fn universal_to_operational(
    shape: &BlockShape,
    universals: &[&[u8]],
    order: ChunkOrder,
    operationals: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    convert(shape, BlockForm::Universal, universals, BlockForm::Operational(order), operationals)
}

/// The operational form with chunks of the given order to the universal form.
pub fn operational_to_universal(
    shape: &BlockShape,
    order: ChunkOrder,
    operationals: &[&[u8]],
    universals: &mut [&mut [u8]],
) -> Result<(), KernelError> {
    convert(shape, BlockForm::Operational(order), operationals, BlockForm::Universal, universals)
}

/// The number of blocks, if the chunks are whole blocks of the right sizes.
fn check_chunks(
    shape: &BlockShape,
    argument: Argument,
    form: BlockForm,
    lengths: impl ExactSizeIterator<Item = usize>,
) -> Result<usize, KernelError> {
    let per_block = form.chunks_per_block(shape);
    let expected = form.chunk_bytes(shape);
    let count = lengths.len();
    if !count.is_multiple_of(per_block) {
        return Err(KernelError::ChunkCount { argument, form, count, per_block });
    }
    for (index, length) in lengths.enumerate() {
        if length != expected {
            let (block, chunk) = (index / per_block, index % per_block);
            return Err(KernelError::ChunkLength { argument, form, block, chunk, length, expected });
        }
    }
    Ok(count / per_block)
}

fn convert_block(
    shape: &BlockShape,
    from: RowStrides,
    sources: &[&[u8]],
    to: RowStrides,
    destinations: &mut [&mut [u8]],
    (first_read, first_written): (usize, usize),
) {
    let inner = InnerCopy::new(shape, from, to);
    for layer in 0..shape.num_layers {
        for outer in 0..shape.num_outer {
            let place = |strides: RowStrides| {
                let chunk = if strides.separate { layer * shape.num_outer + outer } else { 0 };
                (chunk, layer * strides.layer + outer * strides.outer)
            };
            let (source, read) = place(from);
            let (destination, write) = place(to);
            let (read, write) = (read + first_read, write + first_written);
            inner.copy(sources[source], read, destinations[destination], write);
        }
    }
}

/// The rows of one (layer, outer): how to move them, with runs of rows that are neighbours on both
/// sides moved together.
struct InnerCopy {
    from: RowStrides,
    to: RowStrides,
    heads: usize,
    tokens: usize,
    run_bytes: usize,
    row_bytes: usize,
}

impl InnerCopy {
    fn new(shape: &BlockShape, from: RowStrides, to: RowStrides) -> Self {
        let BlockShape { num_heads, num_tokens, .. } = *shape;
        let rows = num_heads * num_tokens;
        let dense = |strides: RowStrides| {
            (strides.head, strides.token) == (1, num_heads)
                || (strides.head, strides.token) == (num_tokens, 1)
        };
        let same = (from.head, from.token) == (to.head, to.token);
        let (heads, tokens, run) = if same && dense(from) {
            (1, 1, rows)
        } else if from.token == 1 && to.token == 1 {
            (num_heads, 1, num_tokens)
        } else {
            (num_heads, num_tokens, 1)
        };
        let row_bytes = shape.row_bytes();
        Self { from, to, heads, tokens, run_bytes: run * row_bytes, row_bytes }
    }

    fn copy(&self, source: &[u8], source_row: usize, destination: &mut [u8], destination_row: usize) {
        for head in 0..self.heads {
            for token in 0..self.tokens {
                let at = |first: usize, strides: RowStrides| {
                    (first + head * strides.head + token * strides.token) * self.row_bytes
                };
                let read = at(source_row, self.from);
                let write = at(destination_row, self.to);
                destination[write..write + self.run_bytes]
                    .copy_from_slice(&source[read..read + self.run_bytes]);
            }
        }
    }
}
