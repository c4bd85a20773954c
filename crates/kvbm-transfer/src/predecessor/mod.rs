//! Blocks that a deployment with another number of ranks left on disks: read, verified, cut anew
//! and written as ours.
//!
//! It is done where a rank's directory is new, before anything else uses it. The predecessor's
//! directories are read and not changed. A block gets the same slot on all our ranks; a rank leaves
//! out what one before it did not get.

mod chains;
mod source;
mod writer;

use crate::config::DiskTier;
use crate::geometry::SlotGeometry;
use chains::{Incoming, Name, common, incoming, name, newest_chains};
use kvbm_disk::{Archive, DiskKeys, OpenError, OwnedBuffer, RecoveredSlot};
use kvbm_layout::{BlockLayout, CopyPlan, Selection};
use kvbm_plan::{BlockId, BlockIdentity, FileAccess, GroupId};
use source::{OldGroup, OldRank, covering};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Instant;
use writer::Writer;

/// A deployment of another size, and the blocks that all its ranks left.
#[derive(Debug)]
pub struct Predecessor {
    ranks: Vec<OldRank>,
    /// The newest chains first, parents before children.
    blocks: Vec<Incoming>,
    /// What our ranks had before.
    held: HashMap<BlockId, BlockIdentity>,
    left_out: LeftOut,
}

/// Where a deployment kept its blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldFolders {
    /// Its ranks.
    pub ranks: u32,
    /// Those of each rank that wrote, in the order of the ranks. Of ranks that held the same bytes,
    /// the first did.
    pub of: Vec<OldFolder>,
}

/// Where a rank of a deployment kept its blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OldFolder {
    /// The rank.
    pub rank: u32,
    /// Its directories.
    pub dirs: Vec<PathBuf>,
    /// Of a model with several cache groups, what its journal may say of its slots, and what that
    /// means for each group.
    pub groups: Vec<(String, Vec<SlotGeometry>)>,
}

/// Who takes over.
#[derive(Clone, Copy, Debug)]
pub struct NewRanks<'a> {
    /// Namespace of the blocks.
    pub namespace: [u8; 16],
    /// Who may use the files.
    pub access: FileAccess,
    /// The keys of the blocks of the old ranks, if there are any.
    pub keys: Option<&'a DiskKeys>,
    /// What a rank of ours keeps of a block of each cache group.
    pub groups: &'a [SlotGeometry],
    /// Groups whose blocks need no parent on the disk: prefixes need their last blocks only.
    pub without_parents: &'a [GroupId],
    /// Slots that we have.
    pub capacity: u32,
    /// Blocks that all our ranks have in their slots, which stay.
    pub held: &'a [(BlockId, BlockIdentity)],
}

/// Blocks of a predecessor that are not taken over by anybody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Some rank does not have them, or has another block in their slot.
    pub incomplete: u64,
    /// Their parent is gone.
    pub orphans: u64,
    /// There is no room for them here; the oldest go first, and no block without those after it in
    /// its chain.
    pub beyond_capacity: u64,
}

impl LeftOut {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.incomplete + self.orphans + self.beyond_capacity
    }
}

/// Results of the blocks on one of our ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Now ours.
    pub blocks: u64,
    /// Their bytes are not what was written, or cannot be read.
    pub damaged: u64,
    /// They could not be written here.
    pub not_written: u64,
    /// The time was over.
    pub too_late: u64,
    /// A rank of ours that was before this one does not have them, or their parent.
    pub without_others: u64,
}

