//! The volumes that a worker knows.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use kvbm_plan::{NamespaceTag, VolumeId, shown_uri};
use parking_lot::RwLock;

use crate::data_keys::refuse_encrypted;
use crate::volume::check;
use crate::{
    DirectoryVolume, EncryptedVolume, LossyTerms, MemoryVolume, RegistryError, Volume, VolumeCompression,
    VolumeDescriptor, VolumeEncryption,
};

/// Makes a volume of the store that a descriptor's URI names. It must not create, mount or format
/// that store.
pub type OpenVolume = Box<dyn Fn(VolumeDescriptor) -> Result<Arc<dyn Volume>, RegistryError> + Send + Sync>;

/// How the objects of a deployment lie on its volumes.
#[derive(Clone, Debug)]
pub struct VolumeTerms {
    /// The deployment's namespace.
    pub namespace: NamespaceTag,
    /// Encrypted so; not encrypted where `None`.
    pub encryption: Option<VolumeEncryption>,
    /// Whether they are compressed. Without the feature `compress` they are not.
    pub compression: VolumeCompression,
    /// Shortened with loss so; exact where `None`. It belongs to what the namespace stands for.
    pub lossy: Option<LossyTerms>,
}

/// Volumes by id. Unregistering one does not disturb operations in progress: they hold it.
pub struct VolumeRegistry {
    schemes: HashMap<String, OpenVolume>,
    terms: Option<VolumeTerms>,
    volumes: RwLock<BTreeMap<VolumeId, Arc<dyn Volume>>>,
}

impl VolumeRegistry {
    /// An empty registry that opens `dir:` and `file:` (or a bare path) and `memory:` URIs, and
    /// `s3:` with the feature `s3`.
    pub fn new() -> Self {
        let registry = Self { schemes: HashMap::new(), terms: None, volumes: RwLock::default() };
        let registry = registry
            .with_scheme("dir", Box::new(|descriptor| Ok(Arc::new(DirectoryVolume::open(descriptor)?))))
            .with_scheme("file", Box::new(|descriptor| Ok(Arc::new(DirectoryVolume::open(descriptor)?))))
            .with_scheme("memory", Box::new(|descriptor| Ok(Arc::new(MemoryVolume::open(descriptor)?))));
        #[cfg(feature = "s3")]
        let registry = registry
            .with_scheme("s3", Box::new(|descriptor| Ok(Arc::new(crate::S3Volume::open(descriptor)?))));
        registry
    }

    /// Adds an implementation: URIs that begin with `scheme:` are opened by it.
    #[must_use]
    pub fn with_scheme(mut self, scheme: &str, open: OpenVolume) -> Self {
        self.schemes.insert(scheme.to_owned(), open);
        self
    }

    /// Serves one deployment alone: volumes that are registered by now or later encrypt its
    /// objects, or have none that are encrypted.
    ///
    /// # Errors
    /// [`RegistryError::Keys`]: a volume that is registered has other objects.
    pub fn for_deployment(mut self, terms: VolumeTerms) -> Result<Self, RegistryError> {
        self.terms = Some(terms);
        let registered = std::mem::take(self.volumes.get_mut());
        for volume in registered.into_values() {
            self.register(volume)?;
        }
        Ok(self)
    }

    /// Opens the volume that the descriptor names, and makes it known.
    ///
    /// # Errors
    /// [`RegistryError`]: the id is taken, nobody knows the scheme, a field of the descriptor
    /// cannot be, or the store cannot be opened. Nothing changed.
    pub fn register_volume(&self, descriptor: VolumeDescriptor) -> Result<Arc<dyn Volume>, RegistryError> {
        // Before opening: a duplicate should cost nothing, and who opens it need not know the
        // rules.
        self.check_free(&descriptor)?;
        check(&descriptor)?;
        let scheme = scheme_of(&descriptor.uri).and_then(|scheme| self.schemes.get(scheme));
        let Some(open) = scheme else {
            let mut known: Vec<String> = self.schemes.keys().cloned().collect();
            known.sort_unstable();
            return Err(RegistryError::Scheme { id: descriptor.id, uri: shown_uri(&descriptor.uri), known });
        };
        self.adopt(open(descriptor)?)
    }

