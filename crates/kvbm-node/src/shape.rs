//! What a mover and the daemon must agree on of a block's shape.

use kvbm::config::ModelConfig;
use kvbm::layout::{LayoutConfig, OpaqueLayout};

/// Longest list of tensors that is spelled out: terms are bounded.
const MAX_LIST: usize = 200;

/// The shape of a block on one rank, with names for people.
pub(crate) fn shape_of(layout: &LayoutConfig) -> Vec<(String, String)> {
    [
        ("tensors without axes (model.opaque_tensors)", opaque_tensors(layout)),
        ("layers", layout.num_layers.to_string()),
        ("tensors of a layer", layout.outer_dim.to_string()),
        ("tokens of a block", layout.page_size.to_string()),
        ("elements of a token", layout.inner_dim.to_string()),
        ("KV heads of the rank", layout.num_heads.to_string()),
        ("dtype", layout.dtype.name().to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// Bytes of a layer in each tensor, as the configuration spells them.
fn opaque_tensors(layout: &LayoutConfig) -> String {
    let bytes: Vec<u32> = layout.planes.iter().map(|plane| plane.bytes_per_layer).collect();
    if bytes.is_empty() {
        return "none".to_owned();
    }
    let list = ModelConfig::opaque(layout.page_size, bytes.iter().copied()).opaque_tensors.to_string();
    match list.len() {
        0..=MAX_LIST => list,
        _ => format!("{} of them, fingerprint {:016x}", bytes.len(), OpaqueLayout::fingerprint(&bytes)),
    }
}

/// The first difference between what an engine has and what a daemon has, in words.
pub(crate) fn difference(theirs: &[(String, String)], ours: &[(String, String)]) -> Option<String> {
    let (name, theirs, ours) = first_difference(theirs, ours)?;
    Some(format!("{name}: the engine has {theirs}, the daemon has {ours}; start both for the same model"))
}

/// The first difference: its name and both values.
pub(crate) fn first_difference(
    theirs: &[(String, String)],
    ours: &[(String, String)],
) -> Option<(String, String, String)> {
    let missing = "no such value".to_owned();
    ours.iter().find_map(|(name, ours)| {
        let theirs = theirs.iter().find(|(theirs, _)| theirs == name).map_or(&missing, |(_, value)| value);
        (theirs != ours).then(|| (name.clone(), theirs.clone(), ours.clone()))
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
        let opaque = |bytes: &[u32]| shape_of(&OpaqueLayout::config_of(1, bytes, 1).unwrap());
        let words = difference(&opaque(&[512, 512, 64]), &opaque(&[512, 64, 512])).unwrap();
        assert!(words.contains("the engine has 2x512,64, the daemon has 512,64,512"), "{words}");
        assert!(difference(&opaque(&[512]), &shape(2)).unwrap().contains("the daemon has none"));
        let many: Vec<u32> = (1..200).collect();
        assert!(difference(&opaque(&many), &opaque(&[1])).unwrap().contains("199 of them, fingerprint"));
    }
}
