//! What records say about the bytes of a block, and how journals are summed: with the deployment's
//! key or without.
//!
//! ```text
//! without a key   record = content XOR CRC("kvbm block" || namespace || identity), content = CRC(bytes)
//! with one        record = MAC_identity("kvbm block" || namespace || identity || MAC_content(bytes))
//! ```
//! With a key, nobody without it can make bytes, a record or a header that is taken for one of
//! ours. The signatures form a chain. The header is signed and names rank, layout and the journal's
//! random number. Each record is signed together with that number. The record has the signed
//! checksum of the block's bytes. So bytes, records and headers that are ours do not pass in any
//! other place.
//!
//! Where blocks are encrypted, a record has the tag of the encryption in the place of a sum: see
//! [`Recorded`].
//!
//! Callers know blocks by the checksum without a key ([`BlockChecksum`]): in memory a block is
//! compared against accidents only.

use crate::checksum::{BlockChecksum, ContentCrc, crc64};
use kvbm_keys::{BulkKey, BulkMac, DeploymentKey, KeyId, MacKey, TAG_BYTES};
use kvbm_plan::BlockIdentity;

/// What a record says of a block's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// Their sum; of encrypted bytes the number of their data key.
    pub(crate) word: u64,
    /// The tag of encrypted bytes; else zero.
    pub(crate) tag: [u8; TAG_BYTES],
}

impl Recorded {
    /// Of bytes as they are.
    pub(crate) const fn sum(sum: u64) -> Self {
        Self { word: sum, tag: [0; TAG_BYTES] }
    }

    /// Of bytes that were encrypted with data key number `key`.
    pub(crate) const fn sealed(key: u32, tag: [u8; TAG_BYTES]) -> Self {
        Self { word: key as u64, tag }
    }

    /// What tells bytes of one key apart, for people and callers.
    pub(crate) fn checksum(&self) -> u64 {
        let first = u64::from_le_bytes(*self.tag.first_chunk().unwrap_or(&[0; 8]));
        if first == 0 { self.word } else { first }
    }
}

/// One deployment's way to sum blocks and journals.
#[derive(Clone, Debug)]
pub(crate) struct Seal {
    pub(crate) checksums: BlockChecksum,
    keys: Option<Keys>,
    /// Blocks have tags: no sum of theirs is recorded.
    encrypts: bool,
}

#[derive(Clone, Debug)]
struct Keys {
    id: KeyId,
    journal: MacKey,
    identity: MacKey,
    content: BulkKey,
}

impl Seal {
    /// For blocks of a namespace.
    pub(crate) fn new(namespace: [u8; 16], key: Option<&DeploymentKey>) -> Self {
        let keys = key.map(|key| Keys {
            id: key.id(),
            journal: key.derive("kvbm 2026-11-25 disk: headers and records of journals"),
            identity: key.derive("kvbm 2026-11-25 disk: blocks"),
            content: key.derive_bulk("kvbm 2026-11-25 disk: bytes of blocks"),
        });
        Self { checksums: BlockChecksum::new(namespace), keys, encrypts: false }
    }

    /// The same where blocks are encrypted.
    pub(crate) fn encrypting(self, encrypts: bool) -> Self {
        Self { encrypts, ..self }
    }

    /// Whether blocks have tags.
    pub(crate) fn encrypts(&self) -> bool {
        self.encrypts
    }

    /// Whether the bytes of a block are summed before it is written whatever its caller knows of
    /// them. What is signed or encrypted passes by anyway, and must not be so if it is damaged.
    pub(crate) fn reads_sources(&self) -> bool {
        self.encrypts || self.keys.is_some()
    }

    /// The key's name, if there is a key.
    pub(crate) fn key_id(&self) -> Option<KeyId> {
        self.keys.as_ref().map(|keys| keys.id)
    }

    /// The sum of a header or record.
    pub(crate) fn journal(&self, bytes: &[u8]) -> u64 {
        self.keys.as_ref().map_or_else(|| crc64(bytes), |keys| keys.journal.of(&[bytes]))
    }

    /// For the bytes of a block, in order. `checksum`: whether callers want to know that too.
    pub(crate) fn begin(&self, checksum: bool) -> BlockSums {
        let mac = self.keys.as_ref().filter(|_| !self.encrypts).map(|keys| keys.content.begin());
        let crc = (checksum || mac.is_none()).then(ContentCrc::new);
        BlockSums { crc, mac }
    }

