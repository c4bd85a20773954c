//! A deployment with another number of ranks may have left blocks in our directory. This finds it,
//! and moves its blocks in where all our ranks are new, or a start that did so was cut short.

mod mark;

use super::WorkerError;
use super::disk::{disk_access, geometries, header, namespace_dir, open_disk, rank_dirs};
use super::memory::host_layout;
use crate::config::{Config, HostOrder};
use kvbm_disk::fault::JOURNAL_FILE;
use kvbm_disk::{Archive, DiskKeys, OpenError, offline};
use kvbm_layout::BlockLayout;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, Rank};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{DiskTier, NewRanks, OldFolder, OldFolders, Predecessor, PredecessorError, SlotGeometry};
use mark::Mark;
use std::collections::{BTreeSet, HashSet};
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Results of the blocks that a deployment with another number of ranks left on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TookOver {
    /// Its ranks.
    pub ranks: u32,
    /// Blocks that every rank of ours has now, with all those before them in their chains.
    pub blocks: u64,
    /// Blocks that stayed behind: incomplete, damaged, without a parent, without room or time here,
    /// or all of them.
    pub left_behind: u64,
    /// Why nothing was taken over, if that is so: the rank at fault, and what is wrong.
    pub refused: Option<String>,
}

/// How often a folder that another process takes over is tried again.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A deployment whose blocks are moving in.
struct Past {
    predecessor: Predecessor,
    ranks: u32,
    /// Ranks of ours whose turn is still to come.
    to_come: u32,
    /// How long they may take together.
    time: Duration,
    began: Instant,
    /// How long a rank's blocks may take to be durable.
    flush_deadline: Duration,
    mark: Mark,
    /// The next start is to look again.
    look_again: bool,
    refused: Option<String>,
}

impl Past {
    /// The blocks of a deployment of `ranks` ranks, of which nothing has moved yet.
    fn begin(config: &Config, predecessor: Predecessor, ranks: u32, mark: Mark, look_again: bool) -> Self {
        Self {
            predecessor,
            ranks,
            to_come: config.writers().count() as u32,
            time: config.disk.take_over,
            began: Instant::now(),
            flush_deadline: config.disk.flush_deadline,
            mark,
            look_again,
            refused: None,
        }
    }

    /// Moves blocks into the disk of a rank.
    fn move_in(&mut self, rank: Rank, ours: &[SlotGeometry], tier: &mut DiskTier) {
        let (rank, ranks) = (rank.0, self.ranks);
        let started = Instant::now();
        let share = self.time / self.to_come.max(1);
        let taken = self.predecessor.take_over(ours, tier, kvbm_plan::deadline_after(started, share));
        // What a rank does not need is for those after it.
        self.time = self.time.saturating_sub(started.elapsed());
        self.to_come = self.to_come.saturating_sub(1);
        match taken {
            Ok(taken) => {
                tracing::debug!(target: "kvbm", rank, ranks, ?taken, "G3: blocks of another number of ranks");
            }
            Err(error) => {
                tracing::warn!(target: "kvbm", rank, ranks, %error, "G3: blocks of another number of ranks cannot be taken over");
                self.refused.get_or_insert(error.to_string());
            }
        }
        if let Err(error) = tier.engine.flush(self.flush_deadline) {
            tracing::warn!(target: "kvbm", rank, %error, "G3: blocks that were taken over are not durable yet: the next start looks again");
            self.look_again = true;
        }
    }

    /// The sum of it.
    fn end(self) -> TookOver {
        let left_out = self.predecessor.left_out();
        let blocks = if self.refused.is_some() { 0 } else { self.predecessor.taken() };
        let left_behind = left_out.total() + self.predecessor.len() as u64 - blocks;
        tracing::info!(
            target: "kvbm", ranks = self.ranks, blocks, left_behind, ?left_out, seconds = self.began.elapsed().as_secs_f64(),
            "G3: blocks of another number of ranks were taken over; their old folders keep their space until `kvbm disk clear`"
        );
        if !self.look_again {
            self.mark.clear();
        }
        TookOver { ranks: self.ranks, blocks, left_behind, refused: self.refused }
    }
}

