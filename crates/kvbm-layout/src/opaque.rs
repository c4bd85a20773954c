//! Blocks without axes: for each tensor a place and a number of bytes.

use crate::arith;
use crate::config::{ConfigError, LayoutConfig, MAX_PLANES, OpaquePlane};
use crate::dtype::DType;
use crate::geometry::{CellStrides, Geometry, layout_of_geometry};
use crate::layout::{AxisOrder, LayoutError, LayoutType, RegionSpec};

/// Where the blocks of one tensor lie: block `n` is the `block_bytes` bytes at `offset + n *
/// block_stride` of `region`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpaqueTensor {
    /// Region that holds the tensor. Tensors that are views of one allocation share its region.
    pub region: u32,
    /// First byte of block 0 in the region.
    pub offset: u64,
    /// Bytes from one block to the next, at least `block_bytes` where there are several blocks.
    pub block_stride: u64,
    /// Bytes of one block, at least 1.
    pub block_bytes: u32,
}

/// Blocks that are bytes and nothing else: the tensors of an engine whose axes are not known, or do
/// not fit into strides.
///
/// An engine's block may be several blocks of its kernels, may hold a latent, scales or recurrent
/// state. kvbm copies the bytes of each tensor whole, in the order of the tensors. It cannot
/// permute them or divide them among another number of ranks. A copy can move some of the tensors
/// ([`LayoutConfig::select_layers`]).
///
/// ```
/// use kvbm_layout::{BlockLayout, OpaqueLayout, OpaqueTensor};
///
/// // Two tensors of 64 blocks: one allocation of keys and values, one of scales.
/// let layout = OpaqueLayout::new(64, vec![
///     OpaqueTensor { region: 0, offset: 0, block_stride: 65_536, block_bytes: 65_536 },
///     OpaqueTensor { region: 1, offset: 0, block_stride: 256, block_bytes: 192 },
/// ])?;
/// assert_eq!((layout.bytes_per_block(), layout.regions().len()), (65_536 + 192, 2));
/// # Ok::<(), kvbm_layout::LayoutError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpaqueLayout {
    geometry: Geometry,
}

impl OpaqueLayout {
    /// Most tensors of a layout.
    pub const MAX_TENSORS: usize = MAX_PLANES;

    /// `num_blocks` blocks of these tensors, which lie in regions 0, 1 and so on.
    ///
    /// # Errors
    /// No tensor or too many, a region without a tensor, a size beyond 2^63 - 1 bytes;
    /// [`LayoutError::Overlap`] names two tensors that share bytes, or that cannot be proven apart.
    /// Planes of its message are tensors.
    pub fn new(
        num_blocks: u32,
        tensors: impl IntoIterator<Item = OpaqueTensor>,
    ) -> Result<Self, LayoutError> {
        let tensors: Vec<_> = tensors.into_iter().take(Self::MAX_TENSORS + 1).collect();
        let bytes: Vec<_> = tensors.iter().map(|tensor| tensor.block_bytes).collect();
        let config = Self::config_of(num_blocks, &bytes, 1)?;
        let regions = regions(num_blocks, &tensors)?;
        let cell = |tensor: &OpaqueTensor| CellStrides {
            region: tensor.region,
            offset: tensor.offset,
            block_stride: tensor.block_stride,
            elem_stride: 1,
            ..CellStrides::default()
        };
        let cells = tensors.iter().map(cell).collect();
        let (layout_type, order) = (LayoutType::Strided, AxisOrder::Strided);
        let geometry = Geometry { config, layout_type, order, regions, cells };
        geometry.validate()?;
        Ok(Self { geometry })
    }

    /// The shape of blocks of tensors with so many bytes each, for layouts that kvbm makes itself:
    /// one layer without outer chunks, with a plane for each tensor.
    ///
    /// # Errors
    /// No tensor or too many, a tensor without bytes, no block, an alignment that is none.
    pub fn config_of(
        num_blocks: u32,
        tensor_bytes: &[u32],
        alignment: u64,
    ) -> Result<LayoutConfig, ConfigError> {
        let plane = |(at, &bytes): (usize, &u32)| OpaquePlane::new(format!("t{at}"), bytes);
        let config = LayoutConfig {
            num_blocks,
            num_layers: 1,
            outer_dim: 0,
            page_size: 1,
            inner_dim: 1,
            value_inner_dim: None,
            dtype: DType::U8,
            alignment,
            num_heads: 1,
            planes: tensor_bytes.iter().enumerate().map(plane).collect(),
        };
        config.validate()?;
        Ok(config)
    }

    /// A number that differs between lists of tensors: FNV-1a over their count and their bytes,
    /// each as 8 bytes little-endian.
    pub fn fingerprint(tensor_bytes: &[u32]) -> u64 {
        let numbers =
            std::iter::once(tensor_bytes.len() as u64).chain(tensor_bytes.iter().map(|&bytes| bytes.into()));
        let bytes = numbers.flat_map(u64::to_le_bytes);
        bytes
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

/// The regions that the tensors lie in, each as long as the last byte in it needs.
fn regions(num_blocks: u32, tensors: &[OpaqueTensor]) -> Result<Vec<RegionSpec>, LayoutError> {
    let what = "one region";
    let count = tensors.iter().map(|tensor| u64::from(tensor.region) + 1).max().unwrap_or(0);
    if count > tensors.len() as u64 {
        let rule = format!("{} tensors lie in at most as many regions, numbered from 0", tensors.len());
        return Err(LayoutError::Regions { field: "count", value: count, rule });
    }
    let mut regions = vec![RegionSpec { bytes: 0, alignment: 1 }; count as usize];
    for tensor in tensors {
        let last = arith::product(what, &[u64::from(num_blocks.saturating_sub(1)), tensor.block_stride])?;
        let end = arith::sum(what, &[tensor.offset, last, tensor.block_bytes.into()])?;
        let region = &mut regions[tensor.region as usize];
        region.bytes = region.bytes.max(end);
    }
    match (0_u64..).zip(&regions).find(|(_, region)| region.bytes == 0) {
        None => Ok(regions),
        Some((region, _)) => {
            let rule = "no tensor lies there; number regions without gaps".to_owned();
            Err(LayoutError::Regions { field: "region", value: region, rule })
        }
    }
}

layout_of_geometry!(OpaqueLayout);
