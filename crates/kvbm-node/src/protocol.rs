//! What a daemon and an engine's processes say to each other, in MessagePack.
//!
//! A mover's line carries commands of `kvbm-plan` and [`Moved`] once it is attached; a scheduler's
//! line carries [`Call`] and [`DaemonNotice`].

use crate::shape::{MAX_GROUPS, ModelShape};
use kvbm::tokens::NamespaceTag;
use kvbm::{BlockChain, BlockId, ChainOrigin, SequenceHash};
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::Range;

/// Most blocks of a chain, and most ids, of one call.
pub(crate) const MAX_BLOCKS: usize = 1 << 16;
/// Longest name of an engine, and of a request, in bytes.
pub(crate) const MAX_NAME: usize = 256;
/// Bytes of a hash.
const HASH: usize = 16;

/// What a process of an engine attaches as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Asks what is there, and has blocks copied.
    Scheduler,
    /// Copies, on this rank.
    Mover(u16),
    /// Has copied on this rank, and does not any more: nothing of its earlier lines touches memory.
    Left(u16),
    /// A daemon that takes the place of this one, with its host memory.
    Successor,
}

/// What a process offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) role: Role,
    /// All processes of an engine give the same name.
    pub(crate) engine: String,
    /// Blocks of the engine on each rank, and its ranks.
    pub(crate) blocks: u32,
    pub(crate) ranks: u16,
    /// Tag of the namespace, where the process knows it.
    pub(crate) namespace: Option<[u8; HASH]>,
    /// What both sides must agree on of the model. Of the scheduler that is the kinds of its cache
    /// groups, of a mover and of a successor also the shapes of their blocks.
    pub(crate) model: ModelShape,
    /// Of a successor: its host memory.
    pub(crate) host: Option<HostTerms>,
    /// Ranks, one after another, that hold the same bytes.
    pub(crate) replicas: u32,
}

/// Host memory of each rank, as two daemons must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTerms {
    /// Blocks of G2.
    pub(crate) blocks: u64,
    /// Bytes, with the staging rings.
    pub(crate) bytes: u64,
    /// Ranks that have one memory.
    pub(crate) sharing: u64,
}

/// What a process is told as it is attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The life of the daemon's manager.
    pub(crate) epoch: u64,
    /// Tag of the namespace: checksums are bound to it.
    pub(crate) namespace: [u8; HASH],
    /// Of a mover: the memory that came with this. Of a successor the files are the index of host
    /// memory, then the memory of each rank.
    pub(crate) memory: Option<Memory>,
}

/// Host memory that a mover maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// Its slots, and bytes of each: they follow one another, and hold a block of any cache group.
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u64,
    /// How a block of each cache group lies in its slot: descriptors of `kvbm-layout` of one block.
    pub(crate) layouts: Vec<Bytes>,
    /// Whether all of its pages are there: who maps it may touch them ahead of their use.
    pub(crate) populated: bool,
}

/// A question of a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The answer quotes it; 0: nobody waits for one.
    pub(crate) id: u64,
    pub(crate) ask: Ask,
}

/// See [`Call`]. Ids of blocks are the engine's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Answered with [`Answer::Ready`] or [`Answer::Pending`].
    LookUp { request: String, run: ChainRun, first: u32 },
    /// Never answered: [`DaemonNotice::Finished`] follows, also where nothing was started. `after`:
    /// the point of the engine's work that copies wait for ([`Moved::Passed`]); 0: none. `wait_ms`:
    /// the load ends then, with what has arrived; 0: as the daemon is configured.
    Commit { request: String, ids: GroupIds, after: u64, wait_ms: u32 },
    /// Answered with [`Answer::Known`].
    Abandon { request: String },
    /// Answered with [`Answer::Started`]. The blocks are of one cache group. `after`: as above.
    Offload { group: u16, ids: Vec<u32>, run: ChainRun, first: u32, after: u64 },
    /// Answered with [`Answer::Blocks`]: those that a copy still touches.
    Released { ids: Vec<u32> },
    /// The same, after `wait_ms` at most.
    BeforeReuse { ids: Vec<u32>, wait_ms: u32 },
    /// Answered with [`Answer::Blocks`]: those that a copy touches.
    Busy { ids: Vec<u32> },
    /// Answered with [`Answer::Count`]: blocks that are being brought up.
    Prefetch { run: ChainRun },
    /// The same, after the blocks count as used now.
    SessionResumes { run: ChainRun },
    /// Answered with [`Answer::Count`]: blocks that were removed.
    Forget { namespace: [u8; HASH] },
    /// Answered with [`Answer::Known`]: no block is on its way down.
    Settled,
    /// Never answered: the engine computed so many tokens of prompts in this time.
    Prefilled { tokens: u64, micros: u64 },
    /// Never answered.
    Step,
    /// Answered with [`Answer::Counts`].
    Count,
}

