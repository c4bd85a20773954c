//! What an engine and the daemon must agree on of the model's cache groups and their blocks.

use kvbm::GroupKind;
use kvbm::config::CacheGroups;
use kvbm::layout::{LayoutConfig, OpaqueLayout};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Most cache groups of a model.
pub(crate) const MAX_GROUPS: usize = CacheGroups::MAX;
/// Most runs of tensors that are spelled out, of all groups together: terms are bounded.
const MAX_RUNS: usize = 24;

/// A model as one rank has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelShape {
    /// By the groups' ids.
    groups: Vec<GroupShape>,
    /// Of all groups, with what is not spelled out of them.
    fingerprint: u64,
}

/// A cache group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GroupShape {
    /// As the configuration spells it.
    kind: String,
    /// None of a process that copies nothing.
    block: Option<BlockShape>,
}

/// A block on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BlockShape {
    /// See [`BlockShape::NUMBERS`].
    numbers: [u32; 5],
    dtype: String,
    /// Tensors without axes: how many have so many bytes of a layer, in order. Empty where they are
    /// too many.
    runs: Vec<(u32, u32)>,
    /// How many there are, and their fingerprint, where they are too many.
    hidden: Option<(u32, u64)>,
}

/// Both sides' values of what differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) name: String,
    pub(crate) theirs: String,
    pub(crate) ours: String,
}

impl ModelShape {
    /// Of groups of these kinds, whose blocks have these shapes.
    pub(crate) fn new<'a>(kinds: &[GroupKind], blocks: impl IntoIterator<Item = &'a LayoutConfig>) -> Self {
        let (mut blocks, mut left, mut numbers) = (blocks.into_iter(), MAX_RUNS, Vec::new());
        let mut group = |kind: &GroupKind| {
            let block = blocks.next();
            add_numbers(&mut numbers, *kind, block);
            GroupShape { kind: kind.to_string(), block: block.map(|block| BlockShape::new(block, &mut left)) }
        };
        let groups = kinds.iter().map(&mut group).collect();
        Self { groups, fingerprint: OpaqueLayout::fingerprint(&numbers) }
    }

    /// The first difference between what they have and what is here.
    pub(crate) fn difference(&self, ours: &Self) -> Option<Difference> {
        let (theirs, several) = (self, ours.groups.len() > 1);
        if theirs.groups.len() != ours.groups.len() {
            let (theirs, ours) = (theirs.kinds(), ours.kinds());
            return Some(Difference { name: "cache groups (model.groups)".into(), theirs, ours });
        }
        let groups = (0..).zip(theirs.groups.iter().zip(&ours.groups));
        let mut each = groups.filter_map(|(number, (theirs, ours)): (usize, _)| {
            let mut found = theirs.difference(ours)?;
            if several {
                found.name = format!("cache group {number}, {}", found.name);
            }
            Some(found)
        });
        each.next().or_else(|| {
            let shown = |shape: &Self| format!("{:016x}", shape.fingerprint);
            (theirs.fingerprint != ours.fingerprint).then(|| Difference {
                name: "fingerprint of all cache groups".into(),
                theirs: shown(theirs),
                ours: shown(ours),
            })
        })
    }

    /// How many groups there are, and of which kinds.
    fn kinds(&self) -> String {
        let mut text = self.groups.len().to_string();
        for (at, group) in self.groups.iter().take(MAX_GROUPS).enumerate() {
            // Writing to a string does not fail.
            let _ = write!(text, "{}{:.24}", if at == 0 { " (" } else { ", " }, group.kind);
        }
        if !self.groups.is_empty() {
            text.push(')');
        }
        text
    }
}

