//! Objects that hold the data keys of a deployment, wrapped with the operator's key.
//!
//! They lie in a folder of their own, under names that no block has, so that one listing finds all
//! of them:
//!
//! ```text
//! NAMESPACE/ffffffff/g65535/HH/DATA-KEY.lLABEL+x.hx+x    a data key; x: 12 bytes of the operator's id
//! NAMESPACE/ffffffff/g65535/HH/OPERATOR.l0+0.h0+0        an operator's key that wraps some of them
//! ```
//! The name of a data key is random and says who wrapped it. So objects of one name are equal, and
//! nothing is ever replaced. The payload of a data key is:
//!
//! ```text
//! offset size
//!      0    8  magic "kvbmvkey"
//!      8    4  format version: 1
//!     12    4  label: short name of the namespace whose blocks it encrypts
//!     16    4  generation: of a namespace's keys, one of the largest encrypts new blocks
//!     20    4  zero
//!     24    8  when it was made, in seconds since 1970
//!     32   16  id of the data key
//!     48   16  id of the operator's key
//!     64   48  data key, wrapped for the namespace's tag, label, generation and time
//! ```
//! Integers are little-endian. The payload of an operator's key is its id.

use kvbm_keys::{DataKey, KeyId, OperatorKey, WRAPPED_BYTES};
use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{BlobKey, BlobScope, BlobSlice};

const MAGIC: [u8; 8] = *b"kvbmvkey";
const VERSION: u32 = 1;
/// Bytes of a data key's payload.
pub(crate) const KEY_OBJECT_BYTES: usize = 112;
/// Where objects of keys lie. No block is in such a group.
const LABEL: NamespaceId = NamespaceId(u32::MAX);
const GROUP: GroupId = GroupId(u16::MAX);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct KeyLayout {
    magic: [u8; 8],
    version: U32,
    label: U32,
    generation: U32,
    zero: U32,
    created: U64,
    id: [u8; 16],
    operator: [u8; 16],
    wrapped: [u8; WRAPPED_BYTES],
}

const _: () = assert!(size_of::<KeyLayout>() == KEY_OBJECT_BYTES);

/// Whether an object holds no block but a key.
pub(crate) fn is_key_object(key: &BlobKey) -> bool {
    key.group == GROUP && key.label == LABEL
}

/// All objects of keys.
pub(crate) const fn scope(namespace: NamespaceTag) -> BlobScope {
    BlobScope { namespace, label: Some(LABEL) }
}

/// What the name of an object of keys says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KeyName {
    /// A data key of a namespace, with the beginning of the id of the key that wraps it.
    Data { id: KeyId, label: NamespaceId, operator: [u8; 12] },
    /// An operator's key that wraps data keys here.
    Operator(KeyId),
}

impl KeyName {
    /// The name of a data key that `operator` wraps.
    pub(crate) fn data(id: KeyId, label: NamespaceId, operator: KeyId) -> Self {
        let mut start = [0; 12];
        start.copy_from_slice(&operator.as_bytes()[..12]);
        Self::Data { id, label, operator: start }
    }

    /// The id of a data key.
    pub(crate) fn data_key(&self) -> Option<KeyId> {
        match self {
            Self::Data { id, .. } => Some(*id),
            Self::Operator(_) => None,
        }
    }

    pub(crate) fn object(self, namespace: NamespaceTag) -> BlobKey {
        let (id, slice) = match self {
            Self::Data { id, label, operator } => {
                let part = |at: usize| {
                    u32::from_le_bytes([operator[at], operator[at + 1], operator[at + 2], operator[at + 3]])
                };
                let [num_layers, first_head, num_heads] = [part(0), part(4), part(8)];
                (id, BlobSlice { first_layer: label.0, num_layers, first_head, num_heads })
            }
            Self::Operator(id) => {
                (id, BlobSlice { first_layer: 0, num_layers: 0, first_head: 0, num_heads: 0 })
            }
        };
        let hash = SequenceHash::from_bytes(*id.as_bytes());
        BlobKey { namespace, label: LABEL, group: GROUP, hash, slice }
    }

    /// `None` for blocks.
    pub(crate) fn parse(key: &BlobKey) -> Option<Self> {
        let id = KeyId::from_bytes(*key.hash.as_bytes());
        let BlobSlice { first_layer, num_layers, first_head, num_heads } = key.slice;
        let mut operator = [0; 12];
        for (part, word) in
            operator.as_chunks_mut::<4>().0.iter_mut().zip([num_layers, first_head, num_heads])
        {
            *part = word.to_le_bytes();
        }
        let is_operator = first_layer == 0 && operator == [0; 12];
        let name = if is_operator {
            Self::Operator(id)
        } else {
            Self::Data { id, label: NamespaceId(first_layer), operator }
        };
        is_key_object(key).then_some(name)
    }
}

