//! Encryption of blocks: an operator's key wraps data keys, and a data key encrypts blocks.
//!
//! Both use AES-256-GCM-SIV (RFC 8452). Its tag depends on every byte of the content and is what
//! the content is encrypted with, so no counter and no random number has to be kept. The nonce is
//! zero always. Each data key is wrapped under a key of its own, and each block is encrypted under
//! one that BLAKE3 makes of the data key and the block's name. Who sees two encryptions of one
//! block learns whether they have the same content, and nothing else.

use aes_gcm_siv::aead::{AeadInOut, KeyInit};
use aes_gcm_siv::{Aes256GcmSiv, Nonce, Tag};
use std::fmt;
use std::io;
use zeroize::Zeroizing;

use crate::KeyId;

const OPERATOR_ID: &str = "kvbm 2026-11-25 the public name of an operator's key";
const DATA_ID: &str = "kvbm 2026-11-25 the public name of a data key";
const WRAP: &str = "kvbm 2026-11-25 an operator's key: wraps data keys";
const BLOCK: &str = "kvbm 2026-11-25 a data key: encrypts blocks";

/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// Bytes of a tag: what says that bytes are as they were encrypted.
pub const TAG_BYTES: usize = 16;

/// Bytes of a wrapped data key: the key encrypted, and the tag.
pub const WRAPPED_BYTES: usize = KEY_BYTES + TAG_BYTES;

/// The longest block that is encrypted, in bytes: the cipher takes 64 GiB with all its parts.
pub const MAX_ENCRYPTED_BYTES: u64 = 1 << 35;

/// The key that an operator keeps, in a file or in a key management service. It wraps data keys and
/// encrypts nothing else.
///
/// It is overwritten when it is dropped, and `Debug` shows its [id](Self::id) alone.
#[derive(Clone)]
pub struct OperatorKey(Zeroizing<[u8; KEY_BYTES]>);

/// Why some bytes are no operator's key. Says nothing of what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadKey {
    /// Neither 64 hexadecimal digits nor 32 bytes.
    #[error(
        "{0} bytes are no key: a key is 64 hexadecimal digits, as `openssl rand -hex 32` prints them, or 32 bytes"
    )]
    Length(usize),
    /// One byte, again and again.
    #[error("all bytes of the key are equal: make a random one with `openssl rand -hex 32`")]
    Constant,
}

impl OperatorKey {
    /// Reads a key: 64 hexadecimal digits with white space around them, or 32 bytes as they are.
    ///
    /// # Errors
    /// See [`BadKey`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BadKey> {
        let key = hexadecimal(bytes.trim_ascii())
            .or_else(|| Some(Zeroizing::new(<[u8; KEY_BYTES]>::try_from(bytes).ok()?)))
            .ok_or(BadKey::Length(bytes.len()))?;
        if key.iter().all(|byte| *byte == key[0]) {
            return Err(BadKey::Constant);
        }
        Ok(Self(key))
    }

    /// The key's public name. It says nothing about the key.
    pub fn id(&self) -> KeyId {
        name(OPERATOR_ID, &self.0)
    }

    /// Encrypts a data key. `context`: where it belongs; it opens nowhere else.
    pub fn wrap(&self, key: &DataKey, context: &[u8]) -> [u8; WRAPPED_BYTES] {
        let mut wrapped = [0; WRAPPED_BYTES];
        let (content, tag) = wrapped.split_at_mut(KEY_BYTES);
        content.copy_from_slice(&key.0[..]);
        tag.copy_from_slice(&encrypt(&self.wrapping(context), context, content));
        wrapped
    }

    /// The data key that was wrapped with this key for this context.
    pub fn unwrap(&self, wrapped: &[u8; WRAPPED_BYTES], context: &[u8]) -> Option<DataKey> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        let (content, tag) = wrapped.split_first_chunk::<KEY_BYTES>()?;
        key.copy_from_slice(content);
        let tag = tag.first_chunk()?;
        decrypt(&self.wrapping(context), context, &mut key[..], tag).then_some(DataKey(key))
    }

    fn wrapping(&self, context: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
        subkey(WRAP, &self.0, context)
    }
}