    /// The sums of a block whose bytes were added to `sums`.
    pub(crate) fn finish(&self, identity: &BlockIdentity, sums: &BlockSums) -> Summed {
        let checksum = sums.crc.as_ref().map_or(0, |crc| self.checksums.bind(identity, crc.finish()));
        let recorded = match (&self.keys, &sums.mac) {
            (Some(keys), Some(mac)) => {
                keys.identity.of(&[&self.checksums.named(identity), &mac.finish().to_le_bytes()])
            }
            _ => checksum,
        };
        Summed { checksum, recorded: Recorded::sum(if self.encrypts { 0 } else { recorded }) }
    }

    /// What a record says about a block of these bytes.
    pub(crate) fn recorded(&self, identity: &BlockIdentity, bytes: &[u8]) -> Recorded {
        let mut sums = self.begin(false);
        sums.update(bytes);
        self.finish(identity, &sums).recorded
    }
}

/// Sums of a block's bytes that come one after the other.
#[derive(Debug)]
pub(crate) struct BlockSums {
    crc: Option<ContentCrc>,
    mac: Option<BulkMac>,
}

/// Parts that both sums read, one after the other, while they are in the first cache. Parts of 16
/// KiB and more gained nothing (`docs/measurements.md`).
const PART_BYTES: usize = 8 << 10;

impl BlockSums {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match (&mut self.crc, &mut self.mac) {
            (Some(crc), Some(mac)) => {
                for part in bytes.chunks(PART_BYTES) {
                    crc.update(part);
                    mac.update(part);
                }
            }
            (Some(crc), None) => crc.update(bytes),
            (None, Some(mac)) => mac.update(bytes),
            (None, None) => {}
        }
    }
}

/// The sums of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summed {
    /// What callers know the block by; 0 where they did not want to know.
    pub(crate) checksum: u64,
    /// What its record says; nothing yet of a block that is to be encrypted.
    pub(crate) recorded: Recorded,
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};

    fn identity(hash: u8) -> BlockIdentity {
        let hash = SequenceHash::from_bytes([hash; 16]);
        BlockIdentity { namespace: NamespaceId(1), group: GroupId(0), hash, parent: None, position: 0 }
    }

    #[test]
    fn what_is_recorded_is_bound_to_the_key_the_namespace_and_the_block() {
        let key = |secret: &[u8]| DeploymentKey::from_secret(secret);
        let seals = [
            Seal::new([1; 16], None),
            Seal::new([1; 16], Some(&key(b"one"))),
            Seal::new([1; 16], Some(&key(b"two"))),
            Seal::new([2; 16], Some(&key(b"one"))),
        ];
        let sum = |seal: &Seal| {
            [(1, b"bytes"), (2, b"bytes"), (1, b"other")]
                .map(|(hash, bytes)| seal.recorded(&identity(hash), bytes).word)
        };
        let distinct: std::collections::BTreeSet<_> = seals.iter().flat_map(sum).collect();
        assert_eq!(distinct.len(), 12);
        let journal: std::collections::BTreeSet<_> =
            seals[..3].iter().map(|seal| seal.journal(b"record")).collect();
        assert_eq!(journal.len(), 3);
    }

    #[test]
    fn callers_know_a_block_by_the_same_checksum_with_and_without_a_key() {
        let (plain, keyed) =
            (Seal::new([1; 16], None), Seal::new([1; 16], Some(&DeploymentKey::from_secret(b"one"))));
        let sums = [&plain, &keyed].map(|seal| {
            let mut sums = seal.begin(true);
            sums.update(b"by");
            sums.update(b"tes");
            seal.finish(&identity(1), &sums)
        });
        assert_eq!(sums[0].checksum, plain.checksums.of(&identity(1), [&b"bytes"[..]]));
        assert_eq!((sums[0].checksum, sums[0].recorded.word), (sums[1].checksum, sums[0].checksum));
        assert_eq!(sums[1].recorded, keyed.recorded(&identity(1), b"bytes"));
        assert_ne!(sums[1].recorded.word, sums[1].checksum);
    }

    #[test]
    fn sums_of_many_parts_do_not_depend_on_where_bytes_are_cut() {
        let seal = Seal::new([1; 16], Some(&DeploymentKey::from_secret(b"one")));
        let bytes: Vec<u8> = (0..3 * PART_BYTES + 77).map(|n| (n % 251) as u8).collect();
        for cut in [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 9] {
            let (first, second) = bytes.split_at(cut);
            let mut sums = seal.begin(true);
            sums.update(first);
            sums.update(second);
            let found = seal.finish(&identity(1), &sums);
            assert_eq!(found.checksum, seal.checksums.of(&identity(1), [&bytes[..]]));
            // The signature alone, in one piece.
            assert_eq!(found.recorded, seal.recorded(&identity(1), &bytes));
        }
    }
}
