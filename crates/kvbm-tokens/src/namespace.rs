//! What must be equal for two blocks of the same tokens to be interchangeable.

use std::fmt;

use crate::{BlockHasher, HashAlgorithm, NamespaceTag};

/// BLAKE3 derive-key context of namespace tags; changes with the encoding.
const CONTEXT: &str = "kvbm 2026-11 namespace tag v1";

/// The largest `page_size`: far above what engines use, and small enough for every stride
/// computation.
const MAX_PAGE_SIZE: u32 = 1 << 20;

/// The start of every chain of block hashes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ChainRoot {
    /// The same in every process: hashes can be stored and shared. The default.
    #[default]
    Fixed,
    /// An engine's own root that is the same in every process (for example a configured hash seed).
    External(Vec<u8>),
    /// An engine's root that changes with every process (for example a random hash seed): its
    /// hashes mean nothing to another process, so this namespace refuses persistence.
    PerProcess(Vec<u8>),
}

/// Everything beside the tokens that decides a block's KV, and so its identity: build it up, then
/// call [`hasher`](Self::hasher).
///
/// Tensor- and pipeline-parallel sizes, layout, axis order and rank are *placement* and do not
/// belong here.
///
/// The [tag](Self::tag) is the first 16 bytes of BLAKE3 in derive-key mode (context
/// `kvbm 2026-11 namespace tag v1`) over all fields in the order of the methods below. Each is
/// written as a length (u64 little-endian) and its bytes; an absent optional field as the length
/// 2^64 - 1 alone. So no two namespaces share an encoding.
#[derive(Clone, PartialEq, Eq)]
pub struct Namespace {
    model: String,
    weights: String,
    dtype: String,
    page_size: Option<u32>,
    rope_scaling: Option<String>,
    kv_quantization: Option<String>,
    adapter: Option<String>,
    tenant_salt: Option<Vec<u8>>,
    algorithm: HashAlgorithm,
    chain_root: ChainRoot,
    deployment_secret: Option<Vec<u8>>,
    flat: bool,
}

/// A namespace that cannot be used for hashing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// The model id is empty, so blocks of different models could meet.
    #[error("namespace: the model id is empty; give the name under which the model is served")]
    EmptyModel,
    /// No page size was given.
    #[error("namespace of model {model:?}: page_size is not set; call page_size(tokens per block)")]
    NoPageSize {
        /// The model id.
        model: String,
    },
    /// The page size is zero or absurd.
    #[error(
        "namespace of model {model:?}: page_size {value} is not in 1..={MAX_PAGE_SIZE} tokens; set the engine's block size"
    )]
    PageSize {
        /// The model id.
        model: String,
        /// The value refused.
        value: u32,
    },
}

/// Hashes of this namespace mean nothing to another process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "namespace of model {model:?}: its chain root changes with every process, so its blocks cannot be stored or shared; \
     give the engine a fixed hash seed and use ChainRoot::External, or do without disk, volumes and peers"
)]
pub struct NotPersistable {
    /// The model id.
    pub model: String,
}

