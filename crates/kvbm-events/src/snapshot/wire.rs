//! Questions and answers, in MessagePack.
//!
//! ```text
//! question = [version, source, epoch, shard, reach, ticket, part]
//! answer   = [version, 0]                                                              nothing to tell
//!          | [version, 1, next_sequence, ticket, part, parts, [block, ...]]
//! block    = [namespace, group, hash, parent | nil, position, prefix_hash, block_bytes, block_tokens, tier 0..3, node,
//!             volume | nil, local_hash | nil]
//! ```
//!
//! The first question has ticket 0 and part 0; the answer says the ticket under which the other
//! parts of the same snapshot are kept for a while.

use super::Snapshot;
use crate::msgpack::{Reader, write_array, write_nil, write_uint};
use crate::wire::{DecodeError, read_block, write_block};
use crate::{EventBlock, Malformed, SourceId, StreamId};
use kvbm_plan::{Epoch, LocalHash};

/// Version that is written, and the only one that is read.
const VERSION: u16 = 1;

/// Most bytes of a question or an answer: below the 1 MiB that a NATS server takes by default.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// Most blocks of a part.
pub(super) const PART_BLOCKS: usize = 8192;

/// Most bytes of a block.
const BLOCK_BYTES: usize = 110;

/// Most bytes of a part beside its blocks.
const HEAD_BYTES: usize = 64;

/// How many blocks a part may have that is to take no more than `bytes`: at least one.
pub(super) fn part_blocks(bytes: usize) -> usize {
    (bytes.saturating_sub(HEAD_BYTES) / BLOCK_BYTES).clamp(1, PART_BLOCKS)
}

/// Asks for a part of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Of which stream.
    pub stream: StreamId,
    /// The state has to be the one after every event below this number.
    pub reach: u64,
    /// Which snapshot; 0 for the current one.
    pub ticket: u64,
    /// Which part of it, from 0.
    pub part: u32,
}

/// What the source says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It does not know the stream, cannot reach that far yet, or keeps that snapshot no longer:
    /// ask anew.
    Nothing,
    /// A part of a snapshot.
    Part(Part),
}

/// A part of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// As in [`Snapshot`].
    pub next_sequence: u64,
    /// Which snapshot.
    pub ticket: u64,
    /// Which part of it.
    pub part: u32,
    /// How many parts it has; at least 1.
    pub parts: u32,
    /// The part's blocks.
    pub blocks: Vec<EventBlock>,
}

impl Question {
    /// The bytes of the question.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        write_array(&mut out, 7);
        write_uint(&mut out, u64::from(VERSION));
        write_uint(&mut out, self.stream.source.0);
        write_uint(&mut out, self.stream.epoch.0);
        write_uint(&mut out, u64::from(self.stream.shard));
        write_uint(&mut out, self.reach);
        write_uint(&mut out, self.ticket);
        write_uint(&mut out, u64::from(self.part));
        out
    }

    /// Reads a question.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = start(bytes, 7)?;
        let stream = StreamId {
            source: SourceId(reader.uint("a source")?),
            epoch: Epoch(reader.uint("an epoch")?),
            shard: reader.uint("a shard")?,
        };
        let reach = reader.uint("a number")?;
        let ticket = reader.uint("a ticket")?;
        let question = Self { stream, reach, ticket, part: reader.uint("a part")? };
        end(&reader, question)
    }
}

impl Answer {
    /// The bytes of the answer.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Nothing => {
                write_array(&mut out, 2);
                write_uint(&mut out, u64::from(VERSION));
                write_uint(&mut out, 0);
            }
            Self::Part(part) => {
                let numbers = [part.next_sequence, part.ticket, u64::from(part.part), u64::from(part.parts)];
                encode_part(&mut out, numbers, &part.blocks);
            }
        }
        out
    }

    /// Reads an answer.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = start(bytes, 2)?;
        let unknown = reader.malformed("a kind of answer, 0 or 1");
        match reader.uint("a kind of answer")? {
            0u8 => end(&reader, Self::Nothing),
            1 => {
                let part = read_part(&mut reader)?;
                end(&reader, Self::Part(part))
            }
            _ => Err(unknown.into()),
        }
    }
}

/// Part `part` of a snapshot as the bytes of an answer, where each part has `of_part` blocks.
pub(super) fn encode_part_of(snapshot: &Snapshot, of_part: usize, ticket: u64, part: u32) -> Option<Vec<u8>> {
    let parts = snapshot.blocks.len().div_ceil(of_part).max(1) as u32;
    if part >= parts {
        return None;
    }
    let first = part as usize * of_part;
    let blocks = &snapshot.blocks[first..snapshot.blocks.len().min(first + of_part)];
    let mut out = Vec::with_capacity(HEAD_BYTES + 100 * blocks.len());
    encode_part(&mut out, [snapshot.next_sequence, ticket, u64::from(part), u64::from(parts)], blocks);
    Some(out)
}

fn encode_part(out: &mut Vec<u8>, numbers: [u64; 4], blocks: &[EventBlock]) {
    write_array(out, 7);
    write_uint(out, u64::from(VERSION));
    write_uint(out, 1);
    for number in numbers {
        write_uint(out, number);
    }
    write_array(out, blocks.len());
    for block in blocks {
        write_array(out, 12);
        write_block(out, block);
        match block.local_hash {
            Some(LocalHash(hash)) => write_uint(out, hash),
            None => write_nil(out),
        }
    }
}