/// Moves in, for all our ranks, what a deployment with another number of ranks left. Of workers in
/// several processes the first one does so, and the others wait for it. `disk`: the blocks of G3.
pub(super) fn take_over(config: &Config, keys: &DiskKeys, disk: u32, tag: NamespaceTag) -> Vec<TookOver> {
    if disk == 0 || config.disk.take_over.is_zero() {
        return Vec::new();
    }
    // Released when it is dropped.
    let Some(_lock) = lock(config, tag) else { return Vec::new() };
    let (past, mut took_over) = find(config, keys, disk, tag);
    let Some(mut past) = past else { return took_over };
    let moved = config.writers().try_for_each(|rank| move_in((config, keys), &mut past, disk, tag, rank));
    match moved {
        Ok(()) => took_over.push(past.end()),
        Err(error) => {
            // The mark stays: the next start begins again.
            tracing::warn!(target: "kvbm", ranks = past.ranks, %error, "G3: blocks of another number of ranks were not taken over by all ranks");
            let (ranks, left_behind) = (past.ranks, past.predecessor.len() as u64);
            took_over.push(TookOver { ranks, blocks: 0, left_behind, refused: Some(error.to_string()) });
        }
    }
    took_over
}

fn move_in(
    (config, keys): (&Config, &DiskKeys),
    past: &mut Past,
    disk: u32,
    tag: NamespaceTag,
    rank: Rank,
) -> Result<(), WorkerError> {
    let Some(geometries) = ours(config, rank)? else { return Ok(()) };
    let layouts = config.group_ids().map(|group| host_layout(config, group, rank, 1));
    let layouts = layouts.collect::<Result<Vec<_>, _>>()?;
    let layouts: Vec<&dyn BlockLayout> = layouts.iter().map(|layout| layout as _).collect();
    let mut tier = open_disk(config, keys, &layouts, disk, tag, rank)?;
    past.move_in(rank, &geometries, &mut tier);
    Ok(())
}

/// What a rank of ours keeps of the blocks of each cache group.
fn ours(config: &Config, rank: Rank) -> Result<Option<Vec<SlotGeometry>>, WorkerError> {
    geometries(config, u32::from(rank.0), config.parallelism.tensor_parallel, config.host.order)
}

/// Locks the folder of the namespace against other workers that look for blocks to take over. None
/// where there is no such folder, hence nothing to take over, or another process keeps it for too
/// long.
fn lock(config: &Config, tag: NamespaceTag) -> Option<File> {
    let folder = namespace_dir(config.disk.dir.as_ref()?, tag);
    let file = File::open(&folder).ok()?;
    let until = kvbm_plan::deadline_after(Instant::now(), 2 * config.disk.take_over);
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOCK_PAUSE),
            Err(error) => {
                tracing::warn!(
                    target: "kvbm", folder = %folder.display(), %error,
                    "G3: whether there are blocks of another number of ranks is not known"
                );
                return None;
            }
        }
    }
}

