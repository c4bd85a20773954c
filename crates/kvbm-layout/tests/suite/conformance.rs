//! The exported checks pass on every layout of this crate and find planted errors.

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, CellView, DType, FullyContiguous, LayoutConfig, LayoutError, LayoutType,
    RegionSpec, conformance,
};
use proptest::prelude::*;

use crate::shapes::{any_config, config, kinds, lay_out};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_layout_conforms(config in any_config()) {
        for kind in kinds() {
            let layout = lay_out(kind, &config);
            prop_assert_eq!(conformance::check(&*layout), Ok(()), "{:?}", kind);
        }
    }
}

type BreakView = fn(u32, &mut CellView);

/// A layout with one planted error.
#[derive(Debug)]
struct Broken {
    inner: FullyContiguous,
    regions: Vec<RegionSpec>,
    break_view: BreakView,
}

impl BlockLayout for Broken {
    fn config(&self) -> &LayoutConfig {
        self.inner.config()
    }
    fn layout_type(&self) -> LayoutType {
        self.inner.layout_type()
    }
    fn axis_order(&self) -> AxisOrder {
        self.inner.axis_order()
    }
    fn regions(&self) -> &[RegionSpec] {
        &self.regions
    }
    fn view(&self, layer: u32, cell: Cell) -> Result<CellView, LayoutError> {
        let mut view = self.inner.view(layer, cell)?;
        (self.break_view)(layer, &mut view);
        Ok(view)
    }
}

#[test]
fn planted_errors_are_found() {
    let broken = |break_view: BreakView, fewer_bytes: u64, alignment: u64| {
        let shape = LayoutConfig { alignment: 64, ..config(2, 3, 4, 2, 8, DType::F16) };
        let inner = FullyContiguous::new(shape, AxisOrder::Nhd).unwrap();
        let bytes = inner.regions()[0].bytes - fewer_bytes;
        Broken { inner, regions: vec![RegionSpec { bytes, alignment }], break_view }
    };
    let cases: [(&str, BreakView, u64, u64); 8] = [
        ("shares bytes", |_, view| view.token_stride = 16, 0, 64),
        ("shares bytes", |layer, view| view.offset -= u64::from(layer == 2) * 2, 0, 64),
        ("outside region 0", |_, _| (), 2, 64),
        ("region 1 does not exist", |_, view| view.region = 1, 0, 64),
        ("alignment 32 is below", |_, _| (), 0, 32),
        ("misaligns", |_, view| view.offset += 1, 0, 64),
        ("not aligned to 64", |_, view| view.block_stride += 2, 0, 64),
        ("the config says", |_, view| view.elems = 7, 0, 64),
    ];
    for (message, break_view, fewer_bytes, alignment) in cases {
        let found = conformance::check(&broken(break_view, fewer_bytes, alignment)).unwrap_err();
        assert!(found.contains(message), "expected `{message}`, found `{found}`");
    }
    assert_eq!(conformance::check(&broken(|_, _| (), 0, 64)), Ok(()));
}
