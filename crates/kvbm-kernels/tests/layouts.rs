//! The same conversions by the copy plans of `kvbm-layout`, which were written apart from this
//! crate.

use kvbm_kernels::{BlockForm, BlockShape, KernelError, convert};
use kvbm_layout::{
    AxisOrder, CopyPlan, DType, FullyContiguous, InnerOrder, LayoutConfig, OpaquePlane, Selection,
};
use proptest::prelude::*;

const ORDERS: [AxisOrder; 5] = [
    AxisOrder::Nhd,
    AxisOrder::Hnd,
    AxisOrder::Operational(InnerOrder::Nhd),
    AxisOrder::Operational(InnerOrder::Hnd),
    AxisOrder::Universal,
];

fn config(
    num_layers: u32,
    outer_dim: u32,
    num_heads: u32,
    page_size: u32,
    head_dim: u32,
    dtype: DType,
) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(2)
        .num_layers(num_layers)
        .outer_dim(outer_dim)
        .page_size(page_size)
        .inner_dim(num_heads * head_dim)
        .num_heads(num_heads)
        .dtype(dtype)
        .alignment(1)
        .build()
        .expect("a small config")
}

fn any_config() -> impl Strategy<Value = LayoutConfig> {
    let dtype = prop::sample::select(vec![DType::F8E4M3, DType::BF16, DType::F32, DType::F64]);
    (1..4_u32, 1..3_u32, 1..5_u32, 1..6_u32, 1..4_u32, dtype)
        .prop_map(|(layers, outer, heads, page, dim, dtype)| config(layers, outer, heads, page, dim, dtype))
}

fn at(offset: u64, length: u64) -> std::ops::Range<usize> {
    let index = |value| usize::try_from(value).expect("a small offset");
    index(offset)..index(offset + length)
}

proptest! {
    #[test]
    fn conversions_agree_with_copy_plans(
        config in any_config(),
        from in prop::sample::select(&ORDERS[..]),
        to in prop::sample::select(&ORDERS[..]),
        seed in any::<u8>(),
    ) {
        let shape = BlockShape::of_config(&config).expect("rows");
        let bytes = shape.block_bytes();
        prop_assert_eq!(bytes as u64, config.bytes_per_block());
        let source: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(151) >> 3) as u8 ^ seed).collect();

        let mut converted = vec![0; bytes];
        let form = |order| BlockForm::of_contiguous(order).expect("a form");
        convert(&shape, form(from), &[&source], form(to), &mut [&mut converted]).expect("sound arguments");

        let layout = |order| FullyContiguous::new(config.clone(), order).expect("a layout");
        let plan = CopyPlan::between(&layout(from), &layout(to), &Selection::all()).expect("a plan");
        let mut copied = vec![0; bytes];
        plan.for_each_run(0, 0, |run| {
            copied[at(run.dst_offset, run.len)].copy_from_slice(&source[at(run.src_offset, run.len)]);
        }).expect("block 0 exists");
        prop_assert_eq!(converted, copied);
    }
}

#[test]
fn layouts_without_rows_are_refused() {
    let base = config(2, 2, 2, 4, 8, DType::BF16);
    let field = |config: &LayoutConfig| match BlockShape::of_config(config) {
        Err(KernelError::Layout { field, .. }) => field,
        Err(KernelError::ZeroDimension { dimension }) => dimension,
        other => panic!("must be refused: {other:?}"),
    };
    assert!(BlockShape::of_config(&base).is_ok());
    assert!(BlockShape::of_config(&LayoutConfig { value_inner_dim: Some(16), ..base.clone() }).is_ok());
    assert_eq!(field(&LayoutConfig { value_inner_dim: Some(8), ..base.clone() }), "value_inner_dim");
    assert_eq!(
        field(&LayoutConfig { planes: vec![OpaquePlane::new("scales", 4)], ..base.clone() }),
        "planes"
    );
    assert_eq!(field(&LayoutConfig { num_heads: 0, ..base.clone() }), "num_heads");
    assert_eq!(field(&LayoutConfig { num_heads: 3, ..base.clone() }), "num_heads");
    assert_eq!(field(&LayoutConfig { outer_dim: 0, ..base }), "no");

    for order in [AxisOrder::Strided, AxisOrder::Operational(InnerOrder::Opaque)] {
        let error = BlockForm::of_contiguous(order).unwrap_err().to_string();
        assert!(error.contains(&format!("axis order is {order}")) && error.contains("copy plan"), "{error}");
    }
}
