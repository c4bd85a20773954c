//! How the copies of a batch get to the driver.

use std::ffi::c_void;
use std::ops::Bound;

use super::CudaContext;
use super::functions::{Address, StreamHandle, call, sys};
use crate::{CopyBatch, CopyPiece, DeviceError, Direction};

/// Copies of one call: with some ten thousand the driver has been seen to hang.
const MOST_AT_ONCE: usize = 4096;

/// No place: a hint for managed memory, of which there is none here.
const NO_HINT: sys::CUmemLocation =
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };

/// Sources are read in the order of the stream.
const ATTRIBUTES: sys::CUmemcpyAttributes = sys::CUmemcpyAttributes {
    srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
    srcLocHint: NO_HINT,
    dstLocHint: NO_HINT,
    flags: 0,
};

/// Which calls of the driver a batch of copies becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum CopyEngine {
    /// Many at a time where the driver takes that and there are several, else one by one.
    #[default]
    Auto,
    /// Many at a time (`cuMemcpyBatchAsync`); an error where the driver is older than CUDA 12.8.
    Batch,
    /// One by one (`cuMemcpyHtoDAsync` and its like).
    Single,
}

impl CudaContext {
    /// Whether the driver has what is asked for.
    pub(super) fn check_engine(&self, engine: CopyEngine) -> Result<(), DeviceError> {
        if engine == CopyEngine::Batch && self.driver.copy_batch().is_none() {
            let operation = "batches of copies (cuMemcpyBatchAsync came with the driver of CUDA 12.8)";
            return Err(DeviceError::Unsupported { device: self.name.clone(), operation });
        }
        Ok(())
    }

    /// Issues the copies; the context is entered, the engine was checked.
    pub(super) fn issue_copies(
        &self,
        batch: &CopyBatch,
        engine: CopyEngine,
        stream: StreamHandle,
    ) -> Result<(), DeviceError> {
        let direction = batch.direction();
        let pieces = self.split_at_boundaries(batch).unwrap_or_else(|| batch.pieces().collect());
        match (engine, self.driver.copy_batch()) {
            (CopyEngine::Batch, Some(address)) => self.many(address, &pieces, stream),
            (CopyEngine::Auto, Some(address)) if pieces.len() > 1 => self.many(address, &pieces, stream),
            _ => pieces.iter().try_for_each(|piece| self.one(direction, piece, stream)),
        }
    }

    /// The pieces, divided where two registrations of host memory meet: the driver takes no copy
    /// across. `None` if none has to be.
    fn split_at_boundaries(&self, batch: &CopyBatch) -> Option<Vec<CopyPiece>> {
        let on_host = |piece: &CopyPiece| match batch.direction() {
            Direction::HostToDevice => Some(piece.src),
            Direction::DeviceToHost => Some(piece.dst),
            Direction::DeviceToDevice => None,
        };
        let boundaries = self.boundaries.read();
        if boundaries.is_empty() || batch.direction() == Direction::DeviceToDevice {
            return None;
        }
        let mut pieces = Vec::with_capacity(batch.len());
        for piece in batch.pieces() {
            let (host, mut begin) = (on_host(&piece)?, 0);
            let inside = (Bound::Excluded(host), Bound::Excluded(host.saturating_add(piece.len)));
            for end in boundaries.range(inside).map(|boundary| boundary - host).chain([piece.len]) {
                pieces.push(CopyPiece { src: piece.src + begin, dst: piece.dst + begin, len: end - begin });
                begin = end;
            }
        }
        Some(pieces)
    }

    fn many(&self, address: Address, pieces: &[CopyPiece], stream: StreamHandle) -> Result<(), DeviceError> {
        for some in pieces.chunks(MOST_AT_ONCE) {
            let mut to: Vec<u64> = some.iter().map(|piece| piece.dst).collect();
            let mut from: Vec<u64> = some.iter().map(|piece| piece.src).collect();
            let mut bytes: Vec<usize> = some.iter().map(|piece| piece.len as usize).collect();
            let mut attributes = ATTRIBUTES;
            let (mut begin, mut failed) = (0, usize::MAX);
            let (to, from, bytes) = (to.as_mut_ptr(), from.as_mut_ptr(), bytes.as_mut_ptr());
            let (attributes, begin, failed) = (&raw mut attributes, &raw mut begin, &raw mut failed);
            let (count, stream) = (some.len(), stream.0);
            // SAFETY: the address is that of this function. The three lists have `count` entries,
            // the one attribute begins at entry 0, and the stream is not the default one. The
            // ranges were checked when the pieces were pushed, and the batch holds their memory.
            self.check(unsafe {
                call!(at address, cuMemcpyBatchAsync(to, from, bytes, count, attributes, begin, 1, failed, stream))
            })?;
        }
        Ok(())
    }

    fn one(&self, direction: Direction, piece: &CopyPiece, stream: StreamHandle) -> Result<(), DeviceError> {
        let CopyPiece { src, dst, len } = *piece;
        let (functions, len) = (self.functions(), len as usize);
        let from_host = || std::ptr::with_exposed_provenance::<c_void>(src as usize);
        let to_host = || std::ptr::with_exposed_provenance_mut::<c_void>(dst as usize);
        let stream = stream.0;
        let result = match direction {
            Direction::HostToDevice => {
                // SAFETY: both ranges were checked when the piece was pushed; the batch holds them.
                unsafe { call!(functions, cuMemcpyHtoDAsync_v2(dst, from_host(), len, stream)) }
            }
            Direction::DeviceToHost => {
                // SAFETY: as above.
                unsafe { call!(functions, cuMemcpyDtoHAsync_v2(to_host(), src, len, stream)) }
            }
            Direction::DeviceToDevice => {
                // SAFETY: as above.
                unsafe { call!(functions, cuMemcpyDtoDAsync_v2(dst, src, len, stream)) }
            }
        };
        self.check(result)
    }
}
