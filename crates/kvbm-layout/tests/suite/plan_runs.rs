//! How many runs a copy takes, in cases that people know by heart.

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, CellView, CopyPlan, DType, EngineRegions, FragmentList, FullyContiguous,
    InnerOrder, LayerSeparate, LayoutConfig, LayoutError, LayoutType, OpaquePlane, OuterPlacement,
    RegionSpec, Selection, StridedLayout,
};

use crate::shapes::config;

const LAYERS: u32 = 12;
const TOKENS: u32 = 16;
const HEADS: u32 = 8;

fn shape() -> LayoutConfig {
    config(4, LAYERS, TOKENS, HEADS, 128, DType::BF16)
}

fn contiguous(order: AxisOrder) -> Box<dyn BlockLayout> {
    Box::new(FullyContiguous::new(shape(), order).unwrap())
}

fn separate(order: AxisOrder, placement: OuterPlacement) -> Box<dyn BlockLayout> {
    Box::new(LayerSeparate::new(shape(), order, placement).unwrap())
}

#[test]
fn runs_of_whole_blocks() {
    let nhd = AxisOrder::Nhd;
    let (l, t, h) = (u64::from(LAYERS), u64::from(TOKENS), u64::from(HEADS));
    let opaque = AxisOrder::Operational(InnerOrder::Opaque);
    let engine = |name: &str| -> Box<dyn BlockLayout> {
        Box::new(
            StridedLayout::from_engine_order(shape(), name.parse().unwrap(), EngineRegions::One).unwrap(),
        )
    };
    let cases = [
        ("same order", contiguous(nhd), contiguous(nhd), 1, 1),
        (
            "operational is nhd with a name",
            contiguous(nhd),
            contiguous(AxisOrder::Operational(InnerOrder::Nhd)),
            1,
            1,
        ),
        ("opaque to opaque", contiguous(opaque), contiguous(opaque), 1, 1),
        ("universal to universal", contiguous(AxisOrder::Universal), contiguous(AxisOrder::Universal), 1, 1),
        ("keys and values apart", separate(nhd, OuterPlacement::KvOuter), contiguous(nhd), 2 * l, l),
        ("keys beside values", separate(nhd, OuterPlacement::BlockOuter), contiguous(nhd), l, l),
        ("packed on both sides", separate(nhd, OuterPlacement::PackedInHead), engine("BLNHC"), l, l),
        ("packed to nhd", separate(nhd, OuterPlacement::PackedInHead), contiguous(nhd), 2 * l * t * h, l),
        ("nhd to hnd", contiguous(nhd), contiguous(AxisOrder::Hnd), 2 * l * t * h, 1),
        ("nhd to universal", contiguous(nhd), contiguous(AxisOrder::Universal), 2 * l * t * h, 1),
        ("hnd to universal", contiguous(AxisOrder::Hnd), contiguous(AxisOrder::Universal), 2 * l * h, 1),
        (
            "hnd layers to universal",
            separate(AxisOrder::Hnd, OuterPlacement::KvOuter),
            contiguous(AxisOrder::Universal),
            2 * l * h,
            l,
        ),
        ("vLLM block-major to itself", engine("BLHNC"), engine("BLHNC"), 1, 1),
        ("vLLM layer-major to block-major", engine("LBHNC"), engine("BLHNC"), l, 1),
        ("vLLM universal to universal", engine("BHLNC"), engine("BHLNC"), 1, 1),
    ];
    for (name, src, dst, runs, segments) in cases {
        let plan = CopyPlan::between(&*src, &*dst, &Selection::all()).unwrap();
        assert_eq!(plan.num_runs(), runs, "{name}");
        assert_eq!(plan.segments().len() as u64, segments, "{name}: {:?}", plan.segments());
        assert_eq!(plan.is_contiguous(), runs == 1, "{name}");
        assert_eq!(plan.bytes_per_block(), shape().bytes_per_block(), "{name}");
    }
}

#[test]
fn a_range_of_heads_is_one_run_of_a_universal_block() {
    let part = config(4, LAYERS, TOKENS, 2, 128, DType::BF16);
    let dst = FullyContiguous::new(part.clone(), AxisOrder::Universal).unwrap();
    for rank in 0..4 {
        let selection = Selection::all().heads(rank * 2, 0, 2);
        let plan = CopyPlan::between(&*contiguous(AxisOrder::Universal), &dst, &selection).unwrap();
        let runs: Vec<_> = plan.runs(1, 2).unwrap().collect();
        let bytes = part.bytes_per_block();
        assert_eq!(runs.len(), 1);
        assert_eq!(
            (runs[0].src_offset, runs[0].dst_offset, runs[0].len),
            (4 * bytes + u64::from(rank) * bytes, 2 * bytes, bytes)
        );
    }
}

#[test]
fn a_range_of_layers_is_one_run_of_an_operational_block() {
    let part = config(4, 5, TOKENS, HEADS, 128, DType::BF16);
    let dst = FullyContiguous::new(part.clone(), AxisOrder::Nhd).unwrap();
    let plan =
        CopyPlan::between(&*contiguous(AxisOrder::Nhd), &dst, &Selection::all().layers(7, 0, 5)).unwrap();
    let runs: Vec<_> = plan.runs(0, 0).unwrap().collect();
    assert_eq!(runs.len(), 1);
    assert_eq!((runs[0].src_offset, runs[0].len), (part.layer_bytes() * 7, part.bytes_per_block()));
}

