//! Arguments that no conversion can work with.

use std::fmt;

use crate::BlockForm;

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
}
