//! Keys that a deployment derives from its secret, and keyed checksums; keys that encrypt blocks.
//!
//! **Knows:** one secret, the keys derived from it, one for each purpose, and what is computed with
//! them; an operator's key, which wraps data keys, and encryption with those.
//! **Must never know:** what the bytes mean, where they lie, where the secret comes from.
//!
//! A checksum without a key finds accidents. Whoever can write the bytes can also make its value
//! match: a CRC is linear, so any content can be given any value by changing eight bytes of it. For
//! the same reason nothing is gained by a key over a CRC of the content, such as
//! `keyed(CRC(content))`: other content of the same CRC has the same result. Here the key meets all
//! of the content. [`MacKey`] is BLAKE3 in its keyed mode, cut to 64 bits. Without the key, a guess
//! is right once in 2^64, and each guess costs a read by somebody who has it. [`BulkKey`] is for
//! blocks: dividing by secret polynomials is several times as fast.
//!
//! ```
//! use kvbm_keys::DeploymentKey;
//!
//! let key = DeploymentKey::from_secret(b"what `openssl rand -hex 32` printed");
//! let mac = key.derive("kvbm example: words");
//! assert_eq!(mac.of(&[b"some ", b"words"]), mac.of(&[b"some words"]));
//! assert_ne!(mac.of(&[b"some words"]), key.derive("kvbm example: others").of(&[b"some words"]));
//! ```
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `bulk` | checksums of much content | - |
//! | `cipher` | encryption of blocks | - |
#![forbid(unsafe_code)]

mod bulk;
mod cipher;

pub use bulk::{BulkKey, BulkMac};
pub use cipher::{BadKey, DataKey, MAX_ENCRYPTED_BYTES, OperatorKey, TAG_BYTES, WRAPPED_BYTES};

use std::fmt;
use zeroize::Zeroizing;

/// BLAKE3's contexts, which nothing else may use.
const FROM_SECRET: &str = "kvbm 2026-11-25 the deployment's key from its secret";
const ID: &str = "kvbm 2026-11-25 the public name of a deployment's key";

/// Bytes of a checksum.
pub const MAC_BYTES: usize = 8;

/// The key of a deployment. All other keys are derived from it, each for one purpose, so that what
/// is signed for one is worth nothing for another.
///
/// It is overwritten when it is dropped, and `Debug` shows its [id](Self::id) alone.
#[derive(Clone)]
pub struct DeploymentKey(Zeroizing<[u8; 32]>);

impl DeploymentKey {
    /// The key that belongs to a secret.
    ///
    /// Who can read what was signed can try out secrets, as many as there is time for. So a secret
    /// has to be random, of 16 bytes or more; a password is not enough.
    pub fn from_secret(secret: &[u8]) -> Self {
        Self(Zeroizing::new(blake3::derive_key(FROM_SECRET, secret)))
    }

    /// The key for one purpose, which `context` names: a text that is unique among all programs.
    pub fn derive(&self, context: &str) -> MacKey {
        MacKey(Zeroizing::new(blake3::derive_key(context, &self.0[..])))
    }

    /// Bytes without end that belong to the key and a purpose.
    fn stream(&self, context: &str) -> blake3::OutputReader {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.0[..]);
        hasher.finalize_xof()
    }

    /// The key's public name. It says nothing about the key.
    pub fn id(&self) -> KeyId {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::derive_key(ID, &self.0[..])[..16]);
        KeyId(id)
    }
}

impl fmt::Debug for DeploymentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeploymentKey({}, ..)", self.id())
    }
}

/// Names a key, so that blocks of another key are told from damaged ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId([u8; 16]);

impl KeyId {
    /// The id with these bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for KeyId {
    /// The first half, in hexadecimal digits: enough to tell keys apart.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A key for the checksums of one purpose.
#[derive(Clone)]
pub struct MacKey(Zeroizing<[u8; 32]>);

impl MacKey {
    /// The checksum of bytes in parts, in order. Where the parts are cut makes no difference.
    pub fn of(&self, parts: &[&[u8]]) -> u64 {
        let mut mac = self.begin();
        for part in parts {
            mac.update(part);
        }
        mac.finish()
    }

    /// For bytes that come one after the other.
    pub fn begin(&self) -> Mac {
        Mac(Box::new(blake3::Hasher::new_keyed(&self.0)))
    }
}

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}

/// A checksum of bytes that come one after the other.
pub struct Mac(Box<blake3::Hasher>);

impl Mac {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of everything added.
    pub fn finish(&self) -> u64 {
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&self.0.finalize().as_bytes()[..MAC_BYTES]);
        u64::from_le_bytes(mac)
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mac(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

    /// Step by step as `docs/formats.md` has it; the golden journal of `kvbm-disk` is made by a
    /// program of its own.
    #[test]
    fn keys_and_checksums_are_those_of_the_page() {
        let key = DeploymentKey::from_secret(SECRET);
        let derived = blake3::derive_key("context", &key.0[..]);
        let whole = blake3::keyed_hash(&derived, b"some bytes");
        let (first, _) = whole.as_bytes().split_first_chunk().unwrap_or((&[0; 8], &[]));
        assert_eq!(key.derive("context").of(&[b"some ", b"", b"bytes"]), u64::from_le_bytes(*first));
    }

    #[test]
    fn another_secret_or_purpose_is_another_key() {
        let (key, other) = (DeploymentKey::from_secret(SECRET), DeploymentKey::from_secret(b"another"));
        assert_ne!(key.id(), other.id());
        let sums = [&key, &other].map(|key| ["a", "b"].map(|context| key.derive(context).of(&[b"x"])));
        let distinct: std::collections::BTreeSet<_> = sums.iter().flatten().collect();
        assert_eq!(distinct.len(), 4);
    }

    #[test]
    fn nothing_secret_is_shown() {
        let key = DeploymentKey::from_secret(SECRET);
        let mac = key.derive("context");
        let shown = format!("{key:?} {mac:?} {:?} {:?}", mac.begin(), key.id());
        for secret in [SECRET, &key.0[..], &mac.0[..]] {
            let first = u32::from_be_bytes(*secret.first_chunk().unwrap_or(&[0; 4]));
            assert!(!shown.contains(&format!("{first:08x}")), "{shown}");
            assert!(!shown.contains(&format!("{:?}", &secret[..4]).replace(['[', ']'], "")), "{shown}");
        }
        assert!(shown.contains(&key.id().to_string()), "{shown}");
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter_and_any_flip_does(
            bytes in proptest::collection::vec(any::<u8>(), 1..5000), cut in 0_usize..5000, bit in 0_usize..40_000,
        ) {
            let mac = DeploymentKey::from_secret(SECRET).derive("context");
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            prop_assert_eq!(mac.of(&[first, second]), mac.of(&[&bytes]));
            let mut flipped = bytes.clone();
            flipped[bit / 8 % bytes.len()] ^= 1 << (bit % 8);
            prop_assert_ne!(mac.of(&[&flipped]), mac.of(&[&bytes]));
        }
    }
}
