//! Answers to requests of the leader about volumes besides transfers: probe, list, remove, open
//! and close.

use crate::config::VolumeTier;
use crate::cuts::{Cut, group_of, owns};
use crate::damaged_objects::DamagedObjects;
use crate::execute::failure_of;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{
    BlockIdentity, Failure, FailureKind, KeyNotice, NamespaceId, NamespaceTag, StoredBlock, VolumeAnswer,
    VolumeId, VolumeRequest, clock, deadline_after,
};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, DestroyedKey, RegistryError, Volume, VolumeDescriptor, VolumeError,
    VolumeKeysError,
};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Who waits for an answer.
pub(crate) trait Asker {
    /// Whether it waits no more: what takes long may end.
    fn is_closing(&self) -> bool;

    /// Data keys of a volume were destroyed, or could not be.
    fn keys_destroyed(&self, volume: VolumeId, keys: &[KeyNotice]);
}

/// See the module.
pub(crate) struct VolumeAnswers {
    tier: VolumeTier,
    /// By cache group.
    cuts: Vec<Vec<Cut>>,
    damaged: Arc<DamagedObjects>,
    /// Volumes that were opened here because the leader asked for them. The leader may close only
    /// these. Ranks of one process share their volumes, so one of them closes what one of them
    /// opened.
    taken: Mutex<BTreeSet<VolumeId>>,
    namespace: NamespaceTag,
    /// Objects that are listed and deleted at a time.
    page: usize,
}

impl VolumeAnswers {
    /// `cuts`: as [`readable_cuts`](crate::execute::readable_cuts) has them. `page`: objects that
    /// are listed and deleted at a time.
    pub(crate) fn new(
        tier: VolumeTier,
        cuts: Vec<Vec<Cut>>,
        damaged: Arc<DamagedObjects>,
        namespace: NamespaceTag,
        page: usize,
    ) -> Self {
        Self { tier, cuts, damaged, taken: Mutex::default(), namespace, page }
    }

    /// Does what a request says.
    pub(crate) fn answer(
        &self,
        volume: VolumeId,
        request: &VolumeRequest,
        asker: &dyn Asker,
    ) -> Result<VolumeAnswer, Failure> {
        let unknown = |error: RegistryError| Failure::new(FailureKind::Unsupported, error.to_string());
        match request {
            VolumeRequest::Register(place) => {
                if self.open(&place.clone().describe(volume))? {
                    self.taken.lock().insert(volume);
                }
                return Ok(VolumeAnswer::Done);
            }
            VolumeRequest::Unregister => {
                // What somebody else has opened stays open.
                if self.taken.lock().remove(&volume) {
                    // Where somebody else was faster, it is closed as well.
                    let _closed = self.tier.registry.unregister_volume(volume);
                }
                self.damaged.closed(volume);
                return Ok(VolumeAnswer::Done);
            }
            _ => {}
        }
        let volume = self.tier.registry.get(volume).map_err(unknown)?;
        match request {
            // Above.
            VolumeRequest::Register(_) | VolumeRequest::Unregister => Ok(VolumeAnswer::Done),
            VolumeRequest::Probe(blocks) => {
                let present = self.present(&*volume, blocks);
                present.map(VolumeAnswer::Present).map_err(|error| failure_of(&error))
            }
            VolumeRequest::List(after) => {
                self.list(&*volume, after.as_ref(), asker).map(VolumeAnswer::Listed)
            }
            VolumeRequest::DiscardDamaged(blocks) => {
                self.discard_damaged(&*volume, blocks).map(VolumeAnswer::Removed)
            }
            VolumeRequest::Discard(_) | VolumeRequest::Purge(_) if !self.tier.writes => {
                Ok(VolumeAnswer::Removed(0))
            }
            VolumeRequest::Discard(blocks) => self.discard(&*volume, blocks).map(VolumeAnswer::Removed),
            VolumeRequest::Purge(label) => self.purge(&*volume, *label, asker).map(VolumeAnswer::Removed),
        }
    }