impl GroupShape {
    fn difference(&self, ours: &Self) -> Option<Difference> {
        let of =
            |name: &str, theirs: String, ours: String| Difference { name: name.to_owned(), theirs, ours };
        if self.kind != ours.kind {
            return Some(of("what its layers keep", format!("{:.24}", self.kind), ours.kind.clone()));
        }
        match (&self.block, &ours.block) {
            (Some(theirs), Some(ours)) => {
                let values = theirs.values().into_iter().zip(ours.values());
                let mut values = values.filter(|((_, theirs), (_, ours))| theirs != ours);
                values.next().map(|((name, theirs), (_, ours))| of(name, theirs, ours))
            }
            (None, None) => None,
            (theirs, ours) => {
                let shown = |block: &Option<BlockShape>| if block.is_some() { "a shape" } else { "no shape" };
                Some(of("its blocks", shown(theirs).into(), shown(ours).into()))
            }
        }
    }
}

impl BlockShape {
    const NUMBERS: [&str; 5] =
        ["layers", "tensors of a layer", "tokens of a block", "elements of a token", "KV heads of the rank"];

    fn new(layout: &LayoutConfig, left: &mut usize) -> Self {
        let tensors: Vec<u32> = layout.planes.iter().map(|plane| plane.bytes_per_layer).collect();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for bytes in &tensors {
            match runs.last_mut() {
                Some((count, last)) if last == bytes => *count += 1,
                _ => runs.push((1, *bytes)),
            }
        }
        let hidden = (runs.len() > *left).then(|| {
            runs.clear();
            (tensors.len() as u32, OpaqueLayout::fingerprint(&tensors))
        });
        *left -= runs.len();
        Self {
            numbers: [
                layout.num_layers,
                layout.outer_dim,
                layout.page_size,
                layout.inner_dim,
                layout.num_heads,
            ],
            dtype: layout.dtype.name().to_owned(),
            runs,
            hidden,
        }
    }

    /// With names for people.
    fn values(&self) -> Vec<(&'static str, String)> {
        let numbers = Self::NUMBERS.into_iter().zip(self.numbers.map(|number| number.to_string()));
        [("tensors without axes", self.shown_tensors())]
            .into_iter()
            .chain(numbers)
            .chain([("dtype", format!("{:.24}", self.dtype))])
            .collect()
    }

    /// As the configuration spells them.
    fn shown_tensors(&self) -> String {
        if let Some((tensors, fingerprint)) = self.hidden {
            return format!("{tensors} of them, fingerprint {fingerprint:016x}");
        }
        if self.runs.is_empty() {
            return "none".to_owned();
        }
        let run = |(count, bytes): &(u32, u32)| match count {
            1 => bytes.to_string(),
            _ => format!("{count}x{bytes}"),
        };
        self.runs.iter().take(MAX_RUNS).map(run).collect::<Vec<_>>().join(",")
    }
}