#[test]
fn planes_join_the_run_of_the_block() {
    let with_planes =
        LayoutConfig { planes: vec![OpaquePlane::new("scale", 64), OpaquePlane::new("state", 7)], ..shape() };
    let layout = FullyContiguous::new(with_planes.clone(), AxisOrder::Nhd).unwrap();
    let whole = CopyPlan::between(&layout, &layout, &Selection::all()).unwrap();
    assert!(whole.is_contiguous(), "{whole:?}");
    let universal = FullyContiguous::new(with_planes, AxisOrder::Universal).unwrap();
    let permuted = CopyPlan::between(&layout, &universal, &Selection::all()).unwrap();
    assert_eq!(permuted.segments().len(), 2, "permuted keys and values, then all planes: {permuted:?}");
}

#[test]
fn a_permutation_of_a_large_model_stays_small() {
    let large = config(1, 80, 128, 64, 128, DType::BF16);
    let src = LayerSeparate::new(large.clone(), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
    let dst = FullyContiguous::new(large, AxisOrder::Universal).unwrap();
    let plan = CopyPlan::between(&src, &dst, &Selection::all()).unwrap();
    assert_eq!(plan.segments().len(), 80);
    assert_eq!(plan.num_runs(), 80 * 2 * 128 * 64);
    assert_eq!(plan.runs(0, 0).unwrap().size_hint(), (1_310_720, Some(1_310_720)));
}

/// Keys of 16 bytes at 0 and 64, values at 16 and 32: they touch in block 0 only.
#[derive(Debug)]
struct TouchInBlock0 {
    config: LayoutConfig,
}

impl BlockLayout for TouchInBlock0 {
    fn config(&self) -> &LayoutConfig {
        &self.config
    }
    fn layout_type(&self) -> LayoutType {
        LayoutType::Strided
    }
    fn axis_order(&self) -> AxisOrder {
        AxisOrder::Strided
    }
    fn regions(&self) -> &[RegionSpec] {
        &[RegionSpec { bytes: 80, alignment: 1 }]
    }
    fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError> {
        let dense = FullyContiguous::new(self.config.clone(), AxisOrder::Nhd)?.view(layer, cell)?;
        let (offset, block_stride) = if cell == Cell::Kv(0) { (0, 64) } else { (16, 16) };
        Ok(CellView { offset, block_stride, ..dense })
    }
}

#[test]
fn cells_that_touch_in_one_block_only_stay_apart() {
    let src = TouchInBlock0 { config: config(2, 1, 4, 1, 4, DType::U8) };
    assert_eq!(kvbm_layout::conformance::check(&src), Ok(()));
    let dst = FullyContiguous::new(src.config.clone(), AxisOrder::Nhd).unwrap();
    let plan = CopyPlan::between(&src, &dst, &Selection::all()).unwrap();
    let places =
        |block| plan.runs(block, 0).unwrap().map(|run| (run.src_offset, run.dst_offset, run.len)).collect();
    let (first, second): (Vec<_>, Vec<_>) = (places(0), places(1));
    assert_eq!(first, [(0, 0, 16), (16, 16, 16)]);
    assert_eq!(second, [(64, 0, 16), (32, 16, 16)]);
    let list = FragmentList::between(&src, &dst, &Selection::all()).unwrap();
    let fragments: Vec<_> =
        list.fragments(1).unwrap().map(|at| (at.offset, at.slot_offset, at.len)).collect();
    assert_eq!(fragments, second);
}

#[test]
fn a_conversion_has_a_grid_for_each_cell_and_other_copies_one_axis() {
    let (h, t) = (u64::from(HEADS), u64::from(TOKENS));
    let (nhd, universal) =
        (separate(AxisOrder::Nhd, OuterPlacement::KvOuter), contiguous(AxisOrder::Universal));
    for (src, dst, head_first) in [(&nhd, &universal, true), (&universal, &nhd, false)] {
        let plan = CopyPlan::between(&**src, &**dst, &Selection::all()).unwrap();
        let grids: Vec<_> = plan.grids(0, 0).unwrap().collect();
        assert_eq!(grids.len() as u64, 2 * u64::from(LAYERS));
        assert_eq!(plan.num_grids(), grids.len() as u64);
        for grid in grids {
            let [source, destination] = grid.axes;
            assert_eq!((source.src_stride, destination.dst_stride), (grid.run_bytes, grid.run_bytes));
            assert_eq!((source.count, destination.count), if head_first { (h, t) } else { (t, h) });
            assert!(!grid.is_dense());
        }
    }
    let plan = CopyPlan::between(&*nhd, &*contiguous(AxisOrder::Nhd), &Selection::all()).unwrap();
    let grids: Vec<_> = plan.grids(0, 0).unwrap().collect();
    assert!(grids.iter().all(|grid| grid.axes[0].count == 1), "nothing is permuted: {grids:?}");
    assert_eq!(grids.iter().map(kvbm_layout::RunGrid::num_runs).sum::<u64>(), plan.num_runs());
}