/// The deployment whose blocks move in, and those that cannot. It is the one that wrote last and
/// has some, if our ranks are all new or an earlier start did not come to the end of this.
fn find(config: &Config, keys: &DiskKeys, blocks: u32, tag: NamespaceTag) -> (Option<Past>, Vec<TookOver>) {
    let Some(first) = rank_dirs(config, tag, 0, config.parallelism.tensor_parallel).into_iter().next() else {
        return (None, Vec::new());
    };
    let mark = Mark::in_folder(&first);
    let again = mark.is_set();
    let new = || config.writers().all(|rank| is_new(config, tag, rank));
    if blocks == 0 || config.disk.take_over.is_zero() || !(again || new()) {
        return (None, Vec::new());
    }
    if !config.model.divides_anew() {
        return (
            None,
            others(config, tag).into_iter().map(|ranks| whole((config, keys), tag, ranks)).collect(),
        );
    }
    let Ok(Some(geometries)) = config
        .writers()
        .map(|rank| ours(config, rank).transpose())
        .collect::<Option<Result<Vec<_>, _>>>()
        .transpose()
    else {
        return (None, Vec::new());
    };
    // Opening it tells what is wrong.
    let Ok(held) = held(config, keys, tag) else { return (None, Vec::new()) };
    let (mut refused, mut look_again) = (Vec::new(), false);
    for ranks in others(config, tag) {
        let folders = folders(config, tag, ranks);
        match open((config, keys), &folders, tag, &geometries, blocks, &held) {
            Ok(predecessor) if predecessor.is_empty() => refused.extend(unusable(ranks, &predecessor)),
            Ok(predecessor) => {
                let left_out = predecessor.left_out();
                tracing::info!(
                    target: "kvbm", ranks, blocks = predecessor.len(), ?left_out, again, time = ?config.disk.take_over,
                    "G3: blocks of another number of ranks are taken over"
                );
                mark.set();
                return (Some(Past::begin(config, predecessor, ranks, mark, look_again)), refused);
            }
            Err(error) => {
                let busy = matches!(error, PredecessorError::Open { source: OpenError::Busy { .. }, .. });
                look_again |= busy;
                refused.push(cannot((config, keys), tag, ranks, &error, busy));
            }
        }
    }
    if look_again {
        mark.set();
    } else if again {
        mark.clear();
    }
    (None, refused)
}

/// What is said of blocks of which none can be used.
fn unusable(ranks: u32, predecessor: &Predecessor) -> Option<TookOver> {
    let left_behind = predecessor.left_out().total();
    let reason = format!("none of its blocks can be used: {:?}", predecessor.left_out());
    (left_behind > 0).then_some(TookOver { ranks, blocks: 0, left_behind, refused: Some(reason) })
}

/// Ranks of a deployment of `ranks` ranks that wrote.
fn writers(config: &Config, ranks: u32) -> impl Iterator<Item = u32> + '_ {
    (0..ranks).filter(move |rank| config.model.writer(*rank, ranks) == *rank)
}

/// Their folders.
fn folders(config: &Config, tag: NamespaceTag, ranks: u32) -> OldFolders {
    let folder = |rank: u32| {
        let dirs = rank_dirs(config, tag, rank, ranks);
        let mut groups = Vec::new();
        if config.model.groups.as_slice().len() > 1 {
            for order in [HostOrder::Nhd, HostOrder::Universal] {
                let geometries = geometries(config, rank, ranks, order);
                let header = header(config, rank, ranks, order);
                if let (Ok(Some(geometries)), Ok(header)) = (geometries, header) {
                    groups.push((header, geometries));
                }
            }
        }
        OldFolder { rank, dirs, groups }
    };
    OldFolders { ranks, of: writers(config, ranks).map(folder).collect() }
}

/// Opens a deployment whose blocks all our ranks can use.
fn open(
    (config, keys): (&Config, &DiskKeys),
    folders: &OldFolders,
    tag: NamespaceTag,
    ours: &[Vec<SlotGeometry>],
    capacity: u32,
    held: &[(BlockId, BlockIdentity)],
) -> Result<Predecessor, PredecessorError> {
    let kinds = config.model.cache_groups().into_iter().map(|group| group.kind);
    let without_parents: Vec<GroupId> = (0..)
        .map(GroupId)
        .zip(kinds)
        .filter_map(|(group, kind)| (kind != GroupKind::Full).then_some(group))
        .collect();
    let new = NewRanks {
        namespace: *tag.as_bytes(),
        access: disk_access(config),
        keys: Some(keys),
        groups: &ours[0],
        without_parents: &without_parents,
        capacity,
        held,
    };
    let predecessor = Predecessor::open(folders, &new)?;
    ours.iter().try_for_each(|ours| predecessor.covers(ours))?;
    Ok(predecessor)
}

/// Says that nothing of a deployment moves in, and why.
fn cannot(
    (config, keys): (&Config, &DiskKeys),
    tag: NamespaceTag,
    ranks: u32,
    error: &PredecessorError,
    busy: bool,
) -> TookOver {
    let blocks = |rank| {
        let dirs = rank_dirs(config, tag, rank, ranks);
        offline::inspect(&dirs, Some(keys)).map_or(0, |found| found.blocks)
    };
    let left_behind = writers(config, ranks).map(blocks).max().unwrap_or(0);
    let hint = if busy {
        "the next start tries again"
    } else {
        "they stay where they are, `kvbm disk clear` removes them"
    };
    tracing::warn!(
        target: "kvbm", ranks, left_behind, %error,
        "G3: blocks of another number of ranks cannot be taken over: {hint}"
    );
    TookOver { ranks, blocks: 0, left_behind, refused: Some(error.to_string()) }
}