    /// Opens a volume, unless it is open as this one: ranks of one process share their volumes.
    /// Whether it was closed.
    fn open(&self, descriptor: &VolumeDescriptor) -> Result<bool, Failure> {
        let is_open =
            || self.tier.registry.get(descriptor.id).is_ok_and(|volume| volume.descriptor() == descriptor);
        if is_open() {
            return Ok(false);
        }
        match self.tier.registry.register_volume(descriptor.clone()) {
            Ok(_) => Ok(true),
            Err(RegistryError::Duplicate { .. }) if is_open() => Ok(false),
            // It may be there later.
            Err(error) if is_store_failure(&error) => Err(Failure::new(FailureKind::Io, error.to_string())),
            Err(error) => Err(Failure::new(FailureKind::Unsupported, error.to_string())),
        }
    }

    fn key(&self, identity: &BlockIdentity, slice: BlobSlice) -> BlobKey {
        BlobKey::of(self.namespace, identity, slice)
    }

    /// All cuts of a block; none of a group that the model has not.
    fn cuts_of(&self, identity: &BlockIdentity) -> &[Cut] {
        self.cuts.get(usize::from(identity.group.0)).map_or(&[], Vec::as_slice)
    }

    /// Which blocks are there, in any cut that we can read: by its first object.
    fn present(&self, volume: &dyn Volume, blocks: &[BlockIdentity]) -> Result<Vec<bool>, VolumeError> {
        let mut there = vec![false; blocks.len()];
        for cut in 0..self.cuts.iter().map(Vec::len).max().unwrap_or(0) {
            let first = |at: usize| {
                let part = self.cuts_of(&blocks[at]).get(cut)?.parts.first()?;
                Some((at, self.key(&blocks[at], part.slice)))
            };
            let missing = (0..blocks.len()).filter(|&at| !there[at]).filter_map(first);
            let (missing, keys): (Vec<usize>, Vec<BlobKey>) = missing.unzip();
            if keys.is_empty() {
                break;
            }
            for (at, found) in missing.into_iter().zip(volume.exists(&keys, deadline(volume))) {
                there[at] = found?;
            }
        }
        Ok(there)
    }

    /// Removes our objects of these blocks; where there is none, those of other cuts that we could
    /// have read.
    fn discard(&self, volume: &dyn Volume, blocks: &[BlockIdentity]) -> Result<u64, Failure> {
        // Nothing is there of groups that the model has not.
        let own = |identity: &BlockIdentity| {
            let group = group_of(&self.tier, identity.group)?;
            Some((*identity, self.key(identity, group.slice)))
        };
        let (blocks, keys): (Vec<BlockIdentity>, Vec<BlobKey>) = blocks.iter().filter_map(own).unzip();
        let results = volume.delete(&keys, deadline(volume));
        let others = |identity: &BlockIdentity| {
            let parts = self.cuts_of(identity).iter().skip(1).flat_map(|cut| &cut.parts);
            parts.map(|part| self.key(identity, part.slice)).collect::<Vec<_>>()
        };
        let missing = blocks.iter().zip(&results).filter(|(_, result)| matches!(result, Ok(false)));
        let elsewhere: Vec<BlobKey> = missing.flat_map(|(identity, _)| others(identity)).collect();
        self.damaged.take(volume.descriptor().id, &keys);
        let removed = count(results);
        self.damaged.take(volume.descriptor().id, &elsewhere);
        let removed_elsewhere = count(volume.delete(&elsewhere, deadline(volume)));
        Ok(removed? + removed_elsewhere?)
    }

    /// Removes what our reads found damaged of these blocks, with what of the same cut we would
    /// have read beside it; other cuts stay.
    fn discard_damaged(&self, volume: &dyn Volume, blocks: &[BlockIdentity]) -> Result<u64, Failure> {
        let mut doomed = Vec::new();
        for identity in blocks {
            for cut in self.cuts_of(identity) {
                let objects: Vec<_> = cut.parts.iter().map(|part| self.key(identity, part.slice)).collect();
                if self.damaged.take(volume.descriptor().id, &objects) {
                    doomed.extend(objects);
                }
            }
        }
        count(volume.delete(&doomed, deadline(volume)))
    }