fn read_part(reader: &mut Reader<'_>) -> Result<Part, Malformed> {
    let next_sequence = reader.uint("the next sequence")?;
    let ticket = reader.uint("a ticket")?;
    let wrong = reader.malformed("a part of its parts");
    let (part, parts) = (reader.uint("a part")?, reader.uint("a number of parts")?);
    if part >= parts {
        return Err(wrong);
    }
    let too_many = reader.malformed("at most 8192 blocks");
    let count = reader.array("a list of blocks")? as usize;
    if count > PART_BLOCKS {
        return Err(too_many);
    }
    // The claimed length is not trusted: a block takes more than 40 bytes.
    let mut blocks = Vec::with_capacity(count.min(reader.left() / 40));
    for _ in 0..count {
        let short = reader.malformed("a block of 12 elements");
        if reader.array("a block")? != 12 {
            return Err(short);
        }
        let mut block = read_block(reader)?;
        if !reader.nil() {
            block.local_hash = Some(LocalHash(reader.uint("a local hash")?));
        }
        blocks.push(block);
    }
    Ok(Part { next_sequence, ticket, part, parts, blocks })
}

/// Checks length, shape and version of what has at least `least` elements.
fn start(bytes: &[u8], least: u32) -> Result<Reader<'_>, DecodeError> {
    if bytes.len() > MAX_BYTES {
        return Err(DecodeError::TooLong { len: bytes.len() });
    }
    let mut reader = Reader::new(bytes);
    let short = reader.malformed("a question or an answer about a snapshot");
    if reader.array("a question or an answer about a snapshot")? < least {
        return Err(short.into());
    }
    match reader.uint("a version")? {
        VERSION => Ok(reader),
        found => Err(DecodeError::Version { found }),
    }
}

fn end<T>(reader: &Reader<'_>, value: T) -> Result<T, DecodeError> {
    match reader.left() {
        0 => Ok(value),
        extra => Err(DecodeError::Trailing { extra }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockIdentity, GroupId, Location, NamespaceId, NodeId, SequenceHash, Tier, VolumeId};
    use proptest::prelude::*;

    fn question() -> Question {
        let stream = StreamId { source: SourceId(u64::MAX), epoch: Epoch(7), shard: 3 };
        Question { stream, reach: 1 << 40, ticket: 9, part: 2 }
    }

    fn block(n: u32) -> EventBlock {
        let hash = SequenceHash::from_bytes(u128::from(n).to_le_bytes());
        EventBlock {
            identity: BlockIdentity {
                namespace: NamespaceId(u32::MAX),
                group: GroupId(u16::MAX),
                hash,
                parent: (n % 2 == 1).then_some(hash),
                position: u32::MAX,
            },
            prefix_hash: hash,
            local_hash: (n % 3 == 1).then_some(LocalHash(u64::MAX)),
            block_bytes: u64::MAX,
            block_tokens: u32::MAX,
            location: Location { tier: Tier::G4, node: NodeId(u32::MAX), volume: Some(VolumeId(u32::MAX)) },
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Question::decode(&question().encode()), Ok(question()));
        let part =
            Part { next_sequence: 5, ticket: 9, part: 1, parts: 2, blocks: (0..9).map(block).collect() };
        for answer in [Answer::Nothing, Answer::Part(part)] {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
    }

    /// Mutation that makes it fail: `part_blocks` that gives one block more.
    #[test]
    fn a_snapshot_is_the_sum_of_its_parts_and_each_fits() {
        let blocks: Vec<EventBlock> = (0..=2 * PART_BLOCKS as u32).map(|_| block(1)).collect();
        let snapshot = Snapshot { next_sequence: u64::MAX, blocks };
        for bytes in [MAX_BYTES, 64 << 10, 1 << 10] {
            let of_part = part_blocks(bytes);
            let mut sum = Vec::new();
            let parts = snapshot.blocks.len().div_ceil(of_part) as u32;
            assert!(bytes < MAX_BYTES || parts == 3);
            for part in 0..parts {
                let encoded = encode_part_of(&snapshot, of_part, u64::MAX, part).unwrap();
                assert!(encoded.len() <= bytes, "{} bytes of {bytes}", encoded.len());
                let Ok(Answer::Part(found)) = Answer::decode(&encoded) else { panic!("part {part}") };
                assert_eq!((found.part, found.parts), (part, parts));
                sum.extend(found.blocks);
            }
            assert_eq!(sum, snapshot.blocks);
            assert_eq!(encode_part_of(&snapshot, of_part, 1, parts), None);
        }
        assert!(encode_part_of(&Snapshot::default(), 1, 1, 0).is_some(), "nothing is a part as well");
        assert_eq!((part_blocks(0), part_blocks(usize::MAX)), (1, PART_BLOCKS));
    }

    proptest! {
        #[test]
        fn invariant_5_hostile_answers_are_errors(bytes in prop::collection::vec(any::<u8>(), 0..200),
                                                  at in 0usize..600, flip in 1u8..) {
            // An answer or an error, never a panic.
            let _ = (Answer::decode(&bytes), Question::decode(&bytes));
            let part = Part { next_sequence: 5, ticket: 9, part: 0, parts: 1, blocks: (0..9).map(block).collect() };
            let mut damaged = Answer::Part(part).encode();
            let cut = Answer::decode(&damaged[..at.min(damaged.len() - 1)]);
            prop_assert!(cut.is_err());
            let at = at % damaged.len();
            damaged[at] ^= flip;
            if let Ok(Answer::Part(part)) = Answer::decode(&damaged) {
                prop_assert!(part.blocks.len() <= PART_BLOCKS && part.part < part.parts);
            }
        }
    }
}
