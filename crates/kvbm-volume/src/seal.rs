//! How objects are summed: with the deployment's key or without.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use kvbm_keys::{BulkKey, BulkMac, DeploymentKey, MacKey};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// How objects are summed. The default is CRC-64/NVME, which finds damage. With a deployment's key,
/// nobody without it can make an object that is taken for one of the deployment, or pass one off as
/// another: who may write the store can only delete and damage.
///
/// It travels with each request, so that a [`Volume`](crate::Volume) needs to know nothing of keys.
#[derive(Clone, Debug, Default)]
pub struct ObjectSeal(Option<Arc<Keys>>);

#[derive(Debug)]
struct Keys {
    id: u32,
    header: MacKey,
    piece: BulkKey,
}

impl ObjectSeal {
    /// Objects that are signed with `key`; any other object is damaged.
    pub fn keyed(key: &DeploymentKey) -> Self {
        let [a, b, c, d, ..] = *key.id().as_bytes();
        Self(Some(Arc::new(Keys {
            id: u32::from_le_bytes([a, b, c, d]),
            header: key.derive("kvbm 2026-11-25 volumes: headers of objects"),
            piece: key.derive_bulk("kvbm 2026-11-25 volumes: pieces of objects"),
        })))
    }

    /// Names the key, if there is one.
    pub(crate) fn key_id(&self) -> Option<u32> {
        self.0.as_ref().map(|keys| keys.id)
    }

    /// Of a header.
    pub(crate) fn header(&self, identity: &[u8], table: &[u8]) -> u64 {
        if let Some(keys) = &self.0 {
            return keys.header.of(&[identity, table]);
        }
        let mut digest = Digest::new(ALGORITHM);
        digest.update(identity);
        digest.update(table);
        digest.finalize()
    }

    /// Of a piece.
    pub(crate) fn piece(&self) -> Sum {
        match &self.0 {
            None => Sum::Crc(Box::new(Digest::new(ALGORITHM))),
            Some(keys) => Sum::Mac(keys.piece.begin()),
        }
    }
}

/// A sum of bytes that come one after the other.
pub(crate) enum Sum {
    Crc(Box<Digest>),
    Mac(BulkMac),
}

impl Sum {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc(digest) => digest.update(bytes),
            Self::Mac(mac) => mac.update(bytes),
        }
    }

    pub(crate) fn finish(&self) -> u64 {
        match self {
            Self::Crc(digest) => digest.finalize(),
            Self::Mac(mac) => mac.finish(),
        }
    }
}
