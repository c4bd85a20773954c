//! Which ranks to read a part of a block from.

use std::collections::BTreeMap;

use kvbm_plan::RankSlice;

use super::{ModelPart, ShapeError};

/// The slices to read `part` from, by index, and what of it each gives: every cell exactly once.
/// Where several ranks hold the same slice, `spread` chooses one of them, so that readers spread
/// over the replicas.
pub(crate) fn cover(
    part: &ModelPart,
    slices: &[RankSlice],
    spread: usize,
) -> Result<Vec<(usize, ModelPart)>, ShapeError> {
    let mut replicas: BTreeMap<[u32; 4], Vec<usize>> = BTreeMap::new();
    for (index, slice) in slices.iter().enumerate() {
        let key = [slice.first_layer, slice.num_layers, slice.heads.start, slice.heads.count];
        replicas.entry(key).or_default().push(index);
    }
    let mut chosen = Vec::new();
    for holders in replicas.values() {
        let index = holders[spread % holders.len()];
        if let Some(overlap) = part.overlap(&ModelPart::of(&slices[index])) {
            chosen.push((index, overlap));
        }
    }
    let found: u64 = chosen.iter().map(|(_, overlap)| overlap.cells()).sum();
    let is_disjoint = chosen
        .iter()
        .enumerate()
        .all(|(at, (_, one))| chosen[at + 1..].iter().all(|(_, other)| one.overlap(other).is_none()));
    if found != part.cells() || !is_disjoint {
        return Err(ShapeError::Uncovered { part: part.clone(), needed: part.cells(), found });
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{HeadRange, Rank, Replication};

    fn slice(layers: std::ops::Range<u32>, heads: std::ops::Range<u32>) -> RankSlice {
        RankSlice {
            rank: Rank(0),
            first_layer: layers.start,
            num_layers: layers.len() as u32,
            heads: HeadRange { start: heads.start, count: heads.len() as u32 },
            replication: Replication::None,
        }
    }

    #[test]
    fn every_cell_is_read_once() {
        let part = ModelPart { layers: 0..4, heads: 2..6 };
        let ranks: Vec<_> = (0..4).map(|rank| slice(0..4, rank * 2..rank * 2 + 2)).collect();
        let chosen = cover(&part, &ranks, 0).unwrap();
        assert_eq!(chosen.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 2]);

        let missing = cover(&part, &ranks[..2], 0).unwrap_err();
        assert!(matches!(missing, ShapeError::Uncovered { needed: 16, found: 8, .. }), "{missing}");
        let overlapping = [slice(0..4, 2..5), slice(0..4, 4..6)];
        assert!(cover(&part, &overlapping, 0).is_err(), "head 4 stands in two cuts");
        // As many cells as are needed, but not these.
        let crossed = [slice(0..4, 2..5), slice(0..4, 3..4)];
        assert!(cover(&part, &crossed, 0).is_err());
    }

    #[test]
    fn replicas_share_the_readers() {
        let part = ModelPart { layers: 0..4, heads: 0..1 };
        let replicas = [slice(0..4, 0..1), slice(0..4, 0..1), slice(0..4, 1..2)];
        let from = |spread| cover(&part, &replicas, spread).unwrap()[0].0;
        assert_eq!([from(0), from(1), from(2)], [0, 1, 0]);
    }
}
