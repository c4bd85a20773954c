//! A bad config names the field, the value and the rule.

use kvbm_layout::{ConfigError, DType, LayoutConfig, OpaquePlane};

use crate::shapes::config;

fn shape() -> LayoutConfig {
    config(8, 4, 16, 4, 8, DType::BF16)
}

#[test]
fn broken_rules_are_named() {
    let plane = |name: &str, bytes| vec![OpaquePlane::new(name, bytes)];
    let too_many: Vec<_> = (0..1025).map(|i| OpaquePlane::new(format!("p{i}"), 1)).collect();
    let twins = vec![OpaquePlane::new("scale", 1), OpaquePlane::new("scale", 2)];
    let ok = shape();
    let cases = [
        (LayoutConfig { num_blocks: 0, ..ok.clone() }, "num_blocks", "0", "at least 1"),
        (LayoutConfig { num_layers: 0, ..ok.clone() }, "num_layers", "0", "between 1 and 4096"),
        (LayoutConfig { num_layers: 4097, ..ok.clone() }, "num_layers", "4097", "between 1 and 4096"),
        (
            LayoutConfig { outer_dim: 0, ..ok.clone() },
            "outer_dim",
            "0",
            "unless the layout has opaque planes",
        ),
        (LayoutConfig { outer_dim: 9, ..ok.clone() }, "outer_dim", "9", "between 0 and 8"),
        (LayoutConfig { page_size: 0, ..ok.clone() }, "page_size", "0", "between 1 and"),
        (LayoutConfig { inner_dim: 0, ..ok.clone() }, "inner_dim", "0", "between 1 and"),
        (LayoutConfig { num_heads: 0, ..ok.clone() }, "num_heads", "0", "between 1 and"),
        (LayoutConfig { num_heads: 5, ..ok.clone() }, "num_heads", "5", "must divide inner_dim (32)"),
        (LayoutConfig { alignment: 0, ..ok.clone() }, "alignment", "0", "power of two"),
        (LayoutConfig { alignment: 48, ..ok.clone() }, "alignment", "48", "power of two"),
        (LayoutConfig { alignment: 1 << 31, ..ok.clone() }, "alignment", "2147483648", "1073741824"),
        (
            LayoutConfig { value_inner_dim: Some(6), ..ok.clone() },
            "value_inner_dim",
            "6",
            "multiple of num_heads (4)",
        ),
        (LayoutConfig { value_inner_dim: Some(0), ..ok.clone() }, "value_inner_dim", "0", "between 1 and"),
        (
            LayoutConfig { value_inner_dim: Some(8), outer_dim: 1, ..ok.clone() },
            "value_inner_dim",
            "8",
            "outer_dim 1",
        ),
        (LayoutConfig { planes: too_many, ..ok.clone() }, "planes", "1025", "at most 1024"),
        (LayoutConfig { planes: twins, ..ok.clone() }, "planes.name", "scale", "unique"),
        (LayoutConfig { planes: plane("", 1), ..ok.clone() }, "planes.name", "\"\"", "1 to 32"),
        (LayoutConfig { planes: plane("a b", 1), ..ok.clone() }, "planes.name", "\"a b\"", "ASCII"),
        (LayoutConfig { planes: plane("scale", 0), ..ok.clone() }, "planes.bytes_per_layer", "0", "`scale`"),
    ];
    for (config, field, value, rule) in cases {
        let error = config.validate().unwrap_err();
        assert_eq!((error.field, error.value.as_str()), (field, value), "{error}");
        assert!(error.rule.contains(rule), "expected `{rule}` in `{error}`");
        assert!(error.to_string().contains(field) && error.to_string().contains(value));
    }
    assert_eq!(shape().validate(), Ok(()));
}

#[test]
fn a_builder_without_a_field_names_it() {
    let builder = LayoutConfig::builder;
    let cases = [
        (builder(), "num_blocks"),
        (builder().num_blocks(1), "num_layers"),
        (builder().num_blocks(1).num_layers(1), "page_size"),
        (builder().num_blocks(1).num_layers(1).page_size(1), "inner_dim"),
        (builder().num_blocks(1).num_layers(1).page_size(1).inner_dim(1), "dtype"),
    ];
    for (builder, missing) in cases {
        let error: ConfigError = builder.build().unwrap_err();
        assert_eq!((error.field, error.value.as_str()), (missing, "(not set)"));
    }
}

#[test]
fn byte_counts() {
    let mut config = shape();
    assert_eq!((config.layer_bytes(), config.bytes_per_block()), (2 * 16 * 32 * 2, 4 * 2 * 16 * 32 * 2));
    config.planes.push(OpaquePlane::new("scale", 3));
    assert_eq!(config.layer_bytes(), 2 * 16 * 32 * 2 + 3);
    config.value_inner_dim = Some(4);
    assert_eq!(config.layer_bytes(), 16 * (32 + 4) * 2 + 3);
    assert_eq!((config.head_dim_of(0), config.head_dim_of(1)), (8, 1));
}
