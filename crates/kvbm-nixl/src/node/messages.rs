//! What nodes say to each other, as notifications of their agents.
//!
//! MessagePack, `[version, message]`. A message is at most [`MAX_NOTIFICATION_BYTES`] long; every
//! list in it is bounded before it is used.
//!
//! [`MAX_NOTIFICATION_BYTES`]: crate::MAX_NOTIFICATION_BYTES

use kvbm_plan::{Epoch, GroupId, LeaseId, NamespaceTag, SequenceHash};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::ModelPart;

pub(crate) const VERSION: u16 = 5;

/// Most blocks that one request asks for.
pub(crate) const MAX_BLOCKS: usize = 1024;

/// Most blocks that one question for what a node has names.
pub(crate) const MAX_FIND: usize = 8192;

/// Most cache groups that one question names.
pub(crate) const MAX_GROUPS: usize = 64;

/// Blocks that a word of an answer is about: one a bit, from the lowest on.
pub(crate) const WORD_BITS: usize = u64::BITS as usize;

/// Most parts of each block that a request asks digests of: one for each rank of the reader.
pub(crate) const MAX_PARTS: usize = 64;

/// Most digests of an answer, so that it fits into a notification.
pub(crate) const MAX_DIGESTS: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Reader to owner: hold the longest prefix of these blocks for me.
    Ask {
        request: u64,
        epoch: Epoch,
        namespace: NamespaceTag,
        group: GroupId,
        hashes: Vec<SequenceHash>,
        parts: Vec<ModelPart>,
    },
    /// Owner to reader: these blocks (by slot) are held. `digests` are by block, then by part.
    Grant { request: u64, lease: LeaseId, ttl_ms: u64, blocks: Vec<u32>, digests: Vec<u64> },
    /// Owner to reader: nothing is held.
    Refuse { request: u64, why: RefusedRead },
    /// Reader to owner: how many of these blocks have you, from the first on?
    Find { request: u64, namespace: NamespaceTag, group: GroupId, hashes: Vec<SequenceHash> },
    /// Owner to reader: so many. Nothing is held.
    Found { request: u64, blocks: u32 },
    /// Reader to owner: which of these blocks have you in each of so many cache groups, from group
    /// 0 on?
    FindEach { request: u64, namespace: NamespaceTag, groups: u16, hashes: Vec<SequenceHash> },
    /// Owner to reader: by group, a bit for each block: whether it is there. Nothing is held.
    FoundEach { request: u64, there: Vec<Vec<u64>> },
    /// Reader to owner: I am still reading.
    Renew { lease: LeaseId },
    /// Owner to reader: the lease goes on for this long from your `Renew`.
    Renewed { lease: LeaseId, ttl_ms: u64 },
    /// Owner to reader: there is no such lease any more.
    Ended { lease: LeaseId },
    /// Reader to owner: I have what I need.
    Release { lease: LeaseId },
    /// Writer to receiver: of this chain I have the blocks from index `from` on. Set slots aside
    /// for those of them that you lack, for `most` of them. `chain` is the namespace that its
    /// hashes are chained in.
    Offer {
        request: u64,
        epoch: Epoch,
        namespace: NamespaceTag,
        group: GroupId,
        chain: NamespaceTag,
        hashes: Vec<SequenceHash>,
        from: u32,
        most: u32,
    },
    /// Receiver to writer: write these blocks (by index in the chain) into these slots.
    Room { request: u64, lease: LeaseId, ttl_ms: u64, places: Vec<u32>, slots: Vec<u32> },
    /// Writer to receiver: the next `blocks` blocks are in their slots. `digests` are by block,
    /// then by rank of the receiver.
    Written { request: u64, lease: LeaseId, blocks: u32, digests: Vec<u64> },
    /// Receiver to writer: so many of them, from the first on, are registered. The next one has
    /// wrong bytes, or finds no place any more.
    Taken { request: u64, blocks: u32, is_wrong: bool },
    /// Writer to receiver: none of my transfers under this grant runs any more.
    Finished { lease: LeaseId },
    /// Receiver to writer: the grant is over. Have its transfers ended?
    AskFinished { lease: LeaseId },
}

/// Why an owner holds nothing for a reader, or a receiver nothing for a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusedRead {
    /// The owner has been started again since the reader imported its announcement.
    Epoch,
    /// The owner does not offer this namespace and group any more.
    NotOffered,
    /// The reader holds as many leases as a peer may.
    TooManyLeases,
    /// The owner cannot compute digests of its memory.
    Unreadable,
    /// The request is out of its bounds.
    Malformed,
    /// The receiver takes no blocks that are written by peers.
    NotTaken,
    /// The receiver has no slots to set aside.
    NoRoom,
    /// The grant is over.
    Ended,
}

