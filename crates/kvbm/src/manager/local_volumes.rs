//! Volumes of the workers of this process.

use super::KvBlockManager;
use crate::volume::{LocalVolumes, VolumeSetError};
use kvbm_plan::{VolumeDescriptor, VolumeId};

/// The volumes of the workers of this process; workers elsewhere have none here.
impl<G> LocalVolumes for KvBlockManager<G> {
    #[cfg(feature = "worker")]
    fn open(&self, descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        let Some(registry) = self.workers.volumes() else { return Ok(true) };
        if registry.get(descriptor.id).is_ok_and(|known| known.descriptor() == descriptor) {
            return Ok(false);
        }
        registry.register_volume(descriptor.clone())?;
        Ok(true)
    }

    #[cfg(feature = "worker")]
    fn close(&self, id: VolumeId) {
        if let Some(registry) = self.workers.volumes() {
            // Somebody else may have taken it out.
            let _unknown = registry.unregister_volume(id);
        }
    }

    #[cfg(not(feature = "worker"))]
    fn open(&self, _descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        Ok(true)
    }

    #[cfg(not(feature = "worker"))]
    fn close(&self, _id: VolumeId) {}
}
