//! Hybrid models: groups of layers with shapes of their own.

use kvbm_layout::{
    AxisOrder, BlockLayout, Cell, DType, FullyContiguous, LayerGroup, OpaquePlane, Plane, validate_groups,
};

fn attention(layers: Vec<u32>, tokens_per_block: u32) -> LayerGroup {
    let kv =
        Plane::Kv { outer_dim: 2, num_heads: 4, head_dim: 64, value_head_dim: None, dtype: DType::F8E5M2 };
    let scales = Plane::Opaque(OpaquePlane::new("scales", 128));
    LayerGroup { layers, tokens_per_block, planes: vec![kv, scales] }
}

fn state(layers: Vec<u32>) -> LayerGroup {
    let planes =
        vec![Plane::Opaque(OpaquePlane::new("ssm", 4096)), Plane::Opaque(OpaquePlane::new("conv", 96))];
    LayerGroup { layers, tokens_per_block: 256, planes }
}

#[test]
fn each_group_has_its_own_shape() {
    let groups = [attention(vec![0, 4], 16), attention(vec![1, 2], 64), state(vec![3, 5])];
    assert_eq!(validate_groups(6, &groups), Ok(()));
    let full = groups[0].config(10, 512).unwrap();
    assert_eq!((full.num_layers, full.page_size, full.inner_dim, full.alignment), (2, 16, 256, 512));
    assert_eq!(full.bytes_per_block(), 2 * (2 * 16 * 256 + 128));
    let recurrent = groups[2].config(10, 1).unwrap();
    assert_eq!((recurrent.outer_dim, recurrent.bytes_per_block()), (0, 2 * (4096 + 96)));
    let layout = FullyContiguous::new(recurrent, AxisOrder::Nhd).unwrap();
    assert_eq!(layout.view(1, Cell::Plane(1)).unwrap().offset, 2 * 4096 + 96);
    let mla =
        Plane::Kv { outer_dim: 1, num_heads: 1, head_dim: 576, value_head_dim: None, dtype: DType::BF16 };
    let mla = LayerGroup { layers: vec![0], tokens_per_block: 64, planes: vec![mla] }.config(1, 1).unwrap();
    assert_eq!(mla.bytes_per_block(), 64 * 576 * 2);
}

#[test]
fn bad_groups_name_the_field() {
    let mut twice = attention(vec![0], 16);
    twice.planes.push(twice.planes[0].clone());
    let huge = Plane::Kv {
        outer_dim: 1,
        num_heads: 1 << 20,
        head_dim: 1 << 20,
        value_head_dim: None,
        dtype: DType::U8,
    };
    let narrow = Plane::Kv {
        outer_dim: 2,
        num_heads: 1 << 20,
        head_dim: 1,
        value_head_dim: Some(1 << 20),
        dtype: DType::U8,
    };
    let one = |plane| LayerGroup { layers: vec![0], tokens_per_block: 16, planes: vec![plane] };
    let cases = [
        (twice, "planes"),
        (one(huge), "head_dim"),
        (one(narrow), "value_head_dim"),
        (LayerGroup { planes: Vec::new(), ..attention(vec![0], 16) }, "outer_dim"),
        (attention(vec![], 16), "num_layers"),
        (attention(vec![0], 0), "page_size"),
    ];
    for (group, field) in cases {
        assert_eq!(group.config(1, 1).unwrap_err().field, field);
    }
}

#[test]
fn every_layer_is_in_one_group() {
    let cases = [
        (vec![vec![0, 1], vec![1, 2]], "1", "in two groups"),
        (vec![vec![0, 1], vec![3]], "3", "in no group"),
        (vec![vec![0, 1], vec![2]], "3", "in no group"),
        (vec![vec![0, 1, 2], vec![3, 4]], "4", "4 layers"),
        (vec![vec![0, 1, 2], vec![3, 3]], "3", "before layer 3"),
        (vec![vec![1, 0], vec![2, 3]], "0", "before layer 1"),
        (vec![vec![0, 1, 2, 3], vec![]], "[]", "at least one layer"),
    ];
    for (groups, value, rule) in cases {
        let groups: Vec<_> = groups.into_iter().map(|layers| attention(layers, 16)).collect();
        let error = validate_groups(4, &groups).unwrap_err();
        assert_eq!(error.value, value, "{error}");
        assert!(error.rule.contains(rule), "expected `{rule}` in `{error}`");
    }
}