/// Why blocks of a predecessor cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum PredecessorError {
    /// A rank's directory does not open. [`OpenError::NoJournal`]: its blocks lie on another
    /// machine, or nowhere.
    #[error("rank {rank} of {ranks}: {source}")]
    Open {
        /// The rank.
        rank: usize,
        /// Ranks of the predecessor.
        ranks: usize,
        /// Why.
        #[source]
        source: OpenError,
    },
    /// A rank's blocks are none of this model, or in an order that has no heads.
    #[error("rank {rank} of {ranks}: {reason}")]
    Content {
        /// The rank.
        rank: usize,
        /// Ranks of the predecessor.
        ranks: usize,
        /// What is wrong.
        reason: String,
    },
    /// Blocks of opaque tensors have no heads to divide.
    #[error(
        "its blocks are of opaque tensors (model.opaque_tensors), which cannot be divided anew among ranks: \
         start with {ranks} ranks to use them"
    )]
    Opaque {
        /// Ranks of the predecessor.
        ranks: u32,
    },
    /// Blocks of which a part has no heads to divide.
    #[error(
        "its blocks have states, scales or tensors without axes (model.groups), which are not divided anew among \
         ranks: start with {ranks} ranks to use them"
    )]
    Groups {
        /// Ranks of the predecessor.
        ranks: u32,
    },
    /// The ranks together do not have all of a block of ours.
    #[error("its ranks have {found} of the {needed} cells (layers x heads) that this rank needs")]
    Gap {
        /// Cells that were found.
        found: u64,
        /// Cells of this rank.
        needed: u64,
    },
}

impl Predecessor {
    /// Opens the directories of the ranks of a deployment.
    ///
    /// # Errors
    /// A directory is missing, in use, damaged, of another namespace or key, or holds blocks of
    /// something else than `ours`.
    pub fn open(folders: &OldFolders, ours: &NewRanks<'_>) -> Result<Self, PredecessorError> {
        let &NewRanks { namespace, access, keys, groups, without_parents, capacity, held } = ours;
        let open = |folder: &OldFolder| {
            let (rank, ranks) = (folder.rank as usize, folders.ranks as usize);
            let archive = Archive::open(&folder.dirs, access, keys)
                .map_err(|source| PredecessorError::Open { rank, ranks, source })?;
            OldRank::new(archive, namespace, groups, folder, folders.ranks)
                .map_err(|reason| PredecessorError::Content { rank, ranks, reason })
        };
        let alone = |group| without_parents.contains(&group);
        let ranks = folders.of.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let held: HashMap<_, _> = held.iter().copied().filter(|(slot, _)| slot.0 < capacity).collect();
        let names: HashSet<Name> = held.values().map(|identity| name(identity, identity.hash)).collect();
        let (mut common, incomplete) = common(&ranks);
        common.retain(|(_, identity)| !names.contains(&name(identity, identity.hash)));
        let (chosen, orphans) = newest_chains(&common, &names, capacity as usize - held.len(), alone);
        let beyond_capacity = common.len() as u64 - orphans - chosen.len() as u64;
        let free = (0..capacity).map(BlockId).filter(|slot| !held.contains_key(slot));
        let blocks = incoming(&common, &chosen, free, alone);
        Ok(Self { ranks, blocks, held, left_out: LeftOut { incomplete, orphans, beyond_capacity } })
    }

    /// Blocks that could be taken over.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// What nobody takes over.
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Blocks that every rank of ours has now, of those whose turn it was.
    pub fn taken(&self) -> u64 {
        self.blocks.iter().filter(|block| block.everywhere).count() as u64
    }

    /// Whether the ranks together have the parts `ours` of their blocks, by cache group.
    ///
    /// # Errors
    /// They have not, or not each of it once.
    pub fn covers(&self, ours: &[SlotGeometry]) -> Result<(), PredecessorError> {
        self.sources(ours).map(drop)
    }

