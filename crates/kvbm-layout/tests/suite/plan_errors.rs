//! A plan that cannot be made says which field, which values, and what to do.

use kvbm_layout::{
    AxisOrder, BlockLayout, CopyPlan, DType, FullyContiguous, InnerOrder, LayoutConfig, OpaquePlane,
    PlanError, Selection, Side,
};

use crate::shapes::config;

fn shape() -> LayoutConfig {
    config(2, 4, 16, 4, 8, DType::F16)
}

fn nhd(config: LayoutConfig) -> FullyContiguous {
    FullyContiguous::new(config, AxisOrder::Nhd).unwrap()
}

#[test]
fn mismatches_name_the_field_and_both_values() {
    let cases = [
        ("dtype", "f16", "f32", LayoutConfig { dtype: DType::F32, ..shape() }),
        ("dtype", "f16", "bf16", LayoutConfig { dtype: DType::BF16, ..shape() }),
        ("num_layers", "4", "5", LayoutConfig { num_layers: 5, ..shape() }),
        ("num_heads", "4", "2", LayoutConfig { num_heads: 2, ..shape() }),
        ("outer_dim", "2", "1", LayoutConfig { outer_dim: 1, ..shape() }),
        ("page_size", "16", "32", LayoutConfig { page_size: 32, ..shape() }),
        ("inner_dim / num_heads", "8", "4", LayoutConfig { inner_dim: 16, ..shape() }),
        ("value_inner_dim / num_heads", "8", "3", LayoutConfig { value_inner_dim: Some(12), ..shape() }),
        ("planes", "[]", "[scale:4]", LayoutConfig { planes: vec![OpaquePlane::new("scale", 4)], ..shape() }),
    ];
    for (name, left, right, other) in cases {
        let error = CopyPlan::between(&nhd(shape()), &nhd(other), &Selection::all()).unwrap_err();
        let PlanError::Mismatch { field, src, dst, hint } = &error else { panic!("{name}: {error}") };
        assert_eq!((*field, src.as_str(), dst.as_str()), (name, left, right));
        assert!(error.to_string().contains(hint));
    }
}

#[test]
fn ranges_must_fit_both_sides() {
    let small = nhd(LayoutConfig { num_layers: 2, num_heads: 2, inner_dim: 16, ..shape() });
    let large = nhd(shape());
    let layers = |src, dst, len| Selection::all().layers(src, dst, len).heads(0, 0, 2);
    let heads = |src, dst, len| Selection::all().layers(0, 0, 2).heads(src, dst, len);
    let cases = [
        (layers(0, 0, 0), "layers", Side::Source),
        (layers(3, 0, 2), "layers", Side::Source),
        (layers(0, 1, 2), "layers", Side::Destination),
        (layers(u32::MAX, 0, 2), "layers", Side::Source),
        (heads(0, 0, 0), "heads", Side::Source),
        (heads(4, 0, 1), "heads", Side::Source),
        (heads(0, 1, 2), "heads", Side::Destination),
    ];
    for (selection, wanted, on) in cases {
        let error = CopyPlan::between(&large, &small, &selection).unwrap_err();
        assert!(
            matches!(&error, PlanError::Range { axis, side, .. } if (*axis, *side) == (wanted, on)),
            "{error}"
        );
    }
}

#[test]
fn unknown_inner_order_is_never_permuted_or_cut() {
    let opaque = FullyContiguous::new(shape(), AxisOrder::Operational(InnerOrder::Opaque)).unwrap();
    let known = nhd(shape());
    let pairs: [(&dyn BlockLayout, &dyn BlockLayout, Side); 2] =
        [(&opaque, &known, Side::Source), (&known, &opaque, Side::Destination)];
    for (src, dst, opaque_side) in pairs {
        let error = CopyPlan::between(src, dst, &Selection::all()).unwrap_err();
        assert!(matches!(error, PlanError::OpaqueInner { side, .. } if side == opaque_side), "{error}");
    }
    let error = CopyPlan::between(&opaque, &opaque, &Selection::all().heads(0, 0, 2)).unwrap_err();
    assert!(matches!(error, PlanError::OpaqueInner { .. }), "{error}");
    let layers = CopyPlan::between(&opaque, &opaque, &Selection::all().layers(1, 2, 2)).unwrap();
    assert!(layers.is_contiguous(), "layers can be cut");
}

#[test]
fn planes_are_never_cut_by_head() {
    let layout = nhd(LayoutConfig { planes: vec![OpaquePlane::new("scale", 4)], ..shape() });
    let selection = Selection::all().heads(1, 1, 2);
    let error = CopyPlan::between(&layout, &layout, &selection).unwrap_err();
    assert!(matches!(&error, PlanError::PlaneSplit { plane, .. } if plane == "scale"), "{error}");
    assert!(CopyPlan::between(&layout, &layout, &selection.without_planes()).is_ok());
}

#[test]
fn an_empty_selection_is_an_error() {
    let only_planes = LayoutConfig { outer_dim: 0, planes: vec![OpaquePlane::new("state", 4)], ..shape() };
    let layout = nhd(only_planes);
    assert!(CopyPlan::between(&layout, &layout, &Selection::all()).unwrap().is_contiguous());
    let error = CopyPlan::between(&layout, &layout, &Selection::all().without_planes()).unwrap_err();
    assert_eq!(error, PlanError::Nothing);
}

#[test]
fn blocks_beyond_a_layout_are_refused_before_any_run() {
    let (src, dst) = (nhd(shape()), nhd(LayoutConfig { num_blocks: 9, ..shape() }));
    let plan = CopyPlan::between(&src, &dst, &Selection::all()).unwrap();
    assert!(plan.runs(1, 8).is_ok());
    for (blocks, wanted) in [((2, 0), Side::Source), ((0, 9), Side::Destination)] {
        let mut visited = 0;
        let error = plan.for_each_run(blocks.0, blocks.1, |_| visited += 1).unwrap_err();
        assert!(matches!(error, PlanError::Block { side, .. } if side == wanted), "{error}");
        assert_eq!(visited, 0);
    }
}
