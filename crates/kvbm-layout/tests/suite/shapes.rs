//! Shapes and layouts to test with.

use kvbm_layout::{
    AxisOrder, BlockLayout, CellStrides, DType, EngineOrder, EngineRegions, FullyContiguous, InnerOrder,
    LayerSeparate, LayoutConfig, OpaquePlane, OuterPlacement, RegionSpec, StridedLayout,
};
use proptest::prelude::*;

/// Every way of laying out a shape whose inner order is known.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Contiguous(AxisOrder),
    Layers(AxisOrder, OuterPlacement),
    Engine(&'static str, EngineRegions),
    /// Explicit strides with holes, layers in reverse order of allocation.
    Holes,
}

pub(crate) const CONTIGUOUS: [Kind; 5] = [
    Kind::Contiguous(AxisOrder::Nhd),
    Kind::Contiguous(AxisOrder::Hnd),
    Kind::Contiguous(AxisOrder::Operational(InnerOrder::Nhd)),
    Kind::Contiguous(AxisOrder::Operational(InnerOrder::Hnd)),
    Kind::Contiguous(AxisOrder::Universal),
];

pub(crate) fn kinds() -> Vec<Kind> {
    let mut kinds = CONTIGUOUS.to_vec();
    for order in [AxisOrder::Nhd, AxisOrder::Hnd] {
        for placement in [OuterPlacement::KvOuter, OuterPlacement::BlockOuter, OuterPlacement::PackedInHead] {
            kinds.push(Kind::Layers(order, placement));
        }
    }
    for name in EngineOrder::VLLM.into_iter().chain(["BLHCN"]) {
        kinds.push(Kind::Engine(name, EngineRegions::One));
        if name.starts_with('L') {
            kinds.push(Kind::Engine(name, EngineRegions::PerLayer));
        }
    }
    kinds.push(Kind::Holes);
    kinds
}

/// `config` laid out as `kind`. Engines' tensors are dense, so they ignore the config's alignment.
pub(crate) fn lay_out(kind: Kind, config: &LayoutConfig) -> Box<dyn BlockLayout> {
    let dense = LayoutConfig { alignment: 1, ..config.clone() };
    match kind {
        Kind::Contiguous(order) => Box::new(FullyContiguous::new(config.clone(), order).unwrap()),
        Kind::Layers(order, placement) => {
            Box::new(LayerSeparate::new(config.clone(), order, placement).unwrap())
        }
        Kind::Engine(name, spread) => {
            Box::new(StridedLayout::from_engine_order(dense, name.parse().unwrap(), spread).unwrap())
        }
        Kind::Holes => Box::new(holes(dense)),
    }
}

/// Heads at a distance of two heads, tokens and blocks with holes too, each cell in its own region.
fn holes(config: LayoutConfig) -> StridedLayout {
    let width = u64::from(config.dtype.width());
    let layers = u64::from(config.num_layers);
    let mut cells = Vec::new();
    let mut regions = Vec::new();
    for cell in config.cells() {
        let mut at = CellStrides {
            region: regions.len() as u32,
            offset: 8,
            elem_stride: width,
            ..CellStrides::default()
        };
        let bytes = if let kvbm_layout::Cell::Kv(outer) = cell {
            at.head_stride = u64::from(config.head_dim_of(outer)) * width * 2;
            at.token_stride = at.head_stride * u64::from(config.num_heads) + width;
            at.token_stride * u64::from(config.page_size)
        } else {
            config.cell_bytes(cell)
        };
        at.layer_stride = bytes.next_multiple_of(8) + 8;
        at.block_stride = at.layer_stride * layers;
        let bytes = at.offset + at.block_stride * u64::from(config.num_blocks);
        regions.push(RegionSpec { bytes, alignment: 8 });
        cells.push(at);
    }
    StridedLayout::new(config, regions, cells).unwrap()
}

pub(crate) fn config(
    blocks: u32,
    layers: u32,
    tokens: u32,
    heads: u32,
    head_dim: u32,
    dtype: DType,
) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .page_size(tokens)
        .num_heads(heads)
        .inner_dim(heads * head_dim)
        .dtype(dtype)
        .build()
        .unwrap()
}

pub(crate) fn any_kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(kinds())
}

pub(crate) fn any_config() -> impl Strategy<Value = LayoutConfig> {
    let dtype = prop::sample::select(vec![DType::U8, DType::F8E4M3, DType::BF16, DType::F32, DType::F64]);
    let planes = prop::collection::vec(1_u32..20, 0..3);
    let shape = (1_u32..4, 1_u32..5, 0_u32..4, 1_u32..6, 1_u32..5, 1_u32..6);
    (shape, dtype, planes, prop::option::of(1_u32..5), 0_u32..7).prop_map(
        |(shape, dtype, planes, value, alignment)| {
            let (num_blocks, num_layers, outer_dim, page_size, num_heads, head_dim) = shape;
            let planes: Vec<_> = planes
                .iter()
                .enumerate()
                .map(|(i, &bytes)| OpaquePlane::new(format!("plane{i}"), bytes))
                .collect();
            let outer_dim = if planes.is_empty() { outer_dim.max(1) } else { outer_dim };
            LayoutConfig {
                num_blocks,
                num_layers,
                outer_dim,
                page_size,
                inner_dim: num_heads * head_dim,
                value_inner_dim: value.filter(|_| outer_dim == 2).map(|dim| dim * num_heads),
                dtype,
                alignment: 1 << alignment,
                num_heads,
                planes,
            }
        },
    )
}