impl Namespace {
    /// The namespace of a model id, as it is served.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            weights: String::new(),
            dtype: String::new(),
            page_size: None,
            rope_scaling: None,
            kv_quantization: None,
            adapter: None,
            tenant_salt: None,
            algorithm: HashAlgorithm::default(),
            chain_root: ChainRoot::default(),
            deployment_secret: None,
            flat: false,
        }
    }

    /// Version of the weights: change it with every update of the model, or old KV is served to new
    /// weights.
    #[must_use]
    pub fn weights(mut self, version: impl Into<String>) -> Self {
        self.weights = version.into();
        self
    }

    /// Element type of the KV cache, such as `bf16`.
    #[must_use]
    pub fn dtype(mut self, dtype: impl Into<String>) -> Self {
        self.dtype = dtype.into();
        self
    }

    /// Tokens per block.
    #[must_use]
    pub fn page_size(mut self, tokens: u32) -> Self {
        self.page_size = Some(tokens);
        self
    }

    /// `RoPE` scaling in effect, in any fixed spelling.
    #[must_use]
    pub fn rope_scaling(mut self, scaling: impl Into<String>) -> Self {
        self.rope_scaling = Some(scaling.into());
        self
    }

    /// Quantisation of the KV cache, in any fixed spelling.
    #[must_use]
    pub fn kv_quantization(mut self, scheme: impl Into<String>) -> Self {
        self.kv_quantization = Some(scheme.into());
        self
    }

    /// Adapter (`LoRA`) with its version.
    #[must_use]
    pub fn adapter(mut self, adapter: impl Into<String>) -> Self {
        self.adapter = Some(adapter.into());
        self
    }

    /// Keeps a tenant's blocks apart from those of all others.
    #[must_use]
    pub fn tenant_salt(mut self, salt: impl Into<Vec<u8>>) -> Self {
        self.tenant_salt = Some(salt.into());
        self
    }

    /// The part of this namespace that is one tenant's of several: `name` is its tenant salt,
    /// behind that of the namespace and "/" where it has one. A name without "/" is never taken for
    /// another.
    #[must_use]
    pub fn tenant(self, name: &str) -> Self {
        let salt = match &self.tenant_salt {
            Some(salt) => [salt, b"/".as_slice(), name.as_bytes()].concat(),
            None => name.as_bytes().to_vec(),
        };
        self.tenant_salt(salt)
    }

    /// How block hashes are computed.
    #[must_use]
    pub fn algorithm(mut self, algorithm: HashAlgorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Where the chains begin.
    #[must_use]
    pub fn chain_root(mut self, root: ChainRoot) -> Self {
        self.chain_root = root;
        self
    }

    /// A secret of the deployment: who does not know it cannot compute which hash a guessed prompt
    /// has, and cannot sign blocks. Give random bytes, 16 or more.
    #[must_use]
    pub fn deployment_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.deployment_secret = Some(secret.into());
        self
    }

    /// The deployment's secret, if there is one.
    pub fn secret(&self) -> Option<&[u8]> {
        self.deployment_secret.as_deref()
    }

    /// Blocks have no parents: each is a key of its own. For key-value hosts, which store and ask
    /// for any part of a sequence. Eviction may then take any block, and no block needs another.
    ///
    /// A part of the identity: such blocks never meet those of a namespace with parents. In the
    /// encoding of the tag it is a last field `flat`, which is left out otherwise.
    #[must_use]
    pub fn flat(mut self) -> Self {
        self.flat = true;
        self
    }

    /// Whether blocks have no parents.
    pub fn is_flat(&self) -> bool {
        self.flat
    }

    /// The model id.
    pub fn model_id(&self) -> &str {
        &self.model
    }

    /// The page size, if one was set.
    pub fn tokens_per_block(&self) -> Option<u32> {
        self.page_size
    }

    /// Whether hashes of this namespace mean anything to another process.
    pub fn is_persistable(&self) -> bool {
        !matches!(self.chain_root, ChainRoot::PerProcess(_))
    }

    /// An error if blocks of this namespace must not be stored or shared. Disk, volumes and peers
    /// call it first.
    pub fn check_persistable(&self) -> Result<(), NotPersistable> {
        if self.is_persistable() { Ok(()) } else { Err(NotPersistable { model: self.model.clone() }) }
    }

    /// What to hash blocks with.
    pub fn hasher(&self) -> Result<BlockHasher, NamespaceError> {
        if self.model.is_empty() {
            return Err(NamespaceError::EmptyModel);
        }
        let page_size =
            self.page_size.ok_or_else(|| NamespaceError::NoPageSize { model: self.model.clone() })?;
        if !(1..=MAX_PAGE_SIZE).contains(&page_size) {
            return Err(NamespaceError::PageSize { model: self.model.clone(), value: page_size });
        }
        Ok(BlockHasher::new(self.tag(), page_size, self.algorithm, self.is_persistable(), self.flat))
    }

    /// The namespace's 16 bytes in every block identity; see the type's documentation for the
    /// encoding.
    pub fn tag(&self) -> NamespaceTag {
        let mut encoder = Encoder(blake3::Hasher::new_derive_key(CONTEXT));
        encoder.field(Some(self.model.as_bytes()));
        encoder.field(Some(self.weights.as_bytes()));
        encoder.field(Some(self.dtype.as_bytes()));
        encoder.field(self.page_size.map(u32::to_le_bytes).as_ref().map(<[u8; 4]>::as_slice));
        encoder.field(self.rope_scaling.as_deref().map(str::as_bytes));
        encoder.field(self.kv_quantization.as_deref().map(str::as_bytes));
        encoder.field(self.adapter.as_deref().map(str::as_bytes));
        encoder.field(self.tenant_salt.as_deref());
        encoder.field(Some(match self.algorithm {
            HashAlgorithm::Blake3 => b"blake3".as_slice(),
            HashAlgorithm::Xxh3_128 => b"xxh3-128",
        }));
        let (kind, root): (&[u8], _) = match &self.chain_root {
            ChainRoot::Fixed => (b"fixed", None),
            ChainRoot::External(root) => (b"external", Some(root.as_slice())),
            ChainRoot::PerProcess(root) => (b"per-process", Some(root.as_slice())),
        };
        encoder.field(Some(kind));
        encoder.field(root);
        encoder.field(self.deployment_secret.as_deref());
        if self.flat {
            encoder.field(Some(b"flat"));
        }
        encoder.finish()
    }
}

struct Encoder(blake3::Hasher);

impl Encoder {
    fn field(&mut self, bytes: Option<&[u8]>) {
        let length = bytes.map_or(u64::MAX, |bytes| bytes.len() as u64);
        self.0.update(&length.to_le_bytes());
        self.0.update(bytes.unwrap_or_default());
    }

    fn finish(self) -> NamespaceTag {
        let mut tag = [0; 16];
        tag.copy_from_slice(&self.0.finalize().as_bytes()[..16]);
        NamespaceTag::from_bytes(tag)
    }
}

impl fmt::Debug for Namespace {
    /// Salt and secret are left out: namespaces get logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace")
            .field("model", &self.model)
            .field("weights", &self.weights)
            .field("dtype", &self.dtype)
            .field("page_size", &self.page_size)
            .field("rope_scaling", &self.rope_scaling)
            .field("kv_quantization", &self.kv_quantization)
            .field("adapter", &self.adapter)
            .field("algorithm", &self.algorithm)
            .field("flat", &self.flat)
            .field("tag", &self.tag())
            .finish_non_exhaustive()
    }
}
