//! Explicit strides are believed only when they are proven to be a layout.

use kvbm_layout::{
    Cell, CellStrides, DType, EngineRegions, LayoutConfig, LayoutError, OpaquePlane, RegionSpec,
    StridedLayout, conformance,
};
use proptest::prelude::*;

use crate::shapes::config;

fn shape() -> LayoutConfig {
    config(3, 2, 4, 2, 8, DType::F16)
}

/// Block-major NHD with keys and values apart, in one region.
fn cells() -> Vec<CellStrides> {
    let keys = CellStrides {
        layer_stride: 256,
        block_stride: 512,
        token_stride: 32,
        head_stride: 16,
        elem_stride: 2,
        ..CellStrides::default()
    };
    vec![keys, CellStrides { offset: 128, ..keys }]
}

fn region(bytes: u64) -> Vec<RegionSpec> {
    vec![RegionSpec { bytes, alignment: 64 }]
}

type Break = fn(&mut Vec<CellStrides>, &mut Vec<RegionSpec>, &mut LayoutConfig);

#[test]
fn strides_are_checked() {
    assert!(StridedLayout::new(shape(), region(1536), cells()).is_ok());
    let cases: [(&str, Break); 12] = [
        ("end of the last block = 1536", |_, regions, _| regions[0].bytes = 1535),
        ("outer 1: offset = 129", |cells, _, _| cells[1].offset = 129),
        ("outer 0: token_stride = 33", |cells, _, _| cells[0].token_stride = 33),
        ("outer 0 and outer 0: elements overlap", |cells, _, _| cells[0].head_stride = 14),
        ("outer 0 and outer 0: elements overlap", |cells, _, _| cells[0].token_stride = 0),
        ("outer 0 and outer 1: elements overlap", |cells, _, _| cells[1].offset = 126),
        ("region of the last layer = 1", |cells, _, _| cells[0].region = 1),
        ("region of the last layer = 4294967295", |cells, _, _| cells[0].region_per_layer = u32::MAX),
        ("cells = 1", |cells, _, _| cells.truncate(1)),
        ("count = 0", |_, regions, _| regions.clear()),
        ("alignment = 1", |_, regions, _| regions[0].alignment = 1),
        ("block_stride = 512: must be a multiple of the config's alignment (1024)", |_, regions, config| {
            regions[0].alignment = 1024;
            config.alignment = 1024;
        }),
    ];
    for (message, break_it) in cases {
        let (mut strides, mut regions, mut config) = (cells(), region(1536), shape());
        break_it(&mut strides, &mut regions, &mut config);
        let error = StridedLayout::new(config, regions, strides).unwrap_err().to_string();
        assert!(error.contains(message), "expected `{message}`, found `{error}`");
    }
    for value in [u64::MAX, u64::MAX / 2, 1 << 62] {
        let mut strides = cells();
        strides[1].block_stride = value & !1;
        let error = StridedLayout::new(shape(), region(1536), strides).unwrap_err();
        assert!(matches!(error, LayoutError::TooLarge { .. } | LayoutError::Strides { .. }), "{error}");
    }
}

#[test]
fn engine_order_per_layer_needs_the_layer_outermost() {
    let engine =
        |name: &str, spread| StridedLayout::from_engine_order(shape(), name.parse().unwrap(), spread);
    let error = engine("BLHNC", EngineRegions::PerLayer).unwrap_err();
    assert!(error.to_string().contains("BLHNC is not outermost"), "{error}");
    let per_layer = engine("LBHNC", EngineRegions::PerLayer).unwrap();
    let view = kvbm_layout::BlockLayout::block_view(&per_layer, 2, 1, Cell::Kv(1)).unwrap();
    assert_eq!((view.region, view.offset), (1, 2 * 256 + 16));
    assert_eq!((view.cell.head_stride, view.cell.token_stride), (128, 32), "[block, head, token, K | V]");
}

#[test]
fn planes_may_lie_between_keys_and_values() {
    let shape = LayoutConfig { planes: vec![OpaquePlane::new("scale", 64)], ..shape() };
    let keys = CellStrides { layer_stride: 320, block_stride: 640, ..cells()[0] };
    let plane = CellStrides { offset: 128, token_stride: 9, ..keys };
    let values = CellStrides { offset: 192, ..keys };
    let layout = StridedLayout::new(shape, region(1920), vec![keys, values, plane]).unwrap();
    assert_eq!(layout.cells()[2].token_stride, 0, "a plane has no tokens");
    assert_eq!(conformance::check(&layout), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Whatever strides come in: either they are refused, or no two elements overlap and all are in
    /// their region.
    #[test]
    fn accepted_strides_are_sound(
        strides in prop::collection::vec(0_u64..48, 12), shape in prop::array::uniform5(1_u32..4), per_layer in 0_u32..2
    ) {
        let [blocks, layers, tokens, heads, dim] = shape;
        let config = config(blocks, layers, tokens, heads, dim, DType::U8);
        let cells: Vec<_> = strides
            .chunks(6)
            .map(|s| CellStrides {
                region: 0,
                region_per_layer: per_layer,
                offset: s[0],
                layer_stride: s[1],
                block_stride: s[2],
                token_stride: s[3],
                head_stride: s[4],
                elem_stride: s[5],
            })
            .collect();
        let regions = vec![RegionSpec { bytes: 400, alignment: 1 }; if per_layer == 1 { layers as usize } else { 1 }];
        if let Ok(layout) = StridedLayout::new(config, regions, cells) {
            prop_assert_eq!(conformance::check(&layout), Ok(()));
        }
    }
}
