//! What the threads of a worker have volumes do: blocks to objects and back, with payloads as bytes
//! of their own.

use super::{Names, failure_of, no_result};
use crate::cuts::{Cut, CutPart};
use crate::damaged_objects::DamagedObjects;
use kvbm_plan::{BlockIdentity, Failure, FailureKind};
use kvbm_volume::{BlobSlice, GetRequest, PayloadForm, PutRequest, Volume, VolumeError};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// How blocks of a cache group lie in objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectForm {
    /// What this rank holds.
    pub(crate) slice: BlobSlice,
    /// Of a payload of this rank.
    pub(crate) form: PayloadForm,
    pub(crate) bytes: usize,
}

/// A cache group as it is read.
pub(crate) struct ReadGroup {
    own: ObjectForm,
    cuts: Vec<Cut>,
    /// The cut that blocks were last found in: the next ones are likely to be of the same
    /// deployment.
    last_cut: AtomicUsize,
}

impl ReadGroup {
    pub(crate) fn new(own: ObjectForm, cuts: Vec<Cut>) -> Self {
        Self { own, cuts, last_cut: AtomicUsize::new(0) }
    }
}

/// Reads blocks.
pub(crate) struct ObjectReader {
    /// By id.
    groups: Vec<ReadGroup>,
    names: Names,
    /// Takes note of what turns out to be damaged.
    damaged: Arc<DamagedObjects>,
}

impl ObjectReader {
    pub(crate) fn new(groups: Vec<ReadGroup>, names: Names, damaged: Arc<DamagedObjects>) -> Self {
        Self { groups, names, damaged }
    }

    /// Reads blocks of a group, from whatever cut they are found in. A payload for each.
    pub(crate) fn read(
        &self,
        volume: &dyn Volume,
        group: usize,
        blocks: &[BlockIdentity],
        deadline: Instant,
    ) -> Vec<Result<Vec<u8>, Failure>> {
        // Plans of groups that there are not are not admitted.
        let group = &self.groups[group];
        let mut payloads = vec![vec![0; group.own.bytes]; blocks.len()];
        let mut results: Vec<Option<Result<(), Failure>>> = vec![None; blocks.len()];
        let is_open = |result: &Option<Result<(), Failure>>| match result {
            None => true,
            Some(result) => result.as_ref().is_err_and(|failure| failure.kind == FailureKind::Missing),
        };
        let first = group.last_cut.load(Ordering::Relaxed);
        let others = (0..group.cuts.len()).filter(|at| *at != first);
        for at in std::iter::once(first).chain(others) {
            let open: Vec<usize> = (0..blocks.len()).filter(|&block| is_open(&results[block])).collect();
            if open.is_empty() {
                break;
            }
            let wanted = blocks.iter().zip(&mut payloads).zip(&results).filter(|(_, result)| is_open(result));
            let mut wanted: Vec<_> =
                wanted.map(|((identity, payload), _)| (identity, payload.as_mut_slice())).collect();
            let fetched = self.fetch(volume, group, &group.cuts[at], &mut wanted, deadline);
            if fetched.iter().any(Result::is_ok) {
                group.last_cut.store(at, Ordering::Relaxed);
            }
            for (block, result) in open.into_iter().zip(fetched) {
                results[block] = Some(result);
            }
        }
        let settle =
            |(payload, result)| Option::unwrap_or_else(result, || Err(no_result(volume))).map(|()| payload);
        payloads.into_iter().zip(results).map(settle).collect()
    }