impl fmt::Debug for OperatorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperatorKey({}, ..)", self.id())
    }
}

/// A random key that encrypts blocks. Without it nobody can read them again.
///
/// It is overwritten when it is dropped, and `Debug` shows its [id](Self::id) alone.
#[derive(Clone)]
pub struct DataKey(Zeroizing<[u8; KEY_BYTES]>);

impl DataKey {
    /// A new one, from the system's random numbers.
    ///
    /// # Errors
    /// The system has none.
    pub fn random() -> io::Result<Self> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        getrandom::fill(&mut key[..])
            .map_err(|error| io::Error::other(format!("random numbers: {error}")))?;
        Ok(Self(key))
    }

    /// The key's public name. It says nothing about the key.
    pub fn id(&self) -> KeyId {
        name(DATA_ID, &self.0)
    }

    /// Encrypts a block in place. `identity`: what it is; its bytes open under no other. More than
    /// [`MAX_ENCRYPTED_BYTES`] become zeros, which open under none.
    pub fn seal(&self, identity: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        encrypt(&subkey(BLOCK, &self.0, identity), identity, bytes)
    }

    /// Decrypts a block in place. `false` where these are not the bytes that this key sealed as
    /// this block with this tag: then their content means nothing.
    #[must_use = "what does not open must not be used"]
    pub fn open(&self, identity: &[u8], bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
        decrypt(&subkey(BLOCK, &self.0, identity), identity, bytes, tag)
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataKey({}, ..)", self.id())
    }
}

fn hexadecimal(text: &[u8]) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    let (pairs, []) = text.as_chunks::<2>() else { return None };
    if pairs.len() != KEY_BYTES {
        return None;
    }
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    for (byte, [high, low]) in key.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4 | digit(*low)?) as u8;
    }
    Some(key)
}

fn name(context: &str, key: &[u8; KEY_BYTES]) -> KeyId {
    let mut id = [0; 16];
    id.copy_from_slice(&blake3::derive_key(context, key)[..16]);
    KeyId(id)
}

/// The key for one wrapped key or one block.
fn subkey(purpose: &str, key: &[u8; KEY_BYTES], name: &[u8]) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut hasher = blake3::Hasher::new_derive_key(purpose);
    hasher.update(key);
    hasher.update(name);
    Zeroizing::new(*hasher.finalize().as_bytes())
}

fn encrypt(key: &[u8; KEY_BYTES], context: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
    let sealed = if bytes.len() as u64 <= MAX_ENCRYPTED_BYTES {
        let cipher = Aes256GcmSiv::new(key.into());
        cipher.encrypt_inout_detached(&Nonce::default(), context, (&mut *bytes).into()).ok()
    } else {
        None
    };
    if let Some(tag) = sealed {
        return tag.into();
    }
    // Nothing that is not encrypted may go where encrypted bytes go.
    bytes.fill(0);
    [0; TAG_BYTES]
}

