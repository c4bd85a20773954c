//! A conversion on a device, checked: what to launch for it, or what to copy.

use crate::job::{self, DeviceLimits, Launch, Rows};
use crate::operand::{Operand, Side};
use crate::{Argument, BlockShape, KernelError};

/// A conversion of blocks on a device. All its arguments were checked.
#[derive(Debug, Clone)]
pub struct Conversion {
    shape: BlockShape,
    from: Side,
    to: Side,
    rows: Rows,
    device: Option<u32>,
}

/// One contiguous copy of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address of its first source byte.
    pub from: u64,
    /// Address of its first destination byte.
    pub to: u64,
    /// Its length; never zero.
    pub bytes: u64,
}

impl Conversion {
    /// Checks a conversion of blocks of `shape`, which on each side may be a slice of the heads of
    /// larger blocks.
    ///
    /// # Errors
    /// One that names the argument: [`KernelError::ChunkCount`], [`KernelError::BlockCount`],
    /// [`KernelError::Heads`], [`KernelError::Address`], [`KernelError::Stride`],
    /// [`KernelError::Overlap`], [`KernelError::Device`].
    pub fn new(shape: BlockShape, from: Operand, to: Operand) -> Result<Self, KernelError> {
        if let (Some(expected), Some(found)) = (from.device(), to.device())
            && expected != found
        {
            let argument = Argument::Destinations.to_string();
            return Err(KernelError::Device { argument, found, expected });
        }
        let device = from.device().or(to.device());
        let from = Side::new(&shape, Argument::Sources, from)?;
        let to = Side::new(&shape, Argument::Destinations, to)?;
        if from.blocks != to.blocks {
            let count = |side: &Side| usize::try_from(side.blocks).unwrap_or(usize::MAX);
            return Err(KernelError::BlockCount { sources: count(&from), destinations: count(&to) });
        }
        check_overlap(&from, &to)?;
        let rows = Rows::new(&shape, &from, &to);
        Ok(Self { shape, from, to, rows, device })
    }

    /// Blocks to convert.
    pub fn blocks(&self) -> u64 {
        self.from.blocks
    }

    /// Bytes that are read, and as many written.
    pub fn bytes(&self) -> u64 {
        self.blocks() * self.shape.block_bytes() as u64
    }

    /// The device of the operands, where it is known.
    pub fn device(&self) -> Option<u32> {
        self.device
    }

    /// The addresses that the launch needs in device memory, 8 bytes each in the machine's order;
    /// empty if the side is strided.
    pub fn table(&self, argument: Argument) -> &[u64] {
        match argument {
            Argument::Sources => &self.from.table,
            Argument::Destinations => &self.to.table,
        }
    }

    /// What to launch, the tables lying at these device addresses (any, for a side without a
    /// table). `None` if there are no blocks.
    ///
    /// # Errors
    /// [`KernelError::TooMuch`].
    pub fn launch(
        &self,
        limits: DeviceLimits,
        from_table: u64,
        to_table: u64,
    ) -> Result<Option<Launch>, KernelError> {
        if self.blocks() == 0 {
            return Ok(None);
        }
        job::launch(&self.shape, &self.rows, (&self.from, from_table), (&self.to, to_table), limits).map(Some)
    }

    /// Bytes of each contiguous copy.
    pub fn piece_bytes(&self) -> u64 {
        self.rows.run
    }

    /// The contiguous copies, for copy engines. All have the same length.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let (layers, outers) = (self.shape.num_layers as u64, self.shape.num_outer as u64);
        let [first, second] = self.rows.axes;
        let bytes = self.rows.run;
        (0..self.blocks()).flat_map(move |block| {
            (0..layers * outers).flat_map(move |chunk| {
                let (layer, outer) = (chunk / outers, chunk % outers);
                let from = self.from.chunk_address(block, chunk, layer, outer);
                let to = self.to.chunk_address(block, chunk, layer, outer);
                (0..second.count).flat_map(move |i1| {
                    (0..first.count).map(move |i0| Piece {
                        from: from + i0 * first.from + i1 * second.from,
                        to: to + i0 * first.to + i1 * second.to,
                        bytes,
                    })
                })
            })
        })
    }
}

/// Chunks that are written may share bytes with no other; only chunks given by address can be
/// compared.
fn check_overlap(from: &Side, to: &Side) -> Result<(), KernelError> {
    let read = from.table.iter().map(|address| (*address, from.chunk_bytes, None));
    let written = to.table.iter().enumerate().map(|(at, address)| (*address, to.chunk_bytes, Some(at)));
    let mut ranges: Vec<_> = read.chain(written).collect();
    ranges.sort_unstable_by_key(|(address, ..)| *address);
    let (mut read_end, mut written_end) = (0, 0);
    let mut last_written = None;
    for (address, bytes, index) in ranges {
        let clash =
            if index.is_some() { address < read_end || address < written_end } else { address < written_end };
        if let (true, Some(at)) = (clash, index.or(last_written)) {
            let (block, chunk) = (at / to.entries as usize, at % to.entries as usize);
            return Err(KernelError::Overlap { block, chunk, address: to.table[at] });
        }
        let end = if index.is_some() { &mut written_end } else { &mut read_end };
        *end = (address + bytes).max(*end);
        last_written = index.or(last_written);
    }
    Ok(())
}