/// What a daemon sends to a scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum DaemonNotice {
    /// The answer to a call; an error is a text for people.
    Answer { id: u64, answer: Result<Answer, String> },
    /// A load is over.
    Finished(Load),
    /// Whether movers of all ranks are there: before, nothing is found or taken.
    Movers(bool),
}

/// See [`Ask`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// `promised`: for each cache group the blocks of the run that a load brings, the first and the
    /// end. Empty where nothing is promised.
    Ready {
        blocks: u32,
        by_tier: [u32; 4],
        promised: Vec<(u32, u32)>,
    },
    Pending,
    Known(bool),
    Started {
        started: u32,
        present: u32,
        refused: Vec<(u32, String)>,
    },
    Blocks(Vec<u32>),
    Count(u64),
    Counts {
        tickets: u32,
        loads: u32,
    },
}

/// What a mover sends to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Moved {
    /// A message of `kvbm-plan`.
    Message(Bytes),
    /// The engine has passed this point of its work on the mover's rank, and all before it.
    Passed(u64),
}

/// A load that is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) request: String,
    pub(crate) arrived: u32,
    pub(crate) wanted: u32,
    /// Why the others did not arrive, the first few.
    pub(crate) failures: Vec<String>,
}

/// Ids of blocks of each cache group, group by group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GroupIds {
    ids: Vec<u32>,
    /// How many there are of each group.
    counts: Vec<u32>,
}

impl GroupIds {
    pub(crate) fn of(groups: &[&[BlockId]]) -> Self {
        let ids = groups.iter().flat_map(|ids| ids.iter().map(|id| id.0)).collect();
        Self { ids, counts: groups.iter().map(|ids| ids.len() as u32).collect() }
    }

    /// All of them.
    pub(crate) fn all(&self) -> &[u32] {
        &self.ids
    }

    /// Where those of each group are among all of them.
    pub(crate) fn places(&self) -> Vec<Range<usize>> {
        let mut next = 0;
        let place = |count: &u32| {
            next += *count as usize;
            next - *count as usize..next
        };
        self.counts.iter().map(place).collect()
    }

    /// Blocks of the sequence, as far as the ids say: those of the group that has most.
    pub(crate) fn blocks(&self) -> u32 {
        self.counts.iter().copied().max().unwrap_or(0)
    }

    /// Whether the counts are those of the ids.
    fn check(&self) -> Result<(), String> {
        let (groups, ids) = (self.counts.len(), self.ids.len());
        if groups > MAX_GROUPS {
            return Err(format!("block ids of {groups} cache groups in one call, at most {MAX_GROUPS} go"));
        }
        let counted: u64 = self.counts.iter().map(|count| u64::from(*count)).sum();
        if counted != ids as u64 {
            return Err(format!("{ids} block ids, and {counted} by their cache groups"));
        }
        Ok(())
    }
}

/// A run of blocks, by hash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ChainRun {
    namespace: [u8; HASH],
    origin: Origin,
    hashes: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Origin {
    Root,
    After { parent: [u8; HASH], position: u32 },
    Flat,
}

impl ChainRun {
    pub(crate) fn of(chain: BlockChain<'_>) -> Self {
        let origin = match chain.origin() {
            ChainOrigin::Root => Origin::Root,
            ChainOrigin::After { parent, position } => Origin::After { parent: *parent.as_bytes(), position },
            ChainOrigin::Flat => Origin::Flat,
        };
        let hashes = chain.hashes().iter().flat_map(|hash| *hash.as_bytes()).collect();
        Self { namespace: *chain.namespace().as_bytes(), origin, hashes: Bytes(hashes) }
    }

    pub(crate) fn hashes(&self) -> Vec<SequenceHash> {
        self.hashes.0.as_chunks::<HASH>().0.iter().map(|hash| SequenceHash::from_bytes(*hash)).collect()
    }

    pub(crate) fn chain<'a>(&self, hashes: &'a [SequenceHash]) -> BlockChain<'a> {
        let origin = match self.origin {
            Origin::Root => ChainOrigin::Root,
            Origin::After { parent, position } => {
                ChainOrigin::After { parent: SequenceHash::from_bytes(parent), position }
            }
            Origin::Flat => ChainOrigin::Flat,
        };
        BlockChain::of_run(NamespaceTag::from_bytes(self.namespace), origin, hashes)
    }

    /// Whether it can be a run: untrusted bytes can be anything.
    fn check(&self) -> Result<(), String> {
        let bytes = self.hashes.0.len();
        if !bytes.is_multiple_of(HASH) || bytes / HASH > MAX_BLOCKS {
            return Err(format!("{bytes} bytes of hashes: at most {MAX_BLOCKS} hashes of {HASH} bytes go"));
        }
        match self.origin {
            Origin::After { position: 0, .. } => Err("a run behind a block begins at position 0".into()),
            _ => Ok(()),
        }
    }
}

