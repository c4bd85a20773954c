//! What ranks of a predecessor have: their disks, and which of their parts of a block make one of
//! ours.

use super::{OldFolder, PredecessorError};
use crate::geometry::{SlotGeometry, UnknownGeometry};
use kvbm_disk::Archive;
use kvbm_layout::{BlockLayout, BlockPart, CopyPlan, FullyContiguous, Selection, Span};
use kvbm_plan::{BlockId, BlockIdentity};

/// The disk of a rank of a predecessor.
#[derive(Debug)]
pub(super) struct OldRank {
    pub(super) archive: Archive,
    /// Which rank of how many.
    pub(super) rank: (u32, u32),
    /// By cache group.
    pub(super) groups: Vec<OldGroup>,
}

/// What a rank of a predecessor has of the blocks of a cache group.
#[derive(Debug)]
pub(super) struct OldGroup {
    pub(super) geometry: SlotGeometry,
    pub(super) slot: FullyContiguous,
}

impl OldGroup {
    fn new(geometry: SlotGeometry, ours: &SlotGeometry, rank: (u32, u32)) -> Result<Self, String> {
        let slot = geometry.slot().map_err(|error| error.to_string())?;
        match ours.differs(&geometry) {
            Some(differs) => Err(differs),
            None if geometry.rank != rank => {
                Err(format!("it calls itself rank {} of {}", geometry.rank.0, geometry.rank.1))
            }
            None => Ok(Self { geometry, slot }),
        }
    }
}

impl OldRank {
    /// `ours`: the geometry of a rank of ours, by cache group.
    pub(super) fn new(
        archive: Archive,
        namespace: [u8; 16],
        ours: &[SlotGeometry],
        folder: &OldFolder,
        ranks: u32,
    ) -> Result<Self, String> {
        if archive.namespace() != namespace {
            return Err("its blocks belong to another namespace".to_owned());
        }
        let text = std::str::from_utf8(archive.geometry()).map_err(|error| error.to_string())?;
        let geometries = match folder.groups.iter().find(|(header, _)| header == text) {
            Some((_, groups)) => groups.clone(),
            None if ours.len() > 1 => return Err(format!("its blocks are of other cache groups: {text}")),
            None => vec![text.parse().map_err(|error: UnknownGeometry| error.to_string())?],
        };
        let rank = (folder.rank, ranks);
        let group = |(geometry, ours)| OldGroup::new(geometry, ours, rank);
        let groups = geometries.into_iter().zip(ours).map(group).collect::<Result<Vec<_>, _>>()?;
        let described = groups.iter().map(|group| group.slot.bytes_per_block()).max().unwrap_or(0);
        let held = archive.block_bytes();
        if described != held && !archive.blocks().is_empty() {
            return Err(format!("its blocks have {held} bytes, its geometry says {described}"));
        }
        Ok(Self { archive, rank, groups })
    }

    /// Bytes of its longest block.
    pub(super) fn longest(&self) -> u64 {
        self.groups.iter().map(|group| group.slot.bytes_per_block()).max().unwrap_or(0)
    }

    /// Copies this rank's part of a block to where it belongs in ours. `false`: it is not what was
    /// written, or cannot be read.
    pub(super) fn gather(
        &self,
        slot: BlockId,
        identity: &BlockIdentity,
        plan: &CopyPlan,
        memory: &mut [u8],
        block: &mut [u8],
    ) -> bool {
        let Some(group) = self.groups.get(usize::from(identity.group.0)) else { return false };
        let bytes = match self.archive.read(slot, identity, memory) {
            Ok(bytes) => bytes.filter(|bytes| bytes.len() as u64 == group.slot.bytes_per_block()),
            Err(error) => {
                tracing::warn!(%error, "a block of another deployment cannot be read");
                None
            }
        };
        let Some(bytes) = bytes else { return false };
        let mut whole = true;
        let copied = plan.for_each_run(0, 0, |run| {
            let range = |at: u64| at as usize..(at + run.len) as usize;
            match (block.get_mut(range(run.dst_offset)), bytes.get(range(run.src_offset))) {
                (Some(to), Some(from)) => to.copy_from_slice(from),
                _ => whole = false,
            }
        });
        copied.is_ok() && whole
    }
}

/// Of these parts those that together are `ours`, each cell once, and what of them that is.
pub(super) fn covering(
    parts: &[BlockPart],
    ours: &BlockPart,
) -> Result<Vec<(usize, Selection)>, PredecessorError> {
    let (mut sources, mut found) = (Vec::new(), 0);
    for (index, part) in parts.iter().enumerate() {
        // Heads that several ranks hold are taken from the first.
        let before = &parts[..index];
        let Some(selection) = part.overlap(ours).filter(|_| !before.contains(part)) else { continue };
        if before.iter().any(|before| before.overlap(part).is_some()) {
            let reason = "its part of a block is also another rank's, but not all of it".to_owned();
            return Err(PredecessorError::Content { rank: index, ranks: parts.len(), reason });
        }
        let cells = |span: Option<Span>| span.map_or(0, |span| u64::from(span.len));
        found += cells(selection.layers) * cells(selection.heads);
        sources.push((index, selection));
    }
    let needed = ours.layers.len() as u64 * ours.heads.len() as u64;
    if found == needed { Ok(sources) } else { Err(PredecessorError::Gap { found, needed }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_must_cover_ours_once() {
        let part = |heads: std::ops::Range<u32>| BlockPart { layers: 0..2, heads };
        let parts = |heads: &[std::ops::Range<u32>]| heads.iter().cloned().map(part).collect::<Vec<_>>();
        let ranks = |heads: &[std::ops::Range<u32>]| {
            covering(&parts(heads), &part(0..4))
                .map(|found| found.into_iter().map(|(rank, _)| rank).collect())
        };
        let found: Vec<usize> = ranks(&[0..2, 0..2, 2..4, 2..4]).expect("two of two each");
        assert_eq!(found, [0, 2]);
        let gap = ranks(&[0..2, 0..2]).expect_err("half of it");
        assert!(matches!(gap, PredecessorError::Gap { found: 4, needed: 8 }), "{gap}");
        // As many cells as are needed, but not those.
        let twice = ranks(&[0..2, 1..3]).expect_err("head 3 is nowhere");
        assert!(matches!(twice, PredecessorError::Content { rank: 1, ranks: 2, .. }), "{twice}");
    }
}
