//! Checksums of blocks: CRC-64/NVME of the content, bound to the identity.
//!
//! ```text
//! content = CRC-64/NVME(bytes of the rank's slice, in fragment order)
//! block   = content XOR CRC-64/NVME("kvbm block" || namespace || identity)
//! ```
//! The content's part stays recoverable ([`BlockChecksum::unbind`]) and CRCs of pieces combine
//! ([`ContentCrc::combine`]), so a layer or head range can be verified against stored pieces.

use crc_fast::{CrcAlgorithm, Digest};
use kvbm_plan::BlockIdentity;

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// What a block is bound to, in bytes: a label, the namespace's tag and the fields of its identity.
const NAMED_BYTES: usize = 10 + 16 + 4 + 2 + 16 + 1 + 16 + 4;

/// CRC-64/NVME of some bytes.
pub(crate) fn crc64(bytes: &[u8]) -> u64 {
    crc_fast::checksum(ALGORITHM, bytes)
}

/// CRC-64/NVME of content that arrives in pieces.
pub struct ContentCrc(Digest);

impl ContentCrc {
    /// Nothing yet.
    pub fn new() -> Self {
        Self(Digest::new(ALGORITHM))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC of everything added.
    pub fn finish(&self) -> u64 {
        self.0.finalize()
    }

    /// CRC of `first` followed by `second`, from their CRCs and the length of the second in bytes.
    pub fn combine(first: u64, second: u64, second_bytes: u64) -> u64 {
        crc_fast::checksum_combine(ALGORITHM, first, second, second_bytes)
    }
}

impl Default for ContentCrc {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ContentCrc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ContentCrc").field(&self.finish()).finish()
    }
}

/// Binds content to identity within one namespace, so that the right bytes of the wrong block fail
/// too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockChecksum {
    namespace: [u8; 16],
}

impl BlockChecksum {
    /// Checksums of a namespace.
    pub const fn new(namespace: [u8; 16]) -> Self {
        Self { namespace }
    }

    /// The block's checksum, from the CRC of its content.
    pub fn bind(&self, identity: &BlockIdentity, content: u64) -> u64 {
        content ^ self.mask(identity)
    }

    /// The block's checksum over its bytes in pieces, in order.
    pub fn of<'a>(&self, identity: &BlockIdentity, pieces: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut content = ContentCrc::new();
        for piece in pieces {
            content.update(piece);
        }
        self.bind(identity, content.finish())
    }

    fn mask(&self, identity: &BlockIdentity) -> u64 {
        crc64(&self.named(identity))
    }

    /// What a block is bound to.
    pub(crate) fn named(&self, identity: &BlockIdentity) -> [u8; NAMED_BYTES] {
        let parent = identity.parent.map_or([0; 16], |parent| *parent.as_bytes());
        let fields: [&[u8]; 8] = [
            b"kvbm block",
            &self.namespace,
            &identity.namespace.0.to_le_bytes(),
            &identity.group.0.to_le_bytes(),
            identity.hash.as_bytes(),
            &[u8::from(identity.parent.is_some())],
            &parent,
            &identity.position.to_le_bytes(),
        ];
        // In one piece: short pieces cost more than their bytes.
        let (mut named, mut at) = ([0; NAMED_BYTES], 0);
        for field in fields {
            named[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
    use proptest::prelude::*;

    fn identity() -> BlockIdentity {
        BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(1),
            hash: SequenceHash::from_bytes([2; 16]),
            parent: Some(SequenceHash::from_bytes([3; 16])),
            position: 4,
        }
    }

    /// Bit by bit, from the parameters of the NVM Express specification.
    fn crc64_naive(bytes: &[u8]) -> u64 {
        let mut crc = !0_u64;
        for &byte in bytes {
            crc ^= u64::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ if crc & 1 == 1 { 0x9A6C_9329_AC4B_C9B5 } else { 0 };
            }
        }
        !crc
    }

    #[test]
    fn catalogue_check_value() {
        assert_eq!(crc64(b"123456789"), 0xAE8B_1486_0A79_9888);
        assert_eq!(crc64_naive(b"123456789"), 0xAE8B_1486_0A79_9888);
    }

    #[test]
    fn every_field_of_the_identity_and_the_namespace_changes_the_checksum() {
        let base = BlockChecksum::new([9; 16]).of(&identity(), [&b"bytes"[..]]);
        let others = [
            BlockIdentity { namespace: NamespaceId(1), ..identity() },
            BlockIdentity { group: GroupId(2), ..identity() },
            BlockIdentity { hash: SequenceHash::from_bytes([4; 16]), ..identity() },
            BlockIdentity { parent: None, ..identity() },
            BlockIdentity { parent: Some(SequenceHash::from_bytes([0; 16])), ..identity() },
            BlockIdentity { position: 5, ..identity() },
        ];
        let mut seen = vec![base, BlockChecksum::new([8; 16]).of(&identity(), [&b"bytes"[..]])];
        seen.extend(others.iter().map(|other| BlockChecksum::new([9; 16]).of(other, [&b"bytes"[..]])));
        let distinct: std::collections::BTreeSet<_> = seen.iter().collect();
        assert_eq!(distinct.len(), seen.len());
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter_and_combine(bytes in proptest::collection::vec(any::<u8>(), 0..600), cut in 0_usize..600) {
            let (a, b) = bytes.split_at(cut.min(bytes.len()));
            let whole = crc64_naive(&bytes);
            prop_assert_eq!(crc64(&bytes), whole);
            prop_assert_eq!(ContentCrc::combine(crc64(a), crc64(b), b.len() as u64), whole);
            let sums = BlockChecksum::new([1; 16]);
            prop_assert_eq!(sums.of(&identity(), [a, b]), sums.bind(&identity(), whole));
        }
    }
}
