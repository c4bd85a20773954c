//! Arguments that no conversion can work with.

use std::fmt;

use crate::{Backend, BlockForm};

/// Which side of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// What is read.
    Sources,
    /// What is written.
    Destinations,
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sources => "sources",
            Self::Destinations => "destinations",
        })
    }
}

/// Why a conversion was refused. Nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dimension is zero.
    #[error("{dimension} is 0; every dimension must be at least 1")]
    ZeroDimension {
        /// The name of the dimension.
        dimension: &'static str,
    },
    /// A block of these dimensions does not fit the address space.
    #[error("a block of {dimensions:?} (nl, no, nh, nt, hd, element bytes) is larger than the address space")]
    TooLarge {
        /// `[nl, no, nh, nt, hd, element bytes]`.
        dimensions: [usize; 6],
    },
    /// A layout that has no shape of rows, or no form of its own.
    #[error("layout: {field} is {value}; {rule}")]
    Layout {
        /// The field of the layout.
        field: &'static str,
        /// Its value.
        value: String,
        /// Which layouts can be converted.
        rule: &'static str,
    },
    /// The number of chunks is not a whole number of blocks.
    #[error(
        "{argument}: {count} chunks, but each block in {form} has {per_block}; pass all chunks of every block"
    )]
    ChunkCount {
        /// The side.
        argument: Argument,
        /// Its form.
        form: BlockForm,
        /// Chunks given.
        count: usize,
        /// Chunks that a block has in this form.
        per_block: usize,
    },
    /// The sides have different numbers of blocks.
    #[error("sources are {sources} blocks, destinations {destinations}; pass as many of each")]
    BlockCount {
        /// Blocks to read.
        sources: usize,
        /// Blocks to write.
        destinations: usize,
    },
    /// A chunk has the wrong length.
    #[error(
        "{argument}: chunk {chunk} of block {block} is {length} bytes long, in {form} it must be {expected}"
    )]
    ChunkLength {
        /// The side.
        argument: Argument,
        /// Its form.
        form: BlockForm,
        /// The block, from 0.
        block: usize,
        /// The chunk within the block, from 0.
        chunk: usize,
        /// Bytes given.
        length: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// An address that no kernel can use.
    #[error("{argument}: chunk {chunk} of block {block} is at address {address:#x}; {rule}")]
    Address {
        /// The side.
        argument: Argument,
        /// The block, from 0.
        block: usize,
        /// The chunk within the block, from 0.
        chunk: usize,
        /// The address given.
        address: u64,
        /// The rule it must obey.
        rule: &'static str,
    },
    /// A stride that lets parts of a side overlap, or elements lie askew.
    #[error("{argument}: {stride} is {bytes} bytes; {rule}")]
    Stride {
        /// The side.
        argument: Argument,
        /// The name of the stride.
        stride: &'static str,
        /// Its value.
        bytes: u64,
        /// The rule it must obey.
        rule: &'static str,
    },
    /// Chunks that share bytes although one of them is written.
    #[error(
        "destinations: chunk {chunk} of block {block} at {address:#x} shares bytes with another chunk of the batch; every chunk that is written needs memory of its own"
    )]
    Overlap {
        /// The block, from 0.
        block: usize,
        /// The chunk within the block, from 0.
        chunk: usize,
        /// Where it starts.
        address: u64,
    },
    /// A pair of ranges that cannot be copied.
    #[error(
        "pair {pair}: {bytes} bytes at {address:#x} ({side}) are null or end outside the address space; check the addresses"
    )]
    Pair {
        /// Which pair, from 0.
        pair: usize,
        /// The side.
        side: &'static str,
        /// Where it starts.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// A slice of heads that is not inside the block.
    #[error("{argument}: heads {first}..+{count} of a block of {of}; the slice must lie inside the block")]
    Heads {
        /// The side.
        argument: Argument,
        /// First head of the slice.
        first: usize,
        /// Heads of the slice.
        count: usize,
        /// Heads of the block.
        of: usize,
    },
    /// Memory of one device used with another.
    #[error("{argument}: device {found}, but {expected} is needed; all of a batch must lie on one device")]
    Device {
        /// What lies on the wrong device.
        argument: String,
        /// Where it lies.
        found: u32,
        /// Where it must lie.
        expected: u32,
    },
    /// A tensor that is not what the form says.
    #[error("{argument}: tensor {index}: {what} {found}, expected {expected}; {rule}")]
    Tensor {
        /// The side.
        argument: Argument,
        /// Which of its tensors, from 0.
        index: usize,
        /// What of the tensor is wrong.
        what: &'static str,
        /// What it is.
        found: String,
        /// What it must be.
        expected: String,
        /// The way out.
        rule: &'static str,
    },
    /// More than one launch can count.
    #[error("{what} is {value}, at most {limit} are possible in one launch; convert in several parts")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        value: u64,
        /// How much is possible.
        limit: u64,
    },
    /// A back end that this device does not have.
    #[error("back end {backend} is not available: {why}; use back end auto")]
    Backend {
        /// The back end that was asked for.
        backend: Backend,
        /// What is missing.
        why: &'static str,
    },
    /// The device's driver refused.
    #[error("{doing}: the driver reported: {reason}; `kvbm doctor` shows what it finds of the device")]
    Driver {
        /// What was to be done.
        doing: &'static str,
        /// What the driver said.
        reason: String,
    },
}