impl Ask {
    /// Whether a daemon answers it at all.
    pub(crate) fn check(&self) -> Result<(), String> {
        let name = |name: &String| match name.len() {
            0..=MAX_NAME => Ok(()),
            bytes => Err(format!("a request's name has {bytes} bytes, at most {MAX_NAME} go")),
        };
        let count = |ids: &Vec<u32>| match ids.len() {
            0..=MAX_BLOCKS => Ok(()),
            ids => Err(format!("{ids} block ids in one call, at most {MAX_BLOCKS} go")),
        };
        match self {
            Self::LookUp { request, run, .. } => name(request).and_then(|()| run.check()),
            Self::Commit { request, ids, .. } => {
                name(request).and_then(|()| count(&ids.ids)).and_then(|()| ids.check())
            }
            Self::Abandon { request } => name(request),
            Self::Offload { ids, run, .. } => count(ids).and_then(|()| run.check()),
            Self::Prefetch { run } | Self::SessionResumes { run } => run.check(),
            Self::Released { ids } | Self::BeforeReuse { ids, .. } | Self::Busy { ids } => count(ids),
            Self::Forget { .. } | Self::Settled | Self::Prefilled { .. } | Self::Step | Self::Count => Ok(()),
        }
    }
}

/// Bytes as MessagePack has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Plain;

        impl Visitor<'_> for Plain {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
        }

        deserializer.deserialize_bytes(Plain)
    }
}

/// A message as bytes; none of ours is impossible to write.
pub(crate) fn encode(message: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(message).unwrap_or_default()
}

/// A message of untrusted bytes.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let mut rest = bytes;
    let message = rmp_serde::from_read(&mut rest).map_err(|error| error.to_string())?;
    match rest.len() {
        0 => Ok(message),
        more => Err(format!("{more} bytes follow the message")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_hostile_sizes_are_refused() {
        let hashes: Vec<_> = (0..5).map(|at| SequenceHash::from_bytes([at; HASH])).collect();
        let tag = NamespaceTag::from_bytes([7; HASH]);
        let after = ChainOrigin::After { parent: hashes[4], position: 3 };
        for origin in [ChainOrigin::Root, after, ChainOrigin::Flat] {
            let run = ChainRun::of(BlockChain::of_run(tag, origin, &hashes));
            let ask = Ask::LookUp { request: "r".into(), run, first: 2 };
            assert_eq!(ask.check(), Ok(()));
            let Ok(Call { id: 9, ask: Ask::LookUp { run, .. } }) = decode(&encode(&Call { id: 9, ask }))
            else {
                panic!("not read")
            };
            let found = run.hashes();
            let chain = run.chain(&found);
            assert_eq!((chain.origin(), chain.namespace(), chain.hashes()), (origin, tag, &hashes[..]));
        }
        let bad = |hashes: Vec<u8>, origin| ChainRun { namespace: [0; HASH], origin, hashes: Bytes(hashes) };
        for run in [
            bad(vec![0; 15], Origin::Root),
            bad(vec![0; HASH * (MAX_BLOCKS + 1)], Origin::Root),
            bad(vec![0; HASH], Origin::After { parent: [0; HASH], position: 0 }),
        ] {
            assert!(run.check().is_err());
        }
        assert!(Ask::Abandon { request: "x".repeat(MAX_NAME + 1) }.check().is_err());
        assert!(Ask::Released { ids: vec![0; MAX_BLOCKS + 1] }.check().is_err());
        let commit = |ids| Ask::Commit { request: "r".into(), ids, after: 0, wait_ms: 0 };
        let ids: Vec<_> = (0..5).map(BlockId).collect();
        let groups = GroupIds::of(&[&ids[..3], &[], &ids[3..]]);
        assert_eq!((groups.all(), groups.blocks()), (&[0, 1, 2, 3, 4][..], 3));
        assert_eq!(groups.places(), [0..3, 3..3, 3..5]);
        assert_eq!(commit(groups).check(), Ok(()));
        for (ids, counts) in [
            (vec![0; 3], vec![2]),
            (vec![0; 3], vec![4, u32::MAX]),
            (Vec::new(), vec![0; MAX_GROUPS + 1]),
            (vec![0; MAX_BLOCKS + 1], vec![MAX_BLOCKS as u32 + 1]),
        ] {
            assert!(commit(GroupIds { ids, counts }).check().is_err());
        }
        assert!(decode::<Call>(b"\xc1").is_err() && decode::<Call>(&[0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
