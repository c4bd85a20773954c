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
use kvbm_disk::{Archive, OpenError, OwnedBuffer, RecoveredSlot};
use kvbm_keys::DeploymentKey;
use kvbm_layout::{BlockLayout, CopyPlan, Selection};
use kvbm_plan::{BlockId, BlockIdentity, FileAccess};
use source::{OldRank, covering};
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

/// What became of the blocks on one of our ranks.
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
    /// Blocks of several cache groups.
    #[error(
        "its blocks are of several cache groups (model.groups), which are not divided anew among ranks: \
         start with {ranks} ranks to use them"
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
    /// Opens the directories of all ranks of a deployment, in their order. `capacity`: slots that
    /// we have; `held`: blocks that all our ranks have in them, which stay. `access`: whose files
    /// are used, and with which key they were written.
    ///
    /// # Errors
    /// A directory is missing, in use, damaged, of another key, or holds blocks of something else
    /// than `ours`, of this `namespace`.
    pub fn open(
        folders: &[Vec<PathBuf>],
        (access, key): (FileAccess, Option<&DeploymentKey>),
        namespace: [u8; 16],
        ours: &SlotGeometry,
        capacity: u32,
        held: &[(BlockId, BlockIdentity)],
    ) -> Result<Self, PredecessorError> {
        let ranks = folders.len();
        let open = |(rank, dirs): (usize, &Vec<PathBuf>)| {
            let archive = Archive::open(dirs, access, key).map_err(|source| PredecessorError::Open {
                rank,
                ranks,
                source,
            })?;
            OldRank::new(archive, namespace, ours, (rank, ranks))
                .map_err(|reason| PredecessorError::Content { rank, ranks, reason })
        };
        let ranks = folders.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        let held: HashMap<_, _> = held.iter().copied().filter(|(slot, _)| slot.0 < capacity).collect();
        let names: HashSet<Name> = held.values().map(|identity| name(identity, identity.hash)).collect();
        let (mut common, incomplete) = common(&ranks);
        common.retain(|(_, identity)| !names.contains(&name(identity, identity.hash)));
        let (chosen, orphans) = newest_chains(&common, &names, capacity as usize - held.len());
        let beyond_capacity = common.len() as u64 - orphans - chosen.len() as u64;
        let free = (0..capacity).map(BlockId).filter(|slot| !held.contains_key(slot));
        let blocks = incoming(&common, &chosen, free);
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

    /// Whether the ranks together have the part `ours` of their blocks.
    ///
    /// # Errors
    /// They have not, or not each of it once.
    pub fn covers(&self, ours: &SlotGeometry) -> Result<(), PredecessorError> {
        self.sources(ours).map(drop)
    }

    /// Writes the part `ours` of the blocks to the disk of `tier` until `deadline`. What was
    /// written is added to what opening the disk found; of that, what our other ranks do not have
    /// is released.
    ///
    /// # Errors
    /// The predecessor does not have our part of its blocks.
    pub fn take_over(
        &mut self,
        ours: &SlotGeometry,
        tier: &mut DiskTier,
        deadline: Instant,
    ) -> Result<TakenOver, PredecessorError> {
        let sources = self.sources(ours)?;
        self.release_others(tier);
        let bytes = tier.engine.info().block_bytes;
        let mut writer = Writer::new(&tier.engine, bytes);
        let mut taken = TakenOver::default();
        let longest = self.ranks.iter().map(|rank| rank.slot.bytes_per_block()).max();
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
                let mut block = OwnedBuffer::new(bytes as usize);
                let gathered = sources.iter().all(|(rank, plan)| {
                    self.ranks[*rank].gather(theirs, &identity, plan, &mut memory, block.as_mut_slice())
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

    /// Ranks that together have our part, and which bytes of theirs are which of ours.
    fn sources(&self, ours: &SlotGeometry) -> Result<Vec<(usize, CopyPlan)>, PredecessorError> {
        let ranks = self.ranks.len();
        let content = |rank, reason: String| PredecessorError::Content { rank, ranks, reason };
        let slot = ours.slot().map_err(|error| content(0, error.to_string()))?;
        let parts: Vec<_> = self.ranks.iter().map(|rank| rank.geometry.part()).collect();
        let plan = |(index, selection): (usize, Selection)| {
            let plan = CopyPlan::between(&self.ranks[index].slot, &slot, &selection);
            Ok((index, plan.map_err(|error| content(index, error.to_string()))?))
        };
        covering(&parts, &ours.part())?.into_iter().map(plan).collect()
    }
}
