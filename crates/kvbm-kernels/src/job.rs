//! Which kernel carries out a conversion, with which arguments and how many threads.

use crate::operand::Side;
use crate::params::Params;
use crate::{BlockShape, KernelError};

/// Threads of every block of threads, as in `cuda/jobs.h`.
pub const THREADS: u32 = 256;

/// Words that a thread of `kvbm_rows_16` has in flight: a tile of the kernel is a multiple of as
/// many for every thread.
const IN_FLIGHT: u64 = 8;

/// Bytes of rows that a tile in shared memory holds: several blocks of threads fit a
/// multiprocessor.
const TILE_BYTES: u64 = 16 << 10;

/// Most shared memory of a launch: every device has as much without asking for it. A tile of
/// [`TILE_BYTES`] needs more than its rows where its stretches are short.
const SHARED_BYTES: u64 = 32 << 10;

/// Rows from this length on are copied by a warp each rather than through shared memory.
const LONG_ROW: u64 = 1 << 10;

/// Rows from this length on keep a warp busy.
const WARP_ROW: u64 = 256;

/// Bytes of a row that a warp copies at a time.
const SPAN_BYTES: u64 = 4 << 10;

/// Blocks of threads that a multiprocessor should get before tiles are made larger.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 8;

/// Words or rows that the kernels count within a chunk.
const MAX_COUNT: u64 = 1 << 30;

/// What a launch has to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Number of multiprocessors; the work is divided finely enough to keep them busy.
    pub multiprocessors: u32,
    /// Most blocks of threads of a launch.
    pub max_grid: u32,
}

impl Default for DeviceLimits {
    fn default() -> Self {
        Self { multiprocessors: 108, max_grid: i32::MAX.unsigned_abs() }
    }
}

/// A kernel of `cuda/kvbm_kernels.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// Rows of whole words of so many bytes (1, 2, 4, 8, 16).
    Rows(u32),
    /// Short rows through shared memory, in words of so many bytes (1, 2, 4, 8).
    Tiles(u32),
    /// Long rows of any alignment.
    Spans,
    /// Pairs of ranges.
    Pairs,
}

impl Kernel {
    /// Every kernel that there is.
    pub const ALL: [Self; 11] = [
        Self::Rows(16),
        Self::Rows(8),
        Self::Rows(4),
        Self::Rows(2),
        Self::Rows(1),
        Self::Tiles(8),
        Self::Tiles(4),
        Self::Tiles(2),
        Self::Tiles(1),
        Self::Spans,
        Self::Pairs,
    ];

    /// Its name in the image.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows(16) => "kvbm_rows_16",
            Self::Rows(8) => "kvbm_rows_8",
            Self::Rows(4) => "kvbm_rows_4",
            Self::Rows(2) => "kvbm_rows_2",
            Self::Rows(_) => "kvbm_rows_1",
            Self::Tiles(8) => "kvbm_tiles_8",
            Self::Tiles(4) => "kvbm_tiles_4",
            Self::Tiles(2) => "kvbm_tiles_2",
            Self::Tiles(_) => "kvbm_tiles_1",
            Self::Spans => "kvbm_spans",
            Self::Pairs => "kvbm_pairs",
        }
    }
}

/// One launch: a kernel, its geometry and its argument. Blocks of threads are one-dimensional,
/// [`THREADS`] wide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Blocks of threads, in one dimension.
    pub grid: u32,
    /// Bytes of dynamic shared memory; never more than 32 KiB.
    pub shared_bytes: u32,
    /// The kernel's only argument, by value.
    pub params: Vec<u8>,
}

/// Rows that lie at regular distances on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) count: u64,
    /// Bytes between neighbours in the source.
    pub(crate) from: u64,
    /// Bytes between neighbours in the destination.
    pub(crate) to: u64,
}

const NO_AXIS: Axis = Axis { count: 1, from: 0, to: 0 };

/// The rows of a chunk: what is contiguous on both sides, and at most two axes of such runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Bytes of a run.
    pub(crate) run: u64,
    /// The first one is the closer one in the destination.
    pub(crate) axes: [Axis; 2],
}

impl Rows {
    /// Heads and tokens, merged into longer runs where neighbours lie side by side on both sides.
    pub(crate) fn new(shape: &BlockShape, from: &Side, to: &Side) -> Self {
        let axis = |count: usize, from, to| Axis { count: count as u64, from, to };
        let mut axes =
            vec![axis(shape.num_tokens, from.token, to.token), axis(shape.num_heads, from.head, to.head)];
        let mut run = shape.row_bytes() as u64;
        axes.retain(|axis| axis.count > 1);
        while let Some(at) = axes.iter().position(|axis| axis.from == run && axis.to == run) {
            run *= axes.remove(at).count;
        }
        axes.sort_by_key(|axis| axis.to);
        axes.resize(2, NO_AXIS);
        Self { run, axes: [axes[0], axes[1]] }
    }

    fn count(&self) -> u64 {
        self.axes[0].count.saturating_mul(self.axes[1].count)
    }

    /// The axes as the tiles want them: first the one that is contiguous in the source, then that
    /// of the destination.
    fn transposed(&self) -> Option<[Axis; 2]> {
        let [to_first, to_second] = self.axes;
        let transposed = to_first.to == self.run && to_second.from == self.run;
        (transposed && to_first.count > 1 && to_second.count > 1).then_some([to_second, to_first])
    }
}

