//! What a mover and the daemon must agree on of a block's shape.

use kvbm::layout::LayoutConfig;

/// The shape of a block on one rank, with names for people.
pub(crate) fn shape_of(layout: &LayoutConfig) -> Vec<(String, String)> {
    let opaque: u64 = layout.planes.iter().map(|plane| u64::from(plane.bytes_per_layer)).sum();
    [
        ("layers", layout.num_layers.to_string()),
        ("tensors of a layer", layout.outer_dim.to_string()),
        ("tokens of a block", layout.page_size.to_string()),
        ("elements of a token", layout.inner_dim.to_string()),
        ("KV heads of the rank", layout.num_heads.to_string()),
        ("dtype", layout.dtype.name().to_owned()),
        ("opaque tensors", layout.planes.len().to_string()),
        ("opaque bytes of a layer", opaque.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// The first difference, in words.
pub(crate) fn difference(theirs: &[(String, String)], ours: &[(String, String)]) -> Option<String> {
    let missing = "no such value".to_owned();
    ours.iter().find_map(|(name, ours)| {
        let theirs = theirs.iter().find(|(theirs, _)| theirs == name).map_or(&missing, |(_, value)| value);
        (theirs != ours).then(|| {
            format!("{name}: the engine has {theirs}, the daemon has {ours}; start both for the same model")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::layout::DType;

    #[test]
    fn a_difference_is_named_with_both_values() {
        let shape = |heads: u32| {
            let layout = LayoutConfig::builder().num_blocks(1).num_layers(2).page_size(16);
            let layout = layout.inner_dim(64 * heads).num_heads(heads).dtype(DType::BF16).build();
            shape_of(&layout.unwrap())
        };
        assert_eq!(difference(&shape(2), &shape(2)), None);
        let words = difference(&shape(4), &shape(2)).unwrap();
        assert!(words.contains("elements of a token: the engine has 256, the daemon has 128"), "{words}");
        assert!(difference(&[], &shape(2)).unwrap().contains("no such value"));
    }
}