/// Blocks that have a part without heads stay where they are.
fn whole((config, keys): (&Config, &DiskKeys), tag: NamespaceTag, ranks: u32) -> TookOver {
    let error = if config.model.is_opaque() {
        PredecessorError::Opaque { ranks }
    } else {
        PredecessorError::Groups { ranks }
    };
    cannot((config, keys), tag, ranks, &error, false)
}

/// Blocks that all our ranks have already, each in one slot.
fn held(
    config: &Config,
    keys: &DiskKeys,
    tag: NamespaceTag,
) -> Result<Vec<(BlockId, BlockIdentity)>, OpenError> {
    let ours = config.parallelism.tensor_parallel;
    let mut held: Option<HashSet<(BlockId, BlockIdentity)>> = None;
    for rank in config.writers() {
        let dirs = rank_dirs(config, tag, u32::from(rank.0), ours);
        let blocks = match Archive::open(&dirs, disk_access(config), Some(keys)) {
            Ok(archive) => archive.blocks(),
            Err(OpenError::NoJournal { .. }) => Vec::new(),
            Err(error) => return Err(error),
        };
        let blocks: HashSet<_> = blocks.into_iter().map(|found| (found.slot, found.identity)).collect();
        held = Some(match held {
            Some(held) => &held & &blocks,
            None => blocks,
        });
    }
    Ok(held.unwrap_or_default().into_iter().collect())
}

/// Whether a rank has no journal.
fn is_new(config: &Config, tag: NamespaceTag, rank: Rank) -> bool {
    let dirs = rank_dirs(config, tag, u32::from(rank.0), config.parallelism.tensor_parallel);
    let journal = dirs.first().map(|dir| std::fs::metadata(dir.join(JOURNAL_FILE)));
    matches!(journal, Some(Err(error)) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

/// Numbers of ranks of other deployments in our folder, the one first that wrote last.
fn others(config: &Config, tag: NamespaceTag) -> Vec<u32> {
    let Some(dir) = &config.disk.dir else { return Vec::new() };
    let Ok(entries) = std::fs::read_dir(namespace_dir(dir, tag)) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let found: BTreeSet<u32> = names.filter_map(|name| ranks_of(&name)).collect();
    let mut found: Vec<_> = found
        .into_iter()
        .filter(|ranks| *ranks != config.parallelism.tensor_parallel)
        .map(|ranks| (last_written(&rank_dirs(config, tag, 0, ranks)), ranks))
        .collect();
    found.sort_unstable_by(|one, other| other.cmp(one));
    found.into_iter().map(|(_, ranks)| ranks).collect()
}

/// The number of ranks in the name of a folder.
fn ranks_of(name: &str) -> Option<u32> {
    let (rank, ranks) = name.strip_prefix("rank-")?.split_once("-of-")?;
    let (rank, ranks): (u16, u16) = (rank.parse().ok()?, ranks.parse().ok()?);
    (rank < ranks).then_some(ranks.into())
}

/// When the journal of a rank was last written.
fn last_written(dirs: &[PathBuf]) -> Option<SystemTime> {
    std::fs::metadata(dirs.first()?.join(JOURNAL_FILE)).ok()?.modified().ok()
}

#[cfg(test)]
mod tests {
    use super::ranks_of;

    #[test]
    fn folders_of_ranks_are_distinguished_from_others() {
        assert_eq!(ranks_of("rank-3-of-4"), Some(4));
        for other in [
            "rank-4-of-4",
            "rank-0-of-0",
            "rank--1-of-4",
            "rank-0-of-70000",
            "rank-0",
            "LOCK",
            "rank-0-of-4.old",
        ] {
            assert_eq!(ranks_of(other), None, "{other}");
        }
    }
}
