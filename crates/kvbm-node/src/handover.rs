//! What a daemon hands to the one that takes its place: the memory of each rank, and an index that
//! says which blocks are in it. The index is a file in memory: it may be long.

use kvbm::config::Config;
use kvbm::plan::BlockIdentity;
use kvbm::storage::SharedStorage;
use kvbm::{BlockId, GroupKind, HostContent, KeptHost, Rank, SharedHost, WorkerError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use crate::protocol::{HostTerms, Terms, decode, encode};
use crate::shape::{Difference, ModelShape};

/// Most bytes of an index, for each slot of host memory and in all.
const MAX_BLOCK_BYTES: u64 = 128;
const MAX_REST: u64 = 1 << 16;
/// Most ranks: so many files pass at a time, the index among them.
pub(crate) const MAX_RANKS: usize = 63;

/// The blocks in the memory of a rank.
#[derive(PartialEq, Serialize, Deserialize)]
pub(crate) struct RankIndex {
    /// Of the rank's memory.
    bytes: u64,
    blocks: Vec<(BlockId, BlockIdentity, u64)>,
}

/// What two daemons must agree on: how the memory of each rank lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HandoverTerms {
    pub(crate) model: ModelShape,
    pub(crate) host: HostTerms,
}

impl HandoverTerms {
    /// Of a daemon of this configuration.
    pub(crate) fn of(config: &Config) -> Result<Self, WorkerError> {
        let layouts = SharedHost::layouts_of(config, Rank(0))?;
        let model = ModelShape::new(&kinds_of(config), layouts.iter().map(|layout| layout.config()));
        let [_, blocks, _] = config.capacity_blocks();
        let bytes = layouts.iter().map(|layout| layout.total_bytes()).max().unwrap_or(0);
        let sharing = SharedHost::ranks_of_one_memory(config, Rank(0)).into();
        Ok(Self { model, host: HostTerms { blocks, bytes, sharing } })
    }

    /// The first difference between the terms of another daemon and these.
    pub(crate) fn difference(&self, theirs: &Terms) -> Option<Difference> {
        let host = |name: &str, of: fn(HostTerms) -> u64| {
            let theirs = theirs.host.map(of);
            let shown = || theirs.map_or_else(|| "no such value".into(), |value| value.to_string());
            (theirs != Some(of(self.host))).then(|| Difference {
                name: name.into(),
                theirs: shown(),
                ours: of(self.host).to_string(),
            })
        };
        theirs
            .model
            .difference(&self.model)
            .or_else(|| host("blocks of host memory (host.capacity)", |host| host.blocks))
            .or_else(|| {
                host("ranks of one host memory (host.one_copy, model.replicas, remote.enabled)", |host| {
                    host.sharing
                })
            })
            .or_else(|| host("bytes with staging rings (transfer.staging)", |host| host.bytes))
    }
}

/// What the layers of each cache group keep.
pub(crate) fn kinds_of(config: &Config) -> Vec<GroupKind> {
    match config.model.groups.as_slice() {
        [] => vec![GroupKind::Full],
        groups => groups.iter().map(|group| group.kind).collect(),
    }
}

/// The files that are passed on: the index, then the memory of each rank.
pub(crate) fn pack(ranks: &[KeptHost]) -> io::Result<Vec<OwnedFd>> {
    let index = |rank: &KeptHost| RankIndex {
        bytes: rank.memory.region().len(),
        blocks: rank.contents.iter().map(|it| (it.block, it.identity, it.checksum)).collect(),
    };
    let index: Vec<_> = ranks.iter().map(index).collect();
    let mut file = File::from(memfd_create("kvbm-index", MemfdFlags::CLOEXEC)?);
    // A memfd has mode 0777 at first, and a process that sees `/proc/PID/fd` can open it there.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    file.write_all(&encode(&index))?;
    let mut files = vec![OwnedFd::from(file)];
    for rank in ranks {
        files.push(rustix::io::fcntl_dupfd_cloexec(rank.memory.file().as_fd(), 0)?);
    }
    Ok(files)
}

/// The memory of each rank, out of what was passed on by a daemon whose memory has `slots` slots.
/// It is asked for in huge pages where `huge_pages` says so.
pub(crate) fn unpack(files: Vec<OwnedFd>, slots: u64, huge_pages: bool) -> Result<Vec<KeptHost>, String> {
    let mut files = files.into_iter();
    let mut file = File::from(files.next().ok_or("the daemon passed no index")?);
    let memories: Vec<OwnedFd> = files.collect();
    let most = MAX_REST + slots.saturating_mul(memories.len() as u64).saturating_mul(MAX_BLOCK_BYTES);
    let bytes = read_all(&mut file, most).map_err(|error| format!("the index cannot be read: {error}"))?;
    let ranks: Vec<RankIndex> = decode(&bytes).map_err(|why| format!("the index means nothing: {why}"))?;
    if ranks.len() != memories.len() {
        return Err(format!("an index of {} ranks came with the memory of {}", ranks.len(), memories.len()));
    }
    let kept = |(index, file): (RankIndex, OwnedFd)| {
        let mut memory = SharedStorage::map(file, index.bytes).map_err(|error| error.to_string())?;
        if huge_pages {
            memory.ask_huge();
        }
        let content = |(block, identity, checksum)| HostContent { block, identity, checksum };
        Ok(KeptHost { memory: Arc::new(memory), contents: index.blocks.into_iter().map(content).collect() })
    };
    ranks.into_iter().zip(memories).map(kept).collect()
}

fn read_all(file: &mut File, most: u64) -> io::Result<Vec<u8>> {
    let len = file.metadata()?.len();
    if len > most {
        let why = format!("{len} bytes, at most {most} go");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::SequenceHash;
    use kvbm::plan::{GroupId, NamespaceId};
    use kvbm::storage::HugePages;

    fn content(block: u32) -> HostContent {
        let hash = SequenceHash::from_bytes([0xee; 16]);
        let identity = BlockIdentity {
            namespace: NamespaceId(u32::MAX),
            group: GroupId(7),
            hash,
            parent: Some(hash),
            position: u32::MAX,
        };
        HostContent { block: BlockId(u32::MAX - block), identity, checksum: u64::MAX }
    }

    #[test]
    fn what_is_packed_is_unpacked_within_its_bound_and_nothing_else_is() {
        let memory = Arc::new(SharedStorage::create(8192, HugePages::No, None).unwrap());
        let rank =
            |blocks| KeptHost { memory: Arc::clone(&memory), contents: (0..blocks).map(content).collect() };
        let ranks = [rank(4000), rank(4000)];
        let files = pack(&ranks).unwrap();
        assert_eq!(rustix::fs::fstat(&files[0]).unwrap().st_mode & 0o777, 0o600);
        let found = unpack(files, 4000, true).unwrap();
        assert!(found.iter().zip(&ranks).all(|(found, rank)| found.contents == rank.contents));
        let refused = |files: Vec<OwnedFd>, slots| unpack(files, slots, false).err().unwrap();
        assert!(refused(pack(&ranks).unwrap(), 1).contains("at most"));
        assert!(refused(Vec::new(), 1).contains("no index"));
        let mut short = pack(&ranks).unwrap();
        short.pop();
        assert!(refused(short, 8000).contains("2 ranks came with the memory of 1"));
        let mut strange = pack(&ranks).unwrap();
        strange.rotate_left(1);
        assert!(refused(strange, 8000).contains("means nothing"));
    }
}
