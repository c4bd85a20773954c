//! How objects are summed: with the deployment's key or without.

use std::sync::{Arc, OnceLock};

use crc_fast::{CrcAlgorithm, Digest};
use kvbm_keys::{BulkKey, BulkMac, DeploymentKey, KeyId, MacKey, TAG_BYTES};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// How objects are summed. The default is CRC-64/NVME, which finds damage. With a deployment's key,
/// nobody without it can make an object that is taken for one of the deployment, or pass one off as
/// another. Who may write the store can only delete and damage.
///
/// It travels with each request, so that a [`Volume`](crate::Volume) needs to know nothing of keys.
#[derive(Clone, Debug, Default)]
pub struct ObjectSeal {
    keys: Option<Arc<Keys>>,
    encryption: Encryption,
    framing: Framing,
}

/// What a header says about the encryption of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CipherStamp {
    /// The data key.
    pub(crate) key: KeyId,
    /// What says that the payload is as it was encrypted.
    pub(crate) tag: [u8; TAG_BYTES],
}

/// Where a reader finds the stamp of an object.
pub(crate) type FoundStamp = Arc<OnceLock<CipherStamp>>;

/// Where a reader finds the length of a payload that is compressed.
pub(crate) type FoundFrame = Arc<OnceLock<u64>>;

#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "compress"), allow(dead_code, reason = "nothing is compressed then"))]
enum Framing {
    /// The payload is not compressed.
    #[default]
    None,
    /// The payload that is written is compressed.
    Written,
    /// The payload that is read may be compressed, and is shorter then than what is asked for.
    Read(FoundFrame),
}

#[derive(Clone, Debug, Default)]
enum Encryption {
    /// Payloads are as they are.
    #[default]
    None,
    /// The payload that is written is encrypted, and its header says how.
    Written(CipherStamp),
    /// The payload that is read must be encrypted, and its header says how.
    Read(FoundStamp),
}

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
        let keys = Arc::new(Keys {
            id: u32::from_le_bytes([a, b, c, d]),
            header: key.derive("kvbm 2026-11-25 volumes: headers of objects"),
            piece: key.derive_bulk("kvbm 2026-11-25 volumes: pieces of objects"),
        });
        Self { keys: Some(keys), ..Self::default() }
    }

    /// The same for an object whose payload is encrypted.
    pub(crate) fn stamped(&self, stamp: CipherStamp) -> Self {
        Self { encryption: Encryption::Written(stamp), ..self.clone() }
    }

    /// The same for an object whose payload must be encrypted: `found` gets what its header says.
    pub(crate) fn finding(&self, found: &FoundStamp) -> Self {
        Self { encryption: Encryption::Read(Arc::clone(found)), ..self.clone() }
    }

    /// The same for an object whose payload is compressed.
    #[cfg(any(test, feature = "compress", feature = "fuzz"))]
    pub(crate) fn framed(&self) -> Self {
        Self { framing: Framing::Written, ..self.clone() }
    }

    /// The same for an object whose payload may be compressed: `found` gets its length then.
    #[cfg(feature = "compress")]
    pub(crate) fn measuring(&self, found: &FoundFrame) -> Self {
        Self { framing: Framing::Read(Arc::clone(found)), ..self.clone() }
    }

    /// Whether the payload that is written is compressed.
    pub(crate) fn is_framed(&self) -> bool {
        matches!(self.framing, Framing::Written)
    }

    /// Whether the payload that is read may be compressed.
    pub(crate) fn takes_frames(&self) -> bool {
        !matches!(self.framing, Framing::None)
    }

    /// The payload that is read is compressed, and of this length.
    pub(crate) fn found_frame(&self, length: u64) {
        if let Framing::Read(found) = &self.framing {
            let _first = found.set(length);
        }
    }

    /// Length of the payload that was read, where it is compressed.
    pub(crate) fn frame_length(&self) -> Option<u64> {
        match &self.framing {
            Framing::Read(found) => found.get().copied(),
            Framing::None | Framing::Written => None,
        }
    }

    /// Whether payloads are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.encryption, Encryption::None)
    }

    /// What the header of an object that is written says.
    pub(crate) fn stamp(&self) -> Option<CipherStamp> {
        match &self.encryption {
            Encryption::None => None,
            Encryption::Written(stamp) => Some(*stamp),
            Encryption::Read(found) => found.get().copied(),
        }
    }

    /// What the header of an object that is read says.
    pub(crate) fn found(&self, stamp: CipherStamp) {
        if let Encryption::Read(found) = &self.encryption {
            // A request reads one object.
            let _first = found.set(stamp);
        }
    }

    /// Names the key, if there is one.
    pub(crate) fn key_id(&self) -> Option<u32> {
        self.keys.as_ref().map(|keys| keys.id)
    }

    /// Of a header, with what follows it.
    pub(crate) fn header(&self, identity: &[u8], table: &[u8]) -> u64 {
        if let Some(keys) = &self.keys {
            return keys.header.of(&[identity, table]);
        }
        let mut digest = Digest::new(ALGORITHM);
        digest.update(identity);
        digest.update(table);
        digest.finalize()
    }

    /// Of a piece.
    pub(crate) fn piece(&self) -> Sum {
        match &self.keys {
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