    /// The next blocks that are there, by objects that are this rank's to remove; none at the end.
    fn list(
        &self,
        volume: &dyn Volume,
        after: Option<&StoredBlock>,
        asker: &dyn Asker,
    ) -> Result<Vec<StoredBlock>, Failure> {
        let scope = BlobScope { namespace: self.namespace, label: None };
        // The last name that an object of the block could have.
        let last = BlobSlice { first_layer: u32::MAX, num_layers: 0, first_head: 0, num_heads: 0 };
        let name = |block: &StoredBlock| BlobKey {
            namespace: self.namespace,
            label: block.namespace,
            group: block.group,
            hash: block.hash,
            slice: last,
        };
        let mut from = after.map(name);
        loop {
            let page = volume.list(&scope, from.as_ref(), self.page, deadline(volume));
            let page = page.map_err(|error| failure_of(&error))?;
            let ours = page.iter().filter(|key| owns(&self.tier, key));
            let mut blocks: Vec<StoredBlock> = ours
                .map(|key| StoredBlock { namespace: key.label, group: key.group, hash: key.hash })
                .filter(|block| Some(block) != after)
                .collect();
            blocks.dedup();
            if !blocks.is_empty() || page.len() < self.page || asker.is_closing() {
                return Ok(blocks);
            }
            from = page.last().copied();
        }
    }

    /// Removes the objects of a namespace that are this rank's to remove, page by page.
    fn purge(
        &self,
        volume: &dyn Volume,
        label: Option<NamespaceId>,
        asker: &dyn Asker,
    ) -> Result<u64, Failure> {
        if let Some(label) = label {
            // First of all: without them nobody can read what is there, copies included.
            destroy_keys(volume, label, asker)?;
        }
        let scope = BlobScope { namespace: self.namespace, label };
        let (mut removed, mut after) = (0, None);
        loop {
            let page = volume
                .list(&scope, after.as_ref(), self.page, deadline(volume))
                .map_err(|error| failure_of(&error))?;
            if page.len() < self.page && planted(Planted::SkipLastPage) {
                return Ok(removed);
            }
            let ours: Vec<BlobKey> = page.iter().filter(|key| owns(&self.tier, key)).copied().collect();
            removed += count(volume.delete(&ours, deadline(volume)))?;
            after = page.last().copied();
            if page.len() < self.page {
                self.damaged.purged(volume.descriptor().id, label);
                return Ok(removed);
            }
            if asker.is_closing() {
                return Err(Failure::new(
                    FailureKind::ShuttingDown,
                    "the worker shut down during the removal",
                ));
            }
        }
    }
}

/// Destroys the data keys of a namespace, where objects are encrypted, and tells the leader which.
fn destroy_keys(volume: &dyn Volume, label: NamespaceId, asker: &dyn Asker) -> Result<(), Failure> {
    let results = volume.destroy_keys(label, deadline(volume)).map_err(|error| failure_of(&error))?;
    let notice = |(id, result): &DestroyedKey| KeyNotice {
        namespace: label,
        id: *id.as_bytes(),
        is_destroyed: result.is_ok(),
    };
    let notices: Vec<_> = results.iter().map(notice).collect();
    asker.keys_destroyed(volume.descriptor().id, &notices);
    results.into_iter().try_for_each(|(_, result)| result.map_err(|error| failure_of(&error)))
}

/// Whether the store behind a volume could not be used, and nothing is wrong with what it was asked
/// for.
fn is_store_failure(error: &RegistryError) -> bool {
    match error {
        RegistryError::Open { .. } => true,
        RegistryError::Keys { source, .. } => matches!(**source, VolumeKeysError::Store(_)),
        _ => false,
    }
}

fn deadline(volume: &dyn Volume) -> Instant {
    deadline_after(clock::now(), volume.descriptor().deadline)
}

/// How many there were, or the first failure.
fn count(deleted: Vec<Result<bool, VolumeError>>) -> Result<u64, Failure> {
    let mut removed = 0;
    for result in deleted {
        removed += u64::from(result.map_err(|error| failure_of(&error))?);
    }
    Ok(removed)
}
