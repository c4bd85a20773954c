//! `Namespace`, `TokenSequence` and `ExternalSequence`.

use crate::config::Config;
use crate::errors::{Error, Kind, Result};
use crate::integers::u32s;
use kvbm::config::NamespaceConfig;
use kvbm::tokens::{self, ChainRoot, ExtraKey, HashAlgorithm};
use kvbm::{BlockChain, SequenceHash};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyBytesMethods};

/// What must be equal, beside the tokens, for two blocks to be the same: model, weights, dtype,
/// page size, adapter, tenant. Blocks of different namespaces never meet.
#[pyclass(module = "kvbm_rs", frozen, eq)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) inner: kvbm::Namespace,
}

impl Namespace {
    /// This namespace with what an operator may add to it: a version of the weights, a tenant's
    /// salt, the secret of the deployment. The engine decides the rest.
    ///
    /// # Errors
    /// Another setting of `[namespace]` that is not the default.
    pub(crate) fn with_settings(&self, settings: &NamespaceConfig) -> Result<kvbm::Namespace> {
        let rest = NamespaceConfig {
            // The engine's model counts, whatever name a file has for it.
            model: String::new(),
            weights: String::new(),
            tenant_salt: None,
            deployment_secret: None,
            ..settings.clone()
        };
        if rest != NamespaceConfig::default() {
            let text = "namespace: the engine defines what its blocks hold; only weights, tenant_salt and \
                        deployment_secret can be set beside it: leave the others out";
            return Err(Error::new(Kind::Config, text));
        }
        let mut namespace = self.inner.clone();
        if !settings.weights.is_empty() {
            namespace = namespace.weights(settings.weights.as_str());
        }
        if let Some(salt) = &settings.tenant_salt {
            namespace = namespace.tenant_salt(salt.expose());
        }
        if let Some(secret) = &settings.deployment_secret {
            namespace = namespace.deployment_secret(secret.expose());
        }
        Ok(namespace)
    }
}

#[pymethods]
impl Namespace {
    /// `chain_root`: bytes of an engine that hashes itself. `persistent=False` says that they
    /// change with each process; such a namespace refuses a disk and volumes. `flat`: blocks have
    /// no parents, each is a key of its own, for engines that store and ask by keys.
    #[new]
    #[pyo3(signature = (model, *, weights = "", dtype = "", page_size = 16, rope_scaling = None, kv_quantization = None,
        adapter = None, tenant_salt = None, algorithm = "blake3", chain_root = None, persistent = true,
        deployment_secret = None, flat = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        model: &str,
        weights: &str,
        dtype: &str,
        page_size: u32,
        rope_scaling: Option<&str>,
        kv_quantization: Option<&str>,
        adapter: Option<&str>,
        tenant_salt: Option<&[u8]>,
        algorithm: &str,
        chain_root: Option<&[u8]>,
        persistent: bool,
        deployment_secret: Option<&[u8]>,
        flat: bool,
    ) -> Result<Self> {
        let algorithm = match algorithm {
            "blake3" => HashAlgorithm::Blake3,
            "xxh3-128" => HashAlgorithm::Xxh3_128,
            other => {
                let text = format!("algorithm {other:?} is not known: give \"blake3\" or \"xxh3-128\"");
                return Err(Error::argument(text));
            }
        };
        let root = match (chain_root, persistent) {
            (None, true) => ChainRoot::Fixed,
            (None, false) => {
                return Err(Error::argument("persistent=False without a chain_root: give the engine's root"));
            }
            (Some(root), true) => ChainRoot::External(root.to_vec()),
            (Some(root), false) => ChainRoot::PerProcess(root.to_vec()),
        };
        let mut inner = kvbm::Namespace::new(model)
            .weights(weights)
            .dtype(dtype)
            .page_size(page_size)
            .algorithm(algorithm)
            .chain_root(root);
        if let Some(scaling) = rope_scaling {
            inner = inner.rope_scaling(scaling);
        }
        if let Some(scheme) = kv_quantization {
            inner = inner.kv_quantization(scheme);
        }
        if let Some(adapter) = adapter {
            inner = inner.adapter(adapter);
        }
        if let Some(salt) = tenant_salt {
            inner = inner.tenant_salt(salt);
        }
        if let Some(secret) = deployment_secret {
            inner = inner.deployment_secret(secret);
        }
        if flat {
            inner = inner.flat();
        }
        inner.hasher()?;
        Ok(Self { inner })
    }

    /// The same with an adapter, such as `LoRA`: its name and what it holds, in any fixed spelling.
    fn with_adapter(&self, adapter: &str) -> Self {
        Self { inner: self.inner.clone().adapter(adapter) }
    }

    /// The same with what an operator adds in `[namespace]` of `config`: `weights`, `tenant_salt`
    /// and `deployment_secret`. Any other setting there is an error. A manager does it by itself.
    fn with_config(&self, config: &Config) -> Result<Self> {
        Ok(Self { inner: self.with_settings(&config.settings.namespace)? })
    }

    /// The 16 bytes that stand for the namespace in every block's identity.
    #[getter]
    fn tag<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.tag().as_bytes())
    }

    /// The model id.
    #[getter]
    fn model(&self) -> &str {
        self.inner.model_id()
    }

    /// Tokens of a block.
    #[getter]
    fn page_size(&self) -> u32 {
        self.inner.tokens_per_block().unwrap_or_default()
    }

    /// Whether blocks have no parents.
    #[getter]
    fn flat(&self) -> bool {
        self.inner.is_flat()
    }

    /// Whether its hashes mean anything to another process.
    #[getter]
    fn persistent(&self) -> bool {
        self.inner.is_persistable()
    }

    fn __repr__(&self) -> String {
        format!("Namespace({:?}, tag={})", self.inner.model_id(), self.inner.tag())
    }
}

