//! Opaque identifiers: 128-bit hashes with one text and one binary form.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// Text that is not 32 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected 32 hexadecimal digits, got {got:?}; copy the whole identifier")]
pub struct ParseHashError {
    what: &'static str,
    /// The start of the refused text (at most 40 characters).
    got: String,
}

macro_rules! opaque_128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name([u8; 16]);

        impl $name {
            /// Takes 16 bytes as they are: for decoding what [`Self::as_bytes`] gave.
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// The 16 bytes, as they are stored and sent.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }

            /// The 16 bytes as one number (little-endian), for sharding and hash tables.
            pub const fn to_u128(self) -> u128 {
                u128::from_le_bytes(self.0)
            }
        }

        impl Hash for $name {
            fn hash<H: Hasher>(&self, state: &mut H) {
                // No length prefix: the value is uniform and of fixed size.
                state.write_u128(self.to_u128());
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(hex(&self.0, &mut [0; 32]))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), hex(&self.0, &mut [0; 32]))
            }
        }

        impl FromStr for $name {
            type Err = ParseHashError;
            fn from_str(text: &str) -> Result<Self, ParseHashError> {
                unhex(text).map(Self).ok_or_else(|| ParseHashError {
                    what: stringify!($name),
                    got: text.chars().take(40).collect(),
                })
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serialize_128(&self.0, serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserialize_128(deserializer, concat!(stringify!($name), ": 16 bytes or 32 hexadecimal digits"))
                    .map(Self)
            }
        }
    };
}

opaque_128! {
    /// The identity of a block within its namespace: 128 bits that stand for all tokens up to the
    /// block's end.
    ///
    /// Opaque: compare and store it, read nothing out of it. Position and parent travel beside it
    /// (see [`ChainLink`](crate::ChainLink)). Serialized as 16 bytes in binary formats, as 32
    /// hexadecimal digits in text.
    SequenceHash
}

opaque_128! {
    /// The namespace's part of every block identity: what [`Namespace::tag`](crate::Namespace::tag)
    /// computes.
    ///
    /// It is written to file headers and object keys. The namespace's salt cannot be computed from
    /// it or secret.
    NamespaceTag
}

/// The hash of one block's tokens and extra keys *alone*, without its prefix.
///
/// Two blocks with the same tokens at different places have the same local hash, so it is a key of
/// a prefix tree (as in KV-aware routers), never an identity. XXH3-64 with seed 1337 over the token
/// ids (u32 little-endian), then the block's extra keys as in the sequence hash. Without extra keys
/// this is what Dynamo's router calls the local block hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct LocalHash(pub u64);

const DIGITS: &[u8; 16] = b"0123456789abcdef";

fn hex<'a>(bytes: &[u8; 16], text: &'a mut [u8; 32]) -> &'a str {
    for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
    // Only ASCII digits were written, so the empty default is never taken.
    std::str::from_utf8(text).unwrap_or_default()
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
    if text.len() != 32 {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn serialize_128<S: Serializer>(bytes: &[u8; 16], serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        serializer.serialize_str(hex(bytes, &mut [0; 32]))
    } else {
        serializer.serialize_bytes(bytes)
    }
}

fn deserialize_128<'de, D: Deserializer<'de>>(
    deserializer: D,
    expecting: &'static str,
) -> Result<[u8; 16], D::Error> {
    if deserializer.is_human_readable() {
        deserializer.deserialize_str(Bytes128 { expecting })
    } else {
        deserializer.deserialize_bytes(Bytes128 { expecting })
    }
}

struct Bytes128 {
    expecting: &'static str,
}

impl<'de> Visitor<'de> for Bytes128 {
    type Value = [u8; 16];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<[u8; 16], E> {
        unhex(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<[u8; 16], E> {
        bytes.try_into().map_err(|_| E::invalid_length(bytes.len(), &self))
    }

    // Formats without a byte string give a sequence of small numbers.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<[u8; 16], A::Error> {
        let mut bytes = [0; 16];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = seq.next_element()?.ok_or_else(|| de::Error::invalid_length(i, &self))?;
        }
        if seq.next_element::<u8>()?.is_some() {
            return Err(de::Error::invalid_length(17, &self));
        }
        Ok(bytes)
    }
}