impl std::fmt::Display for RefusedRead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Epoch => "it has been started again; import its announcement again",
            Self::NotOffered => "it does not offer this namespace and group; import its announcement again",
            Self::TooManyLeases => {
                "this reader holds as many of its leases as one peer may; release some, or try another holder"
            }
            Self::Unreadable => "it cannot read its own memory to compute digests",
            Self::NotTaken => "it takes no blocks from peers; let it read them",
            Self::NoRoom => "it has no room for blocks of peers; let it read them later",
            Self::Ended => "what it had set aside is given up; offer the blocks again",
            Self::Malformed => "it finds the request malformed; run the same kvbm version on both sides",
        })
    }
}

impl Message {
    /// The request that it answers, if it is an answer.
    pub(crate) fn request(&self) -> Option<u64> {
        match self {
            Self::Grant { request, .. }
            | Self::Refuse { request, .. }
            | Self::Found { request, .. }
            | Self::FoundEach { request, .. }
            | Self::Room { request, .. }
            | Self::Taken { request, .. } => Some(*request),
            _ => None,
        }
    }
}

/// Bytes of a message.
pub(crate) fn encode(message: &Message) -> Vec<u8> {
    // Plain data into a vector: nothing to fail.
    rmp_serde::to_vec(&(VERSION, message)).unwrap_or_default()
}

/// A peer's message; `None` if it is of another version, malformed, or out of bounds.
pub(crate) fn decode(bytes: &[u8]) -> Option<Message> {
    if bytes.len() > crate::MAX_NOTIFICATION_BYTES {
        return None;
    }
    let (version, message): (u16, Message) = rmp_serde::from_slice(bytes).ok()?;
    (version == VERSION && is_bounded(&message)).then_some(message)
}

/// The version of a message, whatever that says; `None` if it is the version of this build, or if
/// none can be told.
pub(crate) fn other_version(bytes: &[u8]) -> Option<u16> {
    if bytes.len() > crate::MAX_NOTIFICATION_BYTES {
        return None;
    }
    let (version, _): (u16, IgnoredAny) = rmp_serde::from_slice(bytes).ok()?;
    (version != VERSION).then_some(version)
}