fn decrypt(key: &[u8; KEY_BYTES], context: &[u8], bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
    let cipher = Aes256GcmSiv::new(key.into());
    let tag = Tag::from(*tag);
    bytes.len() as u64 <= MAX_ENCRYPTED_BYTES
        && cipher.decrypt_inout_detached(&Nonce::default(), context, bytes.into(), &tag).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operator() -> OperatorKey {
        OperatorKey::parse(b"an operator's key has 32 bytes: ").expect("32 bytes")
    }

    #[test]
    fn keys_are_read_from_digits_or_bytes_and_nothing_else() {
        let digits = format!(" {}\n", "0123456789abcdefABCDEF9876543210".repeat(2));
        let key = OperatorKey::parse(digits.as_bytes()).expect("64 digits");
        assert_eq!(key.0[..9], [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xab]);
        // Bytes that look like white space are bytes.
        assert_eq!(&operator().0[..], b"an operator's key has 32 bytes: ");
        let long = [b'0'; 66];
        for (bad, why) in [
            (&b""[..], BadKey::Length(0)),
            (&b"password"[..], BadKey::Length(8)),
            (&[b'g'; 64][..], BadKey::Length(64)),
            (&long[..], BadKey::Length(66)),
            (&[b'0'; 64][..], BadKey::Constant),
            (&[7; 32][..], BadKey::Constant),
        ] {
            assert_eq!(OperatorKey::parse(bad).map(|_| ()), Err(why));
        }
    }

    #[test]
    fn a_wrapped_key_opens_with_its_operators_key_at_its_place_and_undamaged() {
        let (ours, theirs) =
            (operator(), OperatorKey::parse(b"0123".repeat(8).as_slice()).expect("32 bytes"));
        let key = DataKey::random().expect("random numbers");
        let wrapped = ours.wrap(&key, b"here");
        assert_eq!(ours.unwrap(&wrapped, b"here").map(|key| key.id()), Some(key.id()));
        assert!(ours.unwrap(&wrapped, b"there").is_none() && theirs.unwrap(&wrapped, b"here").is_none());
        for bit in 0..WRAPPED_BYTES * 8 {
            let mut damaged = wrapped;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(ours.unwrap(&damaged, b"here").is_none());
        }
        assert!(wrapped.windows(4).all(|part| !key.0.windows(4).any(|secret| secret == part)));
        assert_ne!(ours.id(), theirs.id());
    }

    #[test]
    fn nothing_secret_is_shown() {
        let (operator, data) = (operator(), DataKey::random().expect("random numbers"));
        let shown = format!("{operator:?} {data:?}");
        let expected = format!("OperatorKey({}, ..) DataKey({}, ..)", operator.id(), data.id());
        assert_eq!(shown, expected);
        assert!(!shown.contains("operator's"));
    }

    /// RFC 8452, appendix C.2, the case of 8 bytes of content and none beside it, under the key
    /// itself; this crate's own derivation lies above it.
    #[test]
    fn the_cipher_is_that_of_the_rfc() {
        let mut key = [0; KEY_BYTES];
        key[0] = 1;
        let mut nonce = [0; 12];
        nonce[0] = 3;
        let mut bytes = [1, 0, 0, 0, 0, 0, 0, 0];
        let cipher = Aes256GcmSiv::new(&key.into());
        let tag = cipher.encrypt_inout_detached(&nonce.into(), b"", (&mut bytes[..]).into());
        assert_eq!(bytes, [0xc2, 0xef, 0x32, 0x8e, 0x5c, 0x71, 0xc8, 0x3b]);
        let tag: [u8; 16] = tag.expect("8 bytes").into();
        assert_eq!(tag, 0x8431_2213_0f73_64b7_61e0_b974_27e3_df28_u128.to_be_bytes());
    }

    proptest! {
        #[test]
        fn what_is_sealed_opens_as_what_it_was_and_as_nothing_else(
            bytes in proptest::collection::vec(any::<u8>(), 1..300), bit in any::<usize>(),
        ) {
            let (key, other) = (DataKey::random().expect("random"), DataKey::random().expect("random"));
            let mut sealed = bytes.clone();
            let tag = key.seal(b"name", &mut sealed);
            prop_assert!(bytes.len() < 8 || sealed != bytes);
            // The same block is the same: so a rank computes the tag of what another one writes.
            let mut again = bytes.clone();
            prop_assert_eq!((key.seal(b"name", &mut again), &again), (tag, &sealed));
            let open = |key: &DataKey, name: &[u8], tag: [u8; TAG_BYTES], bytes: &[u8]| {
                let mut bytes = bytes.to_vec();
                key.open(name, &mut bytes, &tag).then_some(bytes)
            };
            prop_assert_eq!(open(&key, b"name", tag, &sealed), Some(bytes));
            let (mut flipped, mut flipped_tag) = (sealed.clone(), tag);
            flipped[bit / 8 % sealed.len()] ^= 1 << (bit % 8);
            flipped_tag[bit / 8 % TAG_BYTES] ^= 1 << (bit % 8);
            prop_assert_eq!(open(&key, b"name", tag, &flipped), None);
            prop_assert_eq!(open(&key, b"name", flipped_tag, &sealed), None);
            prop_assert_eq!(open(&key, b"nam", tag, &sealed), None);
            prop_assert_eq!(open(&other, b"name", tag, &sealed), None);
        }
    }
}
