//! Objects that reads found damaged, until they are removed or written again. Other objects are
//! never removed as damaged.

use kvbm_plan::{NamespaceId, VolumeId};
use kvbm_volume::BlobKey;
use parking_lot::Mutex;
use std::collections::HashSet;

/// Objects that are remembered. What is forgotten is found to be damaged again.
const MOST: usize = 4096;

/// Damaged objects of all volumes of a worker.
#[derive(Debug, Default)]
pub(crate) struct DamagedObjects(Mutex<HashSet<(VolumeId, BlobKey)>>);

impl DamagedObjects {
    pub(crate) fn note(&self, volume: VolumeId, key: BlobKey) {
        let mut objects = self.0.lock();
        if objects.len() >= MOST && !objects.contains(&(volume, key)) {
            // What is new is what somebody is about to have removed.
            objects.clear();
        }
        objects.insert((volume, key));
    }

    /// Whether one of these was found damaged; they are forgotten.
    pub(crate) fn take(&self, volume: VolumeId, keys: &[BlobKey]) -> bool {
        let mut objects = self.0.lock();
        keys.iter().filter(|key| objects.remove(&(volume, **key))).count() > 0
    }

    /// A namespace, or everything of the model, was removed from the volume.
    pub(crate) fn purged(&self, volume: VolumeId, namespace: Option<NamespaceId>) {
        let stays = |of: &BlobKey| namespace.is_some_and(|purged| purged != of.label);
        self.0.lock().retain(|(at, key)| *at != volume || stays(key));
    }

    /// The volume is closed: another place may get its id.
    pub(crate) fn closed(&self, volume: VolumeId) {
        self.purged(volume, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceTag, SequenceHash};
    use kvbm_volume::BlobSlice;

    fn key(label: u32, number: u32) -> BlobKey {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlobKey {
            namespace: NamespaceTag::from_bytes([1; 16]),
            label: NamespaceId(label),
            group: GroupId(0),
            hash: SequenceHash::from_bytes(bytes),
            slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
        }
    }

    #[test]
    fn what_is_new_is_noted_however_much_there_was() {
        let (damaged, volume) = (DamagedObjects::default(), VolumeId(3));
        for number in 0..MOST as u32 {
            damaged.note(volume, key(1, number));
        }
        damaged.note(volume, key(1, 7));
        assert!(damaged.take(volume, &[key(1, 0)]), "known already: nothing is forgotten for it");
        damaged.note(volume, key(1, 0));
        let new = key(1, MOST as u32);
        damaged.note(volume, new);
        assert!(!damaged.take(VolumeId(4), &[new]) && damaged.take(volume, &[new]));
        assert!(!damaged.take(volume, &[new, key(1, 7)]));
    }

    #[test]
    fn what_is_removed_is_forgotten() {
        let damaged = DamagedObjects::default();
        for (volume, label) in [(1, 5), (1, 6), (2, 5)] {
            damaged.note(VolumeId(volume), key(label, 0));
        }
        damaged.purged(VolumeId(1), Some(NamespaceId(5)));
        assert!(!damaged.take(VolumeId(1), &[key(5, 0)]));
        damaged.closed(VolumeId(2));
        assert!(!damaged.take(VolumeId(2), &[key(5, 0)]));
        assert!(damaged.take(VolumeId(1), &[key(6, 0)]));
    }
}
