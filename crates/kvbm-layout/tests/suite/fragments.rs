//! Fragment lists: a layer-separate block as one vectored I/O.

use kvbm_layout::{
    AxisOrder, DType, Fragment, FragmentList, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    PlanError, Selection,
};

use crate::shapes::config;

#[test]
fn keys_and_values_of_each_layer_in_slot_order() {
    let shape = LayoutConfig { alignment: 64, ..config(4, 3, 2, 2, 4, DType::F16) };
    let memory = LayerSeparate::new(shape.clone(), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
    let slot = FullyContiguous::new(shape, AxisOrder::Nhd).unwrap();
    let list = FragmentList::between(&memory, &slot, &Selection::all()).unwrap();
    assert!(list.covers_slot());
    assert_eq!((list.len(), list.bytes(), list.slot_bytes()), (6, 192, 192));
    let fragments: Vec<_> = list.fragments(3).unwrap().collect();
    let expected: Vec<_> = (0..6)
        .map(|index| Fragment {
            region: index / 2,
            offset: u64::from(index % 2) * 4 * 64 + 3 * 64,
            slot_offset: u64::from(index) * 32,
            len: 32,
        })
        .collect();
    assert_eq!(fragments, expected);
    assert!(matches!(list.fragments(4), Err(PlanError::Block { block: 4, count: 4, .. })));
}

#[test]
fn a_part_of_the_layers_leaves_gaps_in_the_slot() {
    let shape = config(4, 6, 2, 2, 4, DType::U8);
    let part = LayoutConfig { num_layers: 2, ..shape.clone() };
    let memory = LayerSeparate::new(part, AxisOrder::Hnd, OuterPlacement::BlockOuter).unwrap();
    let slot = FullyContiguous::new(shape, AxisOrder::Hnd).unwrap();
    let list = FragmentList::between(&memory, &slot, &Selection::all().layers(0, 3, 2)).unwrap();
    assert!(!list.covers_slot());
    let at: Vec<_> =
        list.fragments(0).unwrap().map(|fragment| (fragment.region, fragment.slot_offset)).collect();
    assert_eq!(at, [(0, 3 * 32), (1, 4 * 32)]);
}

#[test]
fn scattered_slots_and_endless_lists_are_refused() {
    let shape = config(2, 2, 2, 2, 2, DType::U8);
    let memory = LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
    let error = FragmentList::between(&memory, &memory, &Selection::all()).unwrap_err();
    assert!(matches!(error, PlanError::SlotNotContiguous { .. }), "{error}");

    let large = config(1, 80, 128, 64, 128, DType::BF16);
    let memory = FullyContiguous::new(large.clone(), AxisOrder::Nhd).unwrap();
    let slot = FullyContiguous::new(large, AxisOrder::Universal).unwrap();
    let error = FragmentList::between(&memory, &slot, &Selection::all()).unwrap_err();
    assert!(matches!(error, PlanError::TooManyFragments { count: 1_310_720, .. }), "{error}");
}