/// A data key as it lies in its object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrappedKey {
    pub(crate) label: NamespaceId,
    pub(crate) generation: u32,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) id: KeyId,
    pub(crate) operator: KeyId,
    wrapped: [u8; WRAPPED_BYTES],
}

impl WrappedKey {
    pub(crate) fn new(
        key: &DataKey,
        operator: &OperatorKey,
        namespace: NamespaceTag,
        (label, generation, created): (NamespaceId, u32, u64),
    ) -> Self {
        let wrapped = operator.wrap(key, &context(namespace, label, generation, created));
        Self { label, generation, created, id: key.id(), operator: operator.id(), wrapped }
    }

    /// The key, if `operator` has wrapped it for this place and it is the one that it says.
    pub(crate) fn unwrap(&self, operator: &OperatorKey, namespace: NamespaceTag) -> Option<DataKey> {
        let context = context(namespace, self.label, self.generation, self.created);
        operator.unwrap(&self.wrapped, &context).filter(|key| key.id() == self.id)
    }

    pub(crate) fn name(&self) -> KeyName {
        KeyName::data(self.id, self.label, self.operator)
    }

    pub(crate) fn encode(&self) -> [u8; KEY_OBJECT_BYTES] {
        zerocopy::transmute!(KeyLayout {
            magic: MAGIC,
            version: U32::new(VERSION),
            label: U32::new(self.label.0),
            generation: U32::new(self.generation),
            zero: U32::new(0),
            created: U64::new(self.created),
            id: *self.id.as_bytes(),
            operator: *self.operator.as_bytes(),
            wrapped: self.wrapped,
        })
    }

    /// `None` where these are no bytes that this version writes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let layout = KeyLayout::ref_from_bytes(bytes).ok()?;
        let key = Self {
            label: NamespaceId(layout.label.get()),
            generation: layout.generation.get(),
            created: layout.created.get(),
            id: KeyId::from_bytes(layout.id),
            operator: KeyId::from_bytes(layout.operator),
            wrapped: layout.wrapped,
        };
        (key.encode() == bytes).then_some(key)
    }
}

fn context(namespace: NamespaceTag, label: NamespaceId, generation: u32, created: u64) -> Vec<u8> {
    let numbers = [&label.0.to_le_bytes()[..], &generation.to_le_bytes(), &created.to_le_bytes()];
    [namespace.as_bytes(), &numbers.concat()[..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);

    fn operator(byte: u8) -> OperatorKey {
        OperatorKey::parse(&[&[byte; 31][..], &[1]].concat()).expect("32 bytes")
    }

    #[test]
    fn a_key_is_written_as_the_page_says_and_opens_at_its_place_alone() {
        let (data, ours) = (DataKey::random().expect("random"), operator(2));
        let key = WrappedKey::new(&data, &ours, NAMESPACE, (NamespaceId(0x0403_0201), 5, 6));
        let bytes = key.encode();
        assert_eq!(&bytes[..32], b"kvbmvkey\x01\0\0\0\x01\x02\x03\x04\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
        assert_eq!((&bytes[32..48], &bytes[48..64]), (&data.id().as_bytes()[..], &ours.id().as_bytes()[..]));
        assert_eq!(WrappedKey::decode(&bytes), Some(key.clone()));
        assert_eq!(key.unwrap(&ours, NAMESPACE).map(|key| key.id()), Some(data.id()));
        assert!(key.unwrap(&operator(3), NAMESPACE).is_none());
        assert!(key.unwrap(&ours, NamespaceTag::from_bytes([8; 16])).is_none());
        assert!(WrappedKey::decode(&bytes[..111]).is_none());
        for bit in 0..8 * KEY_OBJECT_BYTES {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            let found = WrappedKey::decode(&damaged).filter(|found| {
                // The operator's id is a hint: it says which key to try.
                (384..512).contains(&bit) || found.unwrap(&ours, NAMESPACE).is_some()
            });
            assert_eq!(found.is_some(), (384..512).contains(&bit), "bit {bit}");
        }
    }

    #[test]
    fn names_say_what_they_name_and_no_block_has_one() {
        let (id, operator) = (KeyId::from_bytes([0xab; 16]), KeyId::from_bytes(*b"0123456789abcdef"));
        for name in [KeyName::data(id, NamespaceId(9), operator), KeyName::Operator(operator)] {
            let object = name.object(NAMESPACE);
            assert_eq!(KeyName::parse(&object), Some(name));
            assert_eq!(BlobKey::parse(&object.object_path()), Some(object));
            assert!(scope(NAMESPACE).contains(&object));
            assert_eq!(KeyName::parse(&BlobKey { group: GroupId(0), ..object }), None);
        }
        let path = KeyName::data(id, NamespaceId(9), operator).object(NAMESPACE).object_path();
        assert!(
            path.ends_with(&format!(
                "/ffffffff/g65535/ab/{}.l9+858927408.h926299444+1650538808",
                "ab".repeat(16)
            )),
            "{path}"
        );
    }
}
