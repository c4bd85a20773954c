//! What `explain` says is what the layout does.

use kvbm_layout::explain::{describe_layout, describe_plan};
use kvbm_layout::{
    AxisOrder, CopyPlan, DType, FullyContiguous, LayerSeparate, LayoutConfig, OpaquePlane, OuterPlacement,
    Selection,
};

use crate::shapes::{config, kinds, lay_out};

#[test]
fn a_contiguous_layout_in_words() {
    let shape = LayoutConfig {
        alignment: 4096,
        planes: vec![OpaquePlane::new("scale", 32)],
        ..config(10, 2, 16, 4, 8, DType::BF16)
    };
    let layout = FullyContiguous::new(shape, AxisOrder::Universal).unwrap();
    let text = describe_layout(&layout).unwrap().to_string();
    let expected = "\
FullyContiguous, axis order universal
10 blocks x 2 layers x 2 outer x 16 tokens x 4 heads x 8 elements of bf16
1 regions, 81920 bytes: 4160 bytes per block, 40320 bytes of padding in all
| block 0: 4160 bytes | 4032 pad | block 1 at +8192 ...
  keys       region 0, offset 0: block[10] +8192, head[4] +1024, layer[2] +512, token[16] +16, element[8] +2; runs of 256 bytes
  values     region 0, offset 256: block[10] +8192, head[4] +1024, layer[2] +512, token[16] +16, element[8] +2; runs of 256 bytes
  scale      region 0, offset 4096: block[10] +8192, layer[2] +32, byte[32] +1; runs of 32 bytes
";
    assert_eq!(text, expected);
}

#[test]
fn a_scattered_layout_and_a_plan_in_words() {
    let shape = config(3, 12, 4, 2, 8, DType::U8);
    let layers = LayerSeparate::new(shape.clone(), AxisOrder::Nhd, OuterPlacement::PackedInHead).unwrap();
    let text = describe_layout(&layers).unwrap().to_string();
    assert!(text.contains("a block is scattered"), "{text}");
    assert!(
        text.contains("values     region 0, offset 8: layer[12] by region, block[3] +128, token[4] +32"),
        "{text}"
    );

    let host = FullyContiguous::new(shape, AxisOrder::Nhd).unwrap();
    let plan = CopyPlan::between(&layers, &host, &Selection::all()).unwrap();
    let text = describe_plan(&plan).to_string();
    let first = "1536 bytes per block in 192 runs of 8 to 8 bytes\n  region 0 +0 -> region 0 +0: 8 bytes x 2 (+8 -> +64) x 8 (+16 -> +8)\n";
    assert!(text.starts_with(first), "{text}");
    assert!(text.ends_with("  and 4 more segments\n"), "{text}");
}

#[test]
fn numbers_agree_with_the_layout() {
    let shape = config(3, 2, 4, 2, 8, DType::F16);
    for kind in kinds() {
        let layout = lay_out(kind, &shape);
        let told = describe_layout(&*layout).unwrap();
        assert_eq!(told.bytes_per_block, shape.bytes_per_block());
        assert_eq!(told.total_bytes, told.padding_bytes + 3 * told.bytes_per_block);
        assert_eq!(told.regions, layout.regions().len());
        assert_eq!(told.block_stride.is_some(), layout.contiguous_block().is_some(), "{kind:?}");
        for cell in &told.cells {
            assert_eq!(cell.axes.iter().map(|axis| axis.extent).product::<u64>(), 3 * 2 * 4 * 2 * 8);
            assert!(cell.run_bytes <= cell.bytes && cell.bytes.is_multiple_of(cell.run_bytes));
        }
    }
}