/// The tokens of a request and the hashes of its blocks.
#[pyclass(module = "kvbm_rs")]
pub(crate) struct TokenSequence {
    inner: tokens::TokenSequence,
}

#[pymethods]
impl TokenSequence {
    /// Blocks are shared only among requests of the same `salt`; an empty one shares with all.
    /// `tokens`: a list, or a buffer of integers.
    #[new]
    #[pyo3(signature = (namespace, tokens = None, salt = None))]
    fn new(namespace: &Namespace, tokens: Option<&Bound<'_, PyAny>>, salt: Option<&[u8]>) -> PyResult<Self> {
        let salt = salt.unwrap_or_default();
        let hasher = namespace.inner.hasher().map_err(Error::from)?;
        let mut inner = if salt.is_empty() {
            tokens::TokenSequence::new(hasher)
        } else {
            tokens::TokenSequence::with_salt(hasher, salt).map_err(Error::from)?
        };
        if let Some(tokens) = tokens {
            inner.add_tokens(&u32s(tokens, "tokens")?);
        }
        Ok(Self { inner })
    }

    /// Adds tokens. How many blocks are complete now.
    fn add_tokens(&mut self, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.inner.add_tokens(&u32s(tokens, "tokens")?);
        Ok(self.inner.num_blocks())
    }

    /// Adds an image (or audio, video) under the tokens `first..first + count`: whoever has another
    /// one there has other blocks.
    fn add_image(&mut self, first: usize, count: usize, content_hash: &[u8]) -> Result<()> {
        self.inner.add_image(first..first.saturating_add(count), content_hash).map_err(Error::from)
    }

    /// Adds bytes to the hash of the block of token `at`, which must not be complete yet.
    fn add_extra_key(&mut self, at: usize, key: &[u8]) -> Result<()> {
        self.inner.add_extra_key(at, ExtraKey::salt(key)?).map_err(Error::from)
    }

    /// Keeps the first `length` tokens.
    fn truncate(&mut self, length: usize) {
        self.inner.truncate(length);
    }

    /// Complete blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    /// Tokens of a block.
    #[getter]
    fn page_size(&self) -> usize {
        self.inner.page_size()
    }

    /// The sequence hash of each complete block, 16 bytes each.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        of_hashes(py, self.inner.hashes())
    }

    /// The tokens behind the last complete block.
    #[getter]
    fn tail(&self) -> Vec<u32> {
        self.inner.tail().to_vec()
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __repr__(&self) -> String {
        format!("TokenSequence({} tokens, {} blocks)", self.inner.len(), self.inner.num_blocks())
    }
}

/// The blocks of a request that the engine hashed itself, first block first.
#[pyclass(module = "kvbm_rs")]
pub(crate) struct ExternalSequence {
    inner: kvbm::ExternalSequence,
}

#[pymethods]
impl ExternalSequence {
    #[new]
    #[pyo3(signature = (namespace, engine_hashes = Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "what a Python argument becomes")]
    fn new(namespace: &Namespace, engine_hashes: Vec<Bound<'_, PyBytes>>) -> Result<Self> {
        let hasher = namespace.inner.hasher()?;
        let hashes = engine_hashes.iter().map(PyBytesMethods::as_bytes);
        Ok(Self { inner: kvbm::ExternalSequence::from_hashes(hasher, hashes) })
    }

    /// Adds the engine's hash of the next block. How many blocks there are now.
    fn push(&mut self, engine_hash: &[u8]) -> usize {
        self.inner.push(engine_hash);
        self.inner.num_blocks()
    }

    /// Adds the engine's hashes of the next blocks. How many blocks there are now.
    #[expect(clippy::needless_pass_by_value, reason = "what a Python argument becomes")]
    fn extend(&mut self, engine_hashes: Vec<Bound<'_, PyBytes>>) -> usize {
        for hash in &engine_hashes {
            self.inner.push(hash.as_bytes());
        }
        self.inner.num_blocks()
    }

    /// Keeps the first `blocks` blocks.
    fn truncate(&mut self, blocks: usize) {
        self.inner.truncate(blocks);
    }

    /// Blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    /// The sequence hash of each block, 16 bytes each.
    #[getter]
    fn hashes<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        of_hashes(py, self.inner.hashes())
    }

    fn __len__(&self) -> usize {
        self.inner.num_blocks()
    }
}

fn of_hashes<'py>(py: Python<'py>, hashes: &[SequenceHash]) -> Vec<Bound<'py, PyBytes>> {
    hashes.iter().map(|hash| PyBytes::new(py, hash.as_bytes())).collect()
}

/// A sequence of either kind, borrowed from Python while a call runs.
#[derive(FromPyObject)]
pub(crate) enum AnySequence<'py> {
    Tokens(PyRef<'py, TokenSequence>),
    External(PyRef<'py, ExternalSequence>),
}

impl AnySequence<'_> {
    pub(crate) fn chain(&self) -> BlockChain<'_> {
        match self {
            Self::Tokens(sequence) => sequence.inner.chain(),
            Self::External(sequence) => sequence.inner.chain(),
        }
    }
}