/// All that is to be alike of a group, as numbers.
fn add_numbers(numbers: &mut Vec<u32>, kind: GroupKind, block: Option<&LayoutConfig>) {
    let (kind, window) = match kind {
        GroupKind::Full => (0, 0),
        GroupKind::SlidingWindow(tokens) => (1, tokens),
        GroupKind::State => (2, 0),
    };
    numbers.extend([kind, window, u32::from(block.is_some())]);
    let Some(layout) = block else { return };
    let LayoutConfig { num_layers, outer_dim, page_size, inner_dim, num_heads, .. } = *layout;
    numbers.extend([num_layers, outer_dim, page_size, inner_dim, num_heads, layout.dtype.code().into()]);
    numbers.push(layout.planes.len() as u32);
    numbers.extend(layout.planes.iter().map(|plane| plane.bytes_per_layer));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{decode, encode};
    use kvbm::layout::DType;

    const FULL: &[GroupKind] = &[GroupKind::Full];

    /// Kinds of the groups, and their blocks.
    type Side<'a> = (&'a [GroupKind], &'a [LayoutConfig]);

    fn heads(heads: u32) -> LayoutConfig {
        let layout = LayoutConfig::builder().num_blocks(1).num_layers(2).page_size(16);
        layout.inner_dim(64 * heads).num_heads(heads).dtype(DType::BF16).build().unwrap()
    }

    fn opaque(bytes: &[u32]) -> LayoutConfig {
        OpaqueLayout::config_of(1, bytes, 1).unwrap()
    }

    /// What is told of models of these groups, theirs first.
    fn told(theirs: Side<'_>, ours: Side<'_>) -> String {
        let of = |(kinds, blocks): Side<'_>| ModelShape::new(kinds, blocks);
        // As it comes over a line.
        let theirs: ModelShape = decode(&encode(&of(theirs))).unwrap();
        let Some(Difference { name, theirs, ours }) = theirs.difference(&of(ours)) else {
            return String::new();
        };
        format!("{name}: {theirs} / {ours}")
    }

    #[test]
    fn a_difference_is_named_with_both_values() {
        let window = GroupKind::SlidingWindow;
        let three = [window(31), GroupKind::Full, GroupKind::State];
        let blocks = [opaque(&[512, 512]), opaque(&[512; 3]), opaque(&[301])];
        let mut other = blocks.clone();
        other[2] = opaque(&[302]);
        let many: Vec<u32> = (1..200).collect();
        let mut swapped = many.clone();
        swapped.swap(50, 51);
        let none: &[LayoutConfig] = &[];
        let cases: [(Side<'_>, Side<'_>, &str); 13] = [
            ((FULL, &[heads(2)]), (FULL, &[heads(2)]), ""),
            ((FULL, &[heads(4)]), (FULL, &[heads(2)]), "elements of a token: 256 / 128"),
            ((FULL, none), (FULL, &[heads(2)]), "its blocks: no shape / a shape"),
            ((FULL, none), (FULL, none), ""),
            ((&[], none), (FULL, none), "cache groups (model.groups): 0 / 1 (full)"),
            ((&[GroupKind::State], none), (FULL, none), "what its layers keep: state / full"),
            (
                (FULL, &[opaque(&[512, 512, 64])]),
                (FULL, &[opaque(&[512, 64, 512])]),
                "tensors without axes: 2x512,64 / 512,64,512",
            ),
            ((FULL, &[opaque(&[512])]), (FULL, &[heads(2)]), "tensors without axes: 512 / none"),
            (
                (FULL, &[opaque(&many)]),
                (FULL, &[opaque(&swapped)]),
                "tensors without axes: 199 of them, fingerprint ",
            ),
            ((&three, &blocks), (&three, &blocks), ""),
            (
                (&three, &blocks),
                (FULL, &[heads(2)]),
                "cache groups (model.groups): 3 (window=31, full, state) / 1 (full)",
            ),
            (
                (&[window(32), GroupKind::Full, GroupKind::State], &blocks),
                (&three, &blocks),
                "cache group 0, what its layers keep: window=32 / window=31",
            ),
            ((&three, &other), (&three, &blocks), "cache group 2, tensors without axes: 302 / 301"),
        ];
        for (theirs, ours, expected) in cases {
            let told = told(theirs, ours);
            assert!(told.starts_with(expected) && told.is_empty() == expected.is_empty(), "{told}");
        }
        let mut lying = ModelShape::new(&three, &blocks);
        lying.fingerprint ^= 1;
        let told = lying.difference(&ModelShape::new(&three, &blocks)).unwrap();
        assert_eq!(told.name, "fingerprint of all cache groups");
    }

    #[test]
    fn the_shape_of_many_groups_is_short() {
        let kinds = [GroupKind::SlidingWindow(u32::MAX); MAX_GROUPS];
        let blocks: Vec<_> =
            (0..MAX_GROUPS as u32).map(|at| opaque(&[70_000, 80_000, 90_000 + at])).collect();
        let shape = ModelShape::new(&kinds, &blocks);
        let bytes = encode(&shape).len();
        // Beside the longest name of an engine.
        assert!(bytes + crate::protocol::MAX_NAME + 50 <= kvbm_link::MAX_TERMS, "{bytes}");
        assert_eq!(
            shape.groups.iter().filter(|group| group.block.as_ref().unwrap().runs.len() == 3).count(),
            8
        );
    }
}