    /// Makes a volume known that the caller opened.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`]: the id is taken. [`RegistryError::Keys`]: the deployment's
    /// objects there are encrypted in another way.
    pub fn register(&self, volume: Arc<dyn Volume>) -> Result<(), RegistryError> {
        self.check_free(volume.descriptor())?;
        self.adopt(volume).map(drop)
    }

    /// The volume as the deployment uses it.
    fn adopt(&self, volume: Arc<dyn Volume>) -> Result<Arc<dyn Volume>, RegistryError> {
        let descriptor = volume.descriptor();
        let (id, uri) = (descriptor.id, shown_uri(&descriptor.uri));
        let other_keys = |source| RegistryError::Keys { id, uri, source: Box::new(source) };
        let volume: Arc<dyn Volume> = match self.terms.clone() {
            None => volume,
            Some(VolumeTerms { namespace, encryption: None, compression, lossy }) => {
                refuse_encrypted(&*volume, namespace).map_err(other_keys)?;
                compressed(volume, compression, lossy)
            }
            Some(VolumeTerms { namespace, encryption: Some(encryption), compression, lossy }) => {
                let encrypted = EncryptedVolume::open(volume, namespace, encryption).map_err(other_keys)?;
                compressed(Arc::new(encrypted), compression, lossy)
            }
        };
        let mut volumes = self.volumes.write();
        if let Some(other) = volumes.get(&id) {
            return Err(RegistryError::Duplicate { id, uri: shown_uri(&other.descriptor().uri) });
        }
        volumes.insert(id, Arc::clone(&volume));
        Ok(volume)
    }

    /// Forgets a volume and gives it back. Its objects stay.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], with the ids that there are.
    pub fn unregister_volume(&self, id: VolumeId) -> Result<Arc<dyn Volume>, RegistryError> {
        let removed = self.volumes.write().remove(&id);
        removed.ok_or_else(|| self.unknown(id))
    }

    /// A registered volume.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`], with the ids that there are.
    pub fn get(&self, id: VolumeId) -> Result<Arc<dyn Volume>, RegistryError> {
        let found = self.volumes.read().get(&id).cloned();
        found.ok_or_else(|| self.unknown(id))
    }

    /// How many are registered.
    pub fn len(&self) -> usize {
        self.volumes.read().len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Descriptors of all registered volumes, by id.
    pub fn descriptors(&self) -> Vec<VolumeDescriptor> {
        self.volumes.read().values().map(|volume| volume.descriptor().clone()).collect()
    }

    fn check_free(&self, descriptor: &VolumeDescriptor) -> Result<(), RegistryError> {
        match self.volumes.read().get(&descriptor.id) {
            Some(other) => {
                Err(RegistryError::Duplicate { id: descriptor.id, uri: shown_uri(&other.descriptor().uri) })
            }
            None => Ok(()),
        }
    }

    fn unknown(&self, id: VolumeId) -> RegistryError {
        RegistryError::Unknown { id, known: self.volumes.read().keys().copied().collect() }
    }
}

impl Default for VolumeRegistry {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for VolumeRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VolumeRegistry").field(&self.descriptors()).finish()
    }
}

/// The volume with compressed objects, which are read also where none are written.
#[cfg(feature = "compress")]
fn compressed(
    volume: Arc<dyn Volume>,
    compression: VolumeCompression,
    lossy: Option<LossyTerms>,
) -> Arc<dyn Volume> {
    let volume = crate::CompressedVolume::new(volume, compression);
    Arc::new(if let Some(lossy) = lossy { volume.with_lossy(&lossy) } else { volume })
}

#[cfg(not(feature = "compress"))]
fn compressed(volume: Arc<dyn Volume>, _: VolumeCompression, _: Option<LossyTerms>) -> Arc<dyn Volume> {
    volume
}

/// The URI's scheme; a path is a file. Not `None` but for an empty URI.
fn scheme_of(uri: &str) -> Option<&str> {
    if uri.is_empty() {
        return None;
    }
    if uri.starts_with(['/', '.']) {
        return Some("file");
    }
    uri.split_once(':').map_or(Some("file"), |(scheme, _)| Some(scheme))
}
