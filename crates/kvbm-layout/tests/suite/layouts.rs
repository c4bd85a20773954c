//! Each layout against its own drawing: walk the axes in the documented order and count bytes.

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, DType, FullyContiguous, InnerOrder, LayerSeparate, LayoutConfig,
    LayoutError, LayoutType, OpaquePlane, OuterPlacement,
};

use crate::shapes::config;

/// Offset of element (token, head, elem) of `cell` in `layer` of `block`.
fn at(
    layout: &dyn BlockLayout,
    block: u32,
    layer: u32,
    cell: Cell,
    (t, h, e): (u32, u32, u32),
) -> (u32, u64) {
    let view = layout.block_view(block, layer, cell).unwrap();
    let steps = [(t, view.cell.token_stride), (h, view.cell.head_stride), (e, view.cell.elem_stride)];
    let inside: u64 = steps.iter().map(|&(index, stride)| u64::from(index) * stride).sum();
    (view.region, view.offset + inside)
}

fn odd(dtype: DType) -> LayoutConfig {
    config(3, 5, 7, 3, 11, dtype)
}

/// Walks `axes` (extents, outermost first) and checks that `address` of each index is the next
/// element of a dense array.
fn walk(axes: [u32; 6], start: u64, width: u64, address: impl Fn([u32; 6]) -> u64) {
    let mut expected = start;
    let total: u32 = axes.iter().product();
    for flat in 0..total {
        let mut rest = flat;
        let mut index = [0; 6];
        for axis in (0..6).rev() {
            index[axis] = rest % axes[axis];
            rest /= axes[axis];
        }
        assert_eq!(address(index), expected, "index {index:?}");
        expected += width;
    }
}

#[test]
fn contiguous_orders_follow_their_drawing() {
    for dtype in [DType::F8E4M3, DType::BF16, DType::F32, DType::F64] {
        let shape = odd(dtype);
        let width = u64::from(dtype.width());
        let make = |order| FullyContiguous::new(shape.clone(), order).unwrap();
        for order in [AxisOrder::Nhd, AxisOrder::Operational(InnerOrder::Nhd)] {
            let layout = make(order);
            walk([3, 5, 2, 7, 3, 11], 0, width, |[b, l, o, t, h, e]| {
                at(&layout, b, l, Cell::Kv(o), (t, h, e)).1
            });
        }
        for order in [AxisOrder::Hnd, AxisOrder::Operational(InnerOrder::Hnd)] {
            let layout = make(order);
            walk([3, 5, 2, 3, 7, 11], 0, width, |[b, l, o, h, t, e]| {
                at(&layout, b, l, Cell::Kv(o), (t, h, e)).1
            });
        }
        let layout = make(AxisOrder::Universal);
        walk([3, 3, 5, 2, 7, 11], 0, width, |[b, h, l, o, t, e]| at(&layout, b, l, Cell::Kv(o), (t, h, e)).1);
    }
}

#[test]
fn layer_separate_placements_follow_their_drawing() {
    let shape = odd(DType::BF16);
    let make = |placement| LayerSeparate::new(shape.clone(), AxisOrder::Nhd, placement).unwrap();
    let kv = make(OuterPlacement::KvOuter);
    let block = make(OuterPlacement::BlockOuter);
    let packed = make(OuterPlacement::PackedInHead);
    for layer in 0..5 {
        walk([2, 3, 7, 3, 11, 1], 0, 2, |[o, b, t, h, e, _]| at(&kv, b, layer, Cell::Kv(o), (t, h, e)).1);
        walk([3, 2, 7, 3, 11, 1], 0, 2, |[b, o, t, h, e, _]| at(&block, b, layer, Cell::Kv(o), (t, h, e)).1);
        walk([3, 7, 3, 2, 11, 1], 0, 2, |[b, t, h, o, e, _]| at(&packed, b, layer, Cell::Kv(o), (t, h, e)).1);
        for layout in [&kv, &block, &packed] {
            assert_eq!(at(layout, 2, layer, Cell::Kv(1), (0, 0, 0)).0, layer, "one region per layer");
        }
    }
    let hnd = LayerSeparate::new(shape.clone(), AxisOrder::Hnd, OuterPlacement::PackedInHead).unwrap();
    walk([3, 3, 7, 2, 11, 1], 0, 2, |[b, h, t, o, e, _]| at(&hnd, b, 4, Cell::Kv(o), (t, h, e)).1);
}

#[test]
fn keys_and_values_of_different_width() {
    let shape = LayoutConfig { value_inner_dim: Some(3 * 4), ..odd(DType::F16) };
    assert_eq!(shape.bytes_per_block(), 5 * 7 * 3 * (11 + 4) * 2);
    let packed = LayerSeparate::new(shape.clone(), AxisOrder::Nhd, OuterPlacement::PackedInHead).unwrap();
    // [block, token, head, 11 of K | 4 of V]
    walk([3, 7, 3, 15, 1, 1], 0, 2, |[b, t, h, c, _, _]| {
        let (outer, elem) = if c < 11 { (0, c) } else { (1, c - 11) };
        at(&packed, b, 2, Cell::Kv(outer), (t, h, elem)).1
    });
    let universal = FullyContiguous::new(shape, AxisOrder::Universal).unwrap();
    // [block, head, layer, 7 x 11 of K | 7 x 4 of V]
    walk([3, 3, 5, 7 * 15, 1, 1], 0, 2, |[b, h, l, c, _, _]| {
        let (outer, token, elem) = if c < 77 { (0, c / 11, c % 11) } else { (1, (c - 77) / 4, (c - 77) % 4) };
        at(&universal, b, l, Cell::Kv(outer), (token, h, elem)).1
    });
}

