//! What ranks of a predecessor have: their disks, and which of their parts of a block make one of
//! ours.

use super::PredecessorError;
use crate::geometry::SlotGeometry;
use kvbm_disk::Archive;
use kvbm_layout::{BlockLayout, BlockPart, CopyPlan, FullyContiguous, Selection, Span};
use kvbm_plan::{BlockId, BlockIdentity};

/// The disk of a rank of a predecessor.
#[derive(Debug)]
pub(super) struct OldRank {
    pub(super) archive: Archive,
    pub(super) geometry: SlotGeometry,
    pub(super) slot: FullyContiguous,
}

impl OldRank {
    pub(super) fn new(
        archive: Archive,
        namespace: [u8; 16],
        ours: &SlotGeometry,
        (rank, ranks): (usize, usize),
    ) -> Result<Self, String> {
        if archive.namespace() != namespace {
            return Err("its blocks belong to another namespace".to_owned());
        }
        let text = std::str::from_utf8(archive.geometry()).map_err(|error| error.to_string())?;
        let geometry: SlotGeometry =
            text.parse().map_err(|error: crate::geometry::UnknownGeometry| error.to_string())?;
        let slot = geometry.slot().map_err(|error| error.to_string())?;
        let (said, held) = (slot.bytes_per_block(), archive.block_bytes());
        match ours.differs(&geometry) {
            Some(differs) => Err(differs),
            None if geometry.rank != (rank as u32, ranks as u32) => {
                Err(format!("it calls itself rank {} of {}", geometry.rank.0, geometry.rank.1))
            }
            None if said != held && !archive.blocks().is_empty() => {
                Err(format!("its blocks have {held} bytes, its geometry says {said}"))
            }
            None => Ok(Self { archive, geometry, slot }),
        }
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
        let bytes = match self.archive.read(slot, identity, memory) {
            Ok(bytes) => bytes.filter(|bytes| bytes.len() as u64 == self.slot.bytes_per_block()),
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