/// What differs between the kernels that copy rows.
struct Division {
    kernel: Kernel,
    axes: [Axis; 2],
    tiles: u64,
    tile: u64,
    tile1: u64,
    tiles0: u64,
    pitch: u64,
    shared: u64,
}

/// The launch that carries out a conversion of at least one block.
pub(crate) fn launch(
    shape: &BlockShape,
    rows: &Rows,
    (from, from_table): (&Side, u64),
    (to, to_table): (&Side, u64),
    limits: DeviceLimits,
) -> Result<Launch, KernelError> {
    let chunks = (shape.num_layers * shape.num_outer) as u64;
    let bits = rows.run | from.address_bits(shape) | to.address_bits(shape);
    let word = 1 << bits.trailing_zeros().min(4);
    let all_chunks = from.blocks.saturating_mul(chunks);
    let division = match rows.transposed() {
        _ if word == 16 => by_words(rows, word, all_chunks, limits)?,
        Some(axes) if rows.run < LONG_ROW => by_tiles(rows, axes, word),
        _ if rows.run >= WARP_ROW => by_spans(rows)?,
        _ => by_words(rows, word, all_chunks, limits)?,
    };
    let work = count("pieces of work", all_chunks.saturating_mul(division.tiles), u64::MAX - 1)?;

    let mut params = Params::default();
    for (side, table, strides) in [
        (from, from_table, division.axes.map(|axis| axis.from)),
        (to, to_table, division.axes.map(|axis| axis.to)),
    ] {
        let table = if side.table.is_empty() { 0 } else { table };
        params.wide([
            table,
            side.base,
            side.block,
            side.layer,
            side.outer,
            strides[0],
            strides[1],
            side.entries,
        ]);
    }
    params.wide([work]);
    for (what, value) in [
        ("chunks", chunks),
        ("outers", shape.num_outer as u64),
        ("rows along an axis", division.axes[0].count),
        ("rows along an axis", division.axes[1].count),
        ("bytes of a row", rows.run),
        ("tiles of a chunk", division.tiles),
        ("a tile", division.tile),
        ("a tile", division.tile1),
        ("tiles", division.tiles0),
        ("pitch", division.pitch),
    ] {
        params.narrow(count(what, value, MAX_COUNT)? as u32);
    }
    Ok(Launch {
        kernel: division.kernel,
        grid: work.min(u64::from(limits.max_grid)) as u32,
        shared_bytes: division.shared as u32,
        params: params.into_bytes(),
    })
}

fn count(what: &'static str, value: u64, limit: u64) -> Result<u64, KernelError> {
    if value > limit { Err(KernelError::TooMuch { what, value, limit }) } else { Ok(value) }
}

/// Every thread copies words. Tiles are as large as keeps all multiprocessors busy.
fn by_words(rows: &Rows, word: u32, chunks: u64, limits: DeviceLimits) -> Result<Division, KernelError> {
    let words = rows.count().saturating_mul(rows.run / u64::from(word));
    let words = count("words of a chunk", words, MAX_COUNT)?;
    let enough = u64::from(limits.multiprocessors.max(1)) * BLOCKS_PER_MULTIPROCESSOR;
    let threads = u64::from(THREADS);
    let fair = words.saturating_mul(chunks).div_ceil(enough).next_multiple_of(threads);
    let tile = fair.clamp(threads, threads * IN_FLIGHT);
    Ok(Division {
        kernel: Kernel::Rows(word),
        axes: rows.axes,
        tiles: words.div_ceil(tile),
        tile,
        tile1: 1,
        tiles0: 1,
        pitch: 0,
        shared: 0,
    })
}

/// Every block of threads turns one tile, about square, in shared memory.
fn by_tiles(rows: &Rows, axes: [Axis; 2], word: u32) -> Division {
    let in_tile = (TILE_BYTES / rows.run).max(1);
    let square = in_tile.isqrt().max(1);
    let tile1 = axes[1].count.min(square);
    let tile = axes[0].count.min((in_tile / tile1).max(1));
    let tile1 = axes[1].count.min((in_tile / tile).max(1));
    let stretch = (tile * rows.run + 15).next_multiple_of(16);
    // Rows below each other must not fall on the same banks.
    let pitch = if stretch.is_multiple_of(128) { stretch + 16 } else { stretch };
    let tile1 = tile1.min(SHARED_BYTES / pitch);
    let tiles0 = axes[0].count.div_ceil(tile);
    Division {
        kernel: Kernel::Tiles(word),
        axes,
        tiles: tiles0 * axes[1].count.div_ceil(tile1),
        tile,
        tile1,
        tiles0,
        pitch,
        shared: tile1 * pitch,
    }
}

/// Every warp copies one piece of a row.
fn by_spans(rows: &Rows) -> Result<Division, KernelError> {
    let pieces = rows.run.div_ceil(SPAN_BYTES);
    let all = count("pieces of rows", rows.count().saturating_mul(pieces), MAX_COUNT)?;
    Ok(Division {
        kernel: Kernel::Spans,
        axes: rows.axes,
        tiles: all.div_ceil(u64::from(THREADS) / 32),
        tile: SPAN_BYTES,
        tile1: pieces,
        tiles0: 1,
        pitch: 0,
        shared: 0,
    })
}