    /// Reads blocks of `group` from the objects of one cut.
    fn fetch(
        &self,
        volume: &dyn Volume,
        group: &ReadGroup,
        cut: &Cut,
        wanted: &mut [(&BlockIdentity, &mut [u8])],
        deadline: Instant,
    ) -> Vec<Result<(), Failure>> {
        let ObjectForm { slice: own, form, bytes } = group.own;
        let head_bytes = bytes / own.num_heads.max(1) as usize;
        // Heads of other ranks, which objects of larger cuts hold too.
        let others =
            |part: &CutPart| [part.before, part.after].map(|heads| vec![0; heads as usize * head_bytes]);
        let mut spare: Vec<[Vec<u8>; 2]> = wanted.iter().flat_map(|_| cut.parts.iter().map(others)).collect();
        let mut spare_of = spare.iter_mut();
        let mut requests = Vec::with_capacity(wanted.len() * cut.parts.len());
        for (identity, payload) in wanted.iter_mut() {
            let mut rest = &mut **payload;
            for (part, [before, after]) in cut.parts.iter().zip(&mut spare_of) {
                // Our own object is the whole payload, whatever its order.
                let (bytes, form) = if part.slice == own {
                    (rest.len(), form)
                } else {
                    let form = PayloadForm { pieces: part.slice.num_heads, ..form };
                    (part.heads as usize * head_bytes, form)
                };
                let (ours, later) = rest.split_at_mut(bytes);
                rest = later;
                let key = self.names.key_of(identity, part.slice);
                let seal = self.names.tier.seal.clone();
                requests.push(GetRequest { key, form, seal, pieces: vec![before, ours, after] });
            }
        }
        let fetched = volume.get(&mut requests, deadline);
        for (request, result) in requests.iter().zip(&fetched) {
            if result.as_ref().is_err_and(VolumeError::is_damaged) {
                self.damaged.note(volume.descriptor().id, request.key);
            }
        }
        let mut fetched = fetched.into_iter().map(|result| result.map_err(|error| failure_of(&error)));
        let block = |_: &(&BlockIdentity, &mut [u8])| {
            let parts = cut.parts.iter().map(|_| fetched.next().unwrap_or_else(|| Err(no_result(volume))));
            // All of them are taken, and the failure that is worse than a missing part is reported.
            let failures: Vec<Failure> = parts.filter_map(Result::err).collect();
            let worst = failures.iter().position(|failure| failure.kind != FailureKind::Missing);
            failures.into_iter().nth(worst.unwrap_or(0)).map_or(Ok(()), Err)
        };
        wanted.iter().map(block).collect()
    }
}

/// A block that is written: its payload, and the form of that.
pub(crate) type Written<'a> = (BlockIdentity, PayloadForm, &'a [u8]);

/// Writes blocks.
pub(crate) struct ObjectWriter {
    names: Names,
    /// What is written is not damaged any more.
    damaged: Arc<DamagedObjects>,
}

impl ObjectWriter {
    pub(crate) fn new(names: Names, damaged: Arc<DamagedObjects>) -> Self {
        Self { names, damaged }
    }

    /// Whether this rank writes: of ranks with the same bytes, one does.
    pub(crate) fn writes(&self) -> bool {
        self.names.tier.writes
    }

    /// Writes blocks, unless another rank does that.
    pub(crate) fn write(
        &self,
        volume: &dyn Volume,
        blocks: &[Written<'_>],
        deadline: Instant,
    ) -> Vec<Result<(), Failure>> {
        if !self.writes() {
            return blocks.iter().map(|_| Ok(())).collect();
        }
        let requests: Vec<PutRequest<'_>> = blocks
            .iter()
            .map(|(identity, form, payload)| {
                let (key, seal) = (self.names.key(identity), self.names.tier.seal.clone());
                PutRequest { key, form: *form, seal, pieces: vec![*payload] }
            })
            .collect();
        let mut stored = volume.put(&requests, deadline).into_iter();
        let settle = |request: &PutRequest<'_>| {
            let result = stored.next().ok_or_else(|| no_result(volume))?;
            result.map_err(|error| failure_of(&error))?;
            self.damaged.take(volume.descriptor().id, &[request.key]);
            Ok(())
        };
        requests.iter().map(settle).collect()
    }
}