fn is_bounded(message: &Message) -> bool {
    match message {
        Message::Ask { hashes, parts, .. } => {
            let is_part = |part: &ModelPart| !part.layers.is_empty() && !part.heads.is_empty();
            hashes.len() <= MAX_BLOCKS
                && (1..=MAX_PARTS).contains(&parts.len())
                && hashes.len() * parts.len() <= MAX_DIGESTS
                && parts.iter().all(is_part)
        }
        Message::Find { hashes, .. } => hashes.len() <= MAX_FIND,
        Message::FindEach { groups, hashes, .. } => {
            hashes.len() <= MAX_FIND && (1..=MAX_GROUPS).contains(&usize::from(*groups))
        }
        Message::FoundEach { there, .. } => {
            there.len() <= MAX_GROUPS && there.iter().all(|group| group.len() <= MAX_FIND / WORD_BITS)
        }
        Message::Offer { hashes, from, .. } => hashes.len() <= MAX_FIND && *from as usize <= hashes.len(),
        Message::Grant { blocks, digests, .. } => blocks.len() <= MAX_BLOCKS && digests.len() <= MAX_DIGESTS,
        Message::Room { places, slots, .. } => places.len() <= MAX_BLOCKS && places.len() == slots.len(),
        Message::Written { digests, .. } => digests.len() <= MAX_DIGESTS,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part() -> ModelPart {
        ModelPart { layers: 0..4, heads: 0..2 }
    }

    fn ask(blocks: usize, parts: usize) -> Message {
        Message::Ask {
            request: 7,
            epoch: Epoch(3),
            namespace: NamespaceTag::from_bytes([1; 16]),
            group: GroupId(0),
            hashes: vec![SequenceHash::from_bytes([2; 16]); blocks],
            parts: vec![part(); parts],
        }
    }

    fn find(blocks: usize) -> Message {
        Message::Find {
            request: 8,
            namespace: NamespaceTag::from_bytes([1; 16]),
            group: GroupId(0),
            hashes: vec![SequenceHash::from_bytes([3; 16]); blocks],
        }
    }

    fn find_each(blocks: usize, groups: u16) -> Message {
        Message::FindEach {
            request: 8,
            namespace: NamespaceTag::from_bytes([1; 16]),
            groups,
            hashes: vec![SequenceHash::from_bytes([3; 16]); blocks],
        }
    }

    fn found_each(words: usize, groups: usize) -> Message {
        Message::FoundEach { request: 8, there: vec![vec![u64::MAX; words]; groups] }
    }

    fn offer(blocks: usize) -> Message {
        Message::Offer {
            request: 9,
            epoch: Epoch(3),
            namespace: NamespaceTag::from_bytes([1; 16]),
            group: GroupId(0),
            chain: NamespaceTag::from_bytes([2; 16]),
            hashes: vec![SequenceHash::from_bytes([4; 16]); blocks],
            from: 0,
            most: u32::MAX,
        }
    }

    #[test]
    fn messages_round_trip_and_fit_a_notification() {
        let digests = vec![u64::MAX; MAX_DIGESTS];
        let blocks = vec![u32::MAX; MAX_BLOCKS];
        let grant = Message::Grant { request: u64::MAX, lease: LeaseId(1), ttl_ms: 9, blocks, digests };
        let (places, slots) = (vec![u32::MAX; MAX_BLOCKS], vec![u32::MAX; MAX_BLOCKS]);
        let room = Message::Room { request: u64::MAX, lease: LeaseId(1 << 63), ttl_ms: 9, places, slots };
        let digests = vec![u64::MAX; MAX_DIGESTS];
        let written = Message::Written { request: 3, lease: LeaseId(u64::MAX), blocks: 7, digests };
        let offer = offer(MAX_FIND);
        let ended = Message::Ended { lease: LeaseId(4) };
        let each = [find_each(MAX_FIND, MAX_GROUPS as u16), found_each(MAX_FIND / WORD_BITS, MAX_GROUPS)];
        let others = [ask(MAX_BLOCKS, 16), find(MAX_FIND), grant, ended, room, written, offer];
        for message in others.into_iter().chain(each) {
            let bytes = encode(&message);
            assert!(bytes.len() <= crate::MAX_NOTIFICATION_BYTES, "{}", bytes.len());
            assert_eq!(decode(&bytes), Some(message));
        }
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        for message in [ask(MAX_BLOCKS + 1, 1), ask(1, 0), ask(1, MAX_PARTS + 1), ask(MAX_BLOCKS, 17)] {
            assert_eq!(decode(&encode(&message)), None);
        }
        assert_eq!(decode(&encode(&find(MAX_FIND + 1))), None);
        assert_eq!(decode(&encode(&offer(MAX_FIND + 1))), None);
        let mut begins_behind_its_end = offer(3);
        if let Message::Offer { from, .. } = &mut begins_behind_its_end {
            *from = 4;
        }
        assert_eq!(decode(&encode(&begins_behind_its_end)), None);
        for message in [
            find_each(MAX_FIND + 1, 1),
            find_each(1, 0),
            find_each(1, MAX_GROUPS as u16 + 1),
            found_each(1, MAX_GROUPS + 1),
            found_each(MAX_FIND / WORD_BITS + 1, 1),
        ] {
            assert_eq!(decode(&encode(&message)), None);
        }
        let room = Message::Room { request: 1, lease: LeaseId(1), ttl_ms: 9, places: vec![0], slots: vec![] };
        assert_eq!(decode(&encode(&room)), None);
        let bytes = rmp_serde::to_vec(&(VERSION + 1, Message::Release { lease: LeaseId(1) })).unwrap();
        assert_eq!(decode(&bytes), None, "another version");
        assert_eq!(other_version(&bytes), Some(VERSION + 1));
    }

    #[test]
    fn the_version_of_a_message_that_means_nothing_here_is_known() {
        let unknown = rmp_serde::to_vec(&(3_u16, ("Later", vec![1, 2, 3], true))).unwrap();
        assert_eq!((decode(&unknown), other_version(&unknown)), (None, Some(3)));
        let ours = rmp_serde::to_vec(&(VERSION, "Later")).unwrap();
        assert_eq!((decode(&ours), other_version(&ours)), (None, None), "malformed");
        for garbage in [&b""[..], b"\xc0", b"not a message", &[0x92; 4096]] {
            assert_eq!(other_version(garbage), None);
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_no_message_or_a_bounded_one(
            cut in any::<prop::sample::Index>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut bytes = encode(&ask(3, 2));
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            prop_assert!(decode(&bytes).is_none_or(|message| is_bounded(&message)));
            bytes.truncate(cut.index(bytes.len()));
            prop_assert!(decode(&bytes).is_none_or(|message| is_bounded(&message)));
        }
    }
}