    /// Writes the parts `ours` of the blocks, by cache group, to the disk of `tier` until
    /// `deadline`. What was written is added to what opening the disk found; of that, what our
    /// other ranks do not have is released.
    ///
    /// # Errors
    /// The predecessor does not have our part of its blocks.
    pub fn take_over(
        &mut self,
        ours: &[SlotGeometry],
        tier: &mut DiskTier,
        deadline: Instant,
    ) -> Result<TakenOver, PredecessorError> {
        let sources = self.sources(ours)?;
        self.release_others(tier);
        let bytes = tier.engine.info().block_bytes;
        let mut writer = Writer::new(&tier.engine, bytes);
        let mut taken = TakenOver::default();
        let longest = self.ranks.iter().map(OldRank::longest).max();
        let mut memory = vec![0; longest.unwrap_or(0) as usize];
        for index in 0..self.blocks.len() {
            let Incoming { identity, theirs, ours, parent, everywhere } = self.blocks[index];
            let alone = !everywhere || parent.is_some_and(|parent| !self.blocks[parent].everywhere);
            // Whatever is not written below is nowhere.
            self.blocks[index].everywhere = false;
            if alone {
                taken.without_others += 1;
            } else if writer.stopped {
                taken.not_written += 1;
            } else if Instant::now() >= deadline {
                taken.too_late += 1;
            } else {
                let part = sources.get(usize::from(identity.group.0));
                let mut block = OwnedBuffer::new(part.map_or(0, |part| part.bytes) as usize);
                let gathered = part.is_some_and(|part| {
                    part.of.iter().all(|(rank, plan)| {
                        self.ranks[*rank].gather(theirs, &identity, plan, &mut memory, block.as_mut_slice())
                    })
                });
                if gathered {
                    writer.write(ours, identity, block);
                    self.blocks[index].everywhere = true;
                } else {
                    taken.damaged += 1;
                }
            }
        }
        let given = writer.given.len() as u64;
        let written = writer.finish();
        taken.blocks = written.len() as u64;
        taken.not_written += given - taken.blocks;
        self.keep_written(&written);
        tier.recovered.blocks.extend(written);
        Ok(taken)
    }

    /// Blocks in our folder that not all our ranks have would lie where others move in.
    fn release_others(&self, tier: &mut DiskTier) {
        let stays = |found: &RecoveredSlot| self.held.get(&found.slot) == Some(&found.identity);
        let others: Vec<_> = tier.recovered.blocks.iter().filter(|found| !stays(found)).collect();
        let others: Vec<_> = others.into_iter().map(|found| found.slot).collect();
        tier.engine.release(&others);
        tier.recovered.blocks.retain(stays);
    }

    /// Forgets blocks that a rank could not write, and what continues them.
    fn keep_written(&mut self, written: &[RecoveredSlot]) {
        let written: HashSet<BlockId> = written.iter().map(|found| found.slot).collect();
        for index in 0..self.blocks.len() {
            let Incoming { ours, parent, everywhere, .. } = self.blocks[index];
            let rooted = parent.is_none_or(|parent| self.blocks[parent].everywhere);
            self.blocks[index].everywhere = everywhere && rooted && written.contains(&ours);
        }
    }

    /// For each cache group the ranks that together have our part of its blocks, and which bytes of
    /// theirs are which of ours.
    fn sources(&self, ours: &[SlotGeometry]) -> Result<Vec<Sources>, PredecessorError> {
        let content = |index: usize, reason: String| {
            let (rank, ranks) = self.ranks.get(index).map_or((0, 0), |rank| rank.rank);
            PredecessorError::Content { rank: rank as usize, ranks: ranks as usize, reason }
        };
        let of_group = |(group, ours): (usize, &SlotGeometry)| {
            let slot = ours.slot().map_err(|error| content(0, error.to_string()))?;
            let theirs: Vec<&OldGroup> =
                self.ranks.iter().filter_map(|rank| rank.groups.get(group)).collect();
            let parts: Vec<_> = theirs.iter().map(|theirs| theirs.geometry.part()).collect();
            let sources = covering(&parts, &ours.part()).map_err(|error| match error {
                PredecessorError::Content { rank, reason, .. } => content(rank, reason),
                error => error,
            })?;
            let plan = |(index, selection): (usize, Selection)| {
                let plan = CopyPlan::between(&theirs[index].slot, &slot, &selection);
                Ok((index, plan.map_err(|error| content(index, error.to_string()))?))
            };
            let of = sources.into_iter().map(plan).collect::<Result<_, _>>()?;
            Ok(Sources { bytes: slot.bytes_per_block(), of })
        };
        ours.iter().enumerate().map(of_group).collect()
    }
}

/// Where our part of the blocks of a cache group comes from.
struct Sources {
    /// Its bytes.
    bytes: u64,
    /// Ranks, and which bytes of theirs are which of ours.
    of: Vec<(usize, CopyPlan)>,
}
