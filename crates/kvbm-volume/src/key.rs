//! Which blob: the name of one rank slice of one block.

use std::fmt;

use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, NamespaceTag, RankSlice, SequenceHash};

/// The layers and heads of a block that an object holds. The whole block when it names all of the
/// model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobSlice {
    /// First layer of the model in the object.
    pub first_layer: u32,
    /// Number of layers.
    pub num_layers: u32,
    /// First KV head of the model in the object.
    pub first_head: u32,
    /// Number of heads.
    pub num_heads: u32,
}

impl From<&RankSlice> for BlobSlice {
    fn from(slice: &RankSlice) -> Self {
        Self {
            first_layer: slice.first_layer,
            num_layers: slice.num_layers,
            first_head: slice.heads.start,
            num_heads: slice.heads.count,
        }
    }
}

/// The name of an object.
///
/// The slice is named by content, not by rank, so replicated ranks name the same object and writing
/// it twice is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobKey {
    /// The namespace of the deployment that wrote the block: two models never meet in a volume.
    pub namespace: NamespaceTag,
    /// Short name of the namespace that the hash is chained in (a tenant or an adapter may have its
    /// own): what is forgotten together.
    pub label: NamespaceId,
    /// The block's cache group.
    pub group: GroupId,
    /// The block.
    pub hash: SequenceHash,
    /// The part of the block.
    pub slice: BlobSlice,
}

impl BlobKey {
    /// The key of a rank's slice of a block, in the deployment of `namespace`.
    pub fn of(namespace: NamespaceTag, identity: &BlockIdentity, slice: BlobSlice) -> Self {
        let BlockIdentity { namespace: label, group, hash, .. } = *identity;
        Self { namespace, label, group, hash, slice }
    }

    /// The object's path in a store: `NAMESPACE/LABEL/gGROUP/HH/HASH.lFIRST+COUNT.hFIRST+COUNT`,
    /// `HH` being the hash's first byte.
    ///
    /// Made of hexadecimal digits, numbers and `./+glh` only, at most 140 bytes: valid in every
    /// file system and S3.
    pub fn object_path(&self) -> String {
        let BlobSlice { first_layer, num_layers, first_head, num_heads } = self.slice;
        format!(
            "{}{:08x}/g{}/{:02x}/{}.l{first_layer}+{num_layers}.h{first_head}+{num_heads}",
            BlobScope { namespace: self.namespace, label: None }.prefix(),
            self.label.0,
            self.group,
            self.hash.as_bytes()[0],
            self.hash,
        )
    }

    /// The key whose [`object_path`](Self::object_path) is `path`; `None` for anything else that
    /// lies in a store.
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.split('/');
        let [namespace, label, group, _, name] = std::array::from_fn(|_| parts.next().unwrap_or_default());
        let (hash, slice) = name.split_once('.')?;
        let (layers, heads) = slice.strip_prefix('l')?.split_once(".h")?;
        let (first_layer, num_layers) = range(layers)?;
        let (first_head, num_heads) = range(heads)?;
        let key = Self {
            namespace: NamespaceTag::from_bytes(hex(namespace)?),
            label: NamespaceId(u32::from_str_radix(label, 16).ok()?),
            group: GroupId(group.strip_prefix('g')?.parse().ok()?),
            hash: SequenceHash::from_bytes(hex(hash)?),
            slice: BlobSlice { first_layer, num_layers, first_head, num_heads },
        };
        // Other spellings of the same numbers are no objects of ours.
        (key.object_path() == path).then_some(key)
    }
}

fn range(text: &str) -> Option<(u32, u32)> {
    let (first, count) = text.split_once('+')?;
    Some((first.parse().ok()?, count.parse().ok()?))
}

fn hex(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    (text.len() == 32).then_some(bytes)
}

/// The objects of a deployment, or of one namespace that it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobScope {
    /// The deployment's namespace.
    pub namespace: NamespaceTag,
    /// Only these blocks; all where `None`.
    pub label: Option<NamespaceId>,
}

impl BlobScope {
    /// What the paths of all its objects begin with: whole folders, with a slash at the end.
    pub fn prefix(&self) -> String {
        let label = self.label.map_or_else(String::new, |label| format!("{:08x}/", label.0));
        format!("{}/{label}", self.namespace)
    }

    /// Whether an object belongs to it.
    pub fn contains(&self, key: &BlobKey) -> bool {
        self.namespace == key.namespace && self.label.is_none_or(|label| label == key.label)
    }
}

impl fmt::Display for BlobScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix())
    }
}

impl fmt::Display for BlobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.object_path())
    }
}