#[test]
fn planes_stand_behind_the_values_of_all_layers() {
    let mut shape = odd(DType::F32);
    shape.planes = vec![OpaquePlane::new("k_scale", 3), OpaquePlane::new("v_scale", 6)];
    let kv = 5 * 2 * 7 * 33 * 4;
    let contiguous = FullyContiguous::new(shape.clone(), AxisOrder::Hnd).unwrap();
    assert_eq!(
        contiguous.block_stride(),
        (kv + 5_u64 * 9).next_multiple_of(4),
        "elements of the next block stay aligned"
    );
    for layer in 0..5 {
        let offset = |plane| contiguous.block_view(1, layer, Cell::Plane(plane)).unwrap().offset;
        assert_eq!(offset(0), contiguous.block_stride() + kv + u64::from(layer) * 3);
        assert_eq!(offset(1), contiguous.block_stride() + kv + 15 + u64::from(layer) * 6);
    }
    let separate = LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::BlockOuter).unwrap();
    assert_eq!(separate.regions().len(), 15, "one region per layer and plane");
    let view = separate.block_view(2, 4, Cell::Plane(1)).unwrap();
    assert_eq!((view.region, view.offset, view.cell.opaque), (14, 12, true));
}

#[test]
fn block_stride_is_aligned_up() {
    for (alignment, expected) in [(1, 2310), (2, 2310), (256, 2560), (4096, 4096)] {
        let shape = LayoutConfig { alignment, ..odd(DType::U8) };
        let layout = FullyContiguous::new(shape.clone(), AxisOrder::Nhd).unwrap();
        assert_eq!(layout.layer_stride(), 2 * 7 * 33);
        assert_eq!(layout.block_stride(), expected);
        assert_eq!(layout.regions()[0].bytes, 3 * expected);
        assert_eq!(layout.regions()[0].alignment, alignment);
        assert_eq!(layout.layout_type(), LayoutType::FullyContiguous);
        let run = layout.contiguous_block().unwrap();
        assert_eq!((run.offset, run.bytes, run.stride), (0, 2310, expected));

        let kv = LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
        let chunk = (7 * 33_u64).next_multiple_of(alignment);
        assert_eq!(kv.block_view(2, 3, Cell::Kv(1)).unwrap().offset, (3 + 2) * chunk);
        assert_eq!(kv.contiguous_block(), None);
    }
}

#[test]
fn mla_has_one_chunk_and_one_head() {
    let shape = LayoutConfig { outer_dim: 1, ..config(4, 3, 16, 1, 576, DType::BF16) };
    let layout = FullyContiguous::new(shape.clone(), AxisOrder::Nhd).unwrap();
    assert_eq!(layout.block_stride(), 3 * 16 * 576 * 2);
    assert!(matches!(
        layout.view(0, Cell::Kv(1)),
        Err(LayoutError::OutOfRange { axis: "outer", index: 1, count: 1 })
    ));
    let separate = LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::BlockOuter).unwrap();
    assert_eq!(separate.regions()[2].bytes, 4 * 16 * 576 * 2);
}

#[test]
fn orders_that_need_one_buffer_are_refused_per_layer() {
    for order in [AxisOrder::Universal, AxisOrder::Operational(InnerOrder::Opaque), AxisOrder::Strided] {
        let error = LayerSeparate::new(odd(DType::U8), order, OuterPlacement::KvOuter).unwrap_err();
        assert!(error.to_string().contains(order.name()), "{error}");
    }
    let error = FullyContiguous::new(odd(DType::U8), AxisOrder::Strided).unwrap_err();
    assert!(error.to_string().contains("StridedLayout"), "{error}");
}

#[test]
fn sizes_beyond_63_bits_are_errors() {
    let mut shape = config(u32::MAX, 4096, 1 << 20, 1, 1 << 24, DType::F64);
    let error = FullyContiguous::new(shape.clone(), AxisOrder::Nhd).unwrap_err();
    assert!(matches!(error, LayoutError::TooLarge { .. }), "{error}");
    for placement in [OuterPlacement::KvOuter, OuterPlacement::BlockOuter, OuterPlacement::PackedInHead] {
        let error = LayerSeparate::new(shape.clone(), AxisOrder::Hnd, placement).unwrap_err();
        assert!(matches!(error, LayoutError::TooLarge { .. }), "{error}");
    }
    shape.num_blocks = 1;
    shape.alignment = 1 << 30;
    assert!(FullyContiguous::new(shape, AxisOrder::Universal).is_ok(), "2^60 bytes fit");
}
