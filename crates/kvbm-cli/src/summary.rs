//! The result of a replay: what `--json` writes, and what the table and the report show.

use std::collections::BTreeMap;

use kvbm::metrics::{LatencyBucket, PathSummary};
use serde::Serialize;

/// The JSON of `kvbm replay --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests replayed.
    pub requests: u64,
    /// Blocks of all requests.
    pub blocks: u64,
    /// Blocks found, by the highest tier that held them.
    pub hits: Hits,
    /// Share of blocks whose whole prefix was on some tier, and came from there unharmed.
    pub hit_ratio: f64,
    /// The same over the first tenth of the requests.
    pub hit_ratio_first_10pct: f64,
    /// Blocks brought to G1 from a lower tier.
    pub onboarded_blocks: u64,
    /// Blocks whose bytes were compared with what they have to be.
    pub verified_blocks: u64,
    /// Of these, blocks that came from a lower tier; the others were in device memory all the time.
    pub verified_onboarded_blocks: u64,
    /// Blocks whose bytes were wrong.
    pub corrupt_blocks: u64,
    /// Blocks whose transfer failed; each was computed again or is not on the lower tier.
    pub failed_transfers: u64,
    /// Slots that hold damaged bytes and are not used again.
    pub quarantined_blocks: u64,
    /// Blocks whose offload was given up.
    pub offload_dropped: u64,
    /// Seconds, without parsing and start-up.
    pub wall_s: f64,
    /// What moved along each path.
    pub paths: BTreeMap<String, PathFigures>,
    /// Blocks that had to leave each tier.
    pub evictions: Evictions,
    /// What was written to disk, and what it was good for.
    pub g3: DiskWrites,
    /// The eviction policy.
    pub policy: String,
    /// Blocks that G1, G2 and G3 hold.
    pub capacity: [u64; 3],
    /// The seed.
    pub seed: u64,
    /// With `--model`: the share of blocks that a look at each group alone says could be served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oracle_hit_ratio: Option<f64>,
    /// With `--model`: the cache groups.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupFigures>,
    /// What each tenant had, where `--tenants` gave some a share; `(none)` for requests of nobody.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tenants: BTreeMap<String, TenantFigures>,
    /// What became of the events, where `--events` sent them somewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<EventFigures>,
}

/// A cache group of the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupFigures {
    /// What it is, as `model.groups` says it.
    pub group: String,
    /// Bytes of a block on one rank.
    pub block_bytes: u64,
    /// Bytes of the slot that holds it in G1.
    pub slot_bytes: u64,
    /// Different blocks that some tier has at the end.
    pub held_blocks: u64,
    /// Different blocks that the prefixes need which end where those of the requests do.
    pub needed_blocks: u64,
}

/// What a tenant asked for, found and has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TenantFigures {
    /// Its share of every tier.
    pub share: f64,
    /// Its requests.
    pub requests: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Blocks of these that were found on some tier.
    pub hits: u64,
    /// Their part of all.
    pub hit_ratio: f64,
    /// Device memory.
    pub g1: TenantOn,
    /// Host memory.
    pub g2: TenantOn,
    /// Disk.
    pub g3: TenantOn,
}

/// What a tenant has on a tier at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TenantOn {
    /// Blocks that are kept for it.
    pub limit: u32,
    /// Blocks that it has.
    pub blocks: u32,
    /// Blocks of its that had to leave.
    pub evicted: u64,
}

/// What became of the events of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventFigures {
    /// Who published them, as events name it.
    pub source: String,
    /// Events that the transport took.
    pub published: u64,
    /// Events that nobody will get.
    pub lost: u64,
    /// Times that events were lost.
    pub gaps: u64,
    /// Events that the transport had not taken at the end.
    pub unpublished: u64,
    /// Encoded bytes.
    pub bytes: u64,
    /// Batches.
    pub batches: u64,
    /// Blocks that G1, G2 and G3 held at the end: what a follower must have come to.
    pub held: [u64; 3],
    /// Why the transport did not take the last ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// Hits by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hits {
    /// Device memory.
    pub g1: u64,
    /// Host memory.
    pub g2: u64,
    /// Disk.
    pub g3: u64,
    /// Volumes.
    pub g4: u64,
}

impl Hits {
    /// In the order of the tiers.
    pub const fn by_tier(self) -> [u64; 4] {
        [self.g1, self.g2, self.g3, self.g4]
    }

    /// On any tier.
    pub const fn total(self) -> u64 {
        self.g1 + self.g2 + self.g3 + self.g4
    }
}

impl From<[u64; 4]> for Hits {
    fn from([g1, g2, g3, g4]: [u64; 4]) -> Self {
        Self { g1, g2, g3, g4 }
    }
}

/// Evictions by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Evictions {
    /// Device memory.
    pub g1: u64,
    /// Host memory.
    pub g2: u64,
    /// Disk.
    pub g3: u64,
}

/// Writes to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DiskWrites {
    /// Bytes of the blocks that were written, on all ranks together.
    pub bytes_written: u64,
    /// Blocks found on disk for each GiB that was written; nothing where nothing was. Blocks from
    /// an earlier run count as found.
    pub hits_per_gib_written: Option<f64>,
}

impl DiskWrites {
    /// So many bytes were written, and so many blocks found.
    pub fn new(bytes_written: u64, hits: u64) -> Self {
        let gib = bytes_written as f64 / f64::from(1 << 30);
        Self { bytes_written, hits_per_gib_written: (bytes_written > 0).then(|| hits as f64 / gib) }
    }
}

/// Figures of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PathFigures {
    /// Blocks that arrived.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes (10^9) per second while at least one transfer was in flight.
    pub gb_per_s: f64,
    /// Half of the transfers took at most so many microseconds.
    pub p50_us: f64,
    /// 99 of 100 took at most so many.
    pub p99_us: f64,
}

impl From<PathSummary> for PathFigures {
    fn from(path: PathSummary) -> Self {
        Self {
            blocks: path.blocks,
            bytes: path.bytes,
            gb_per_s: path.gb_per_s(),
            p50_us: path.latency.p50_us,
            p99_us: path.latency.p99_us,
        }
    }
}

/// A replay's summary with what only plots need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayResult {
    /// What was replayed: a file name, or the made-up workload.
    pub workload: String,
    /// The figures.
    pub summary: Summary,
    /// Hits in the course of the replay.
    pub timeline: Timeline,
    /// Latencies of each path.
    pub latencies: BTreeMap<String, Vec<LatencyBucket>>,
    /// Blocks of requests larger than G1 that were not computed.
    pub left_out: u64,
}

/// Hits in the course of a replay, in at most [`Timeline::POINTS`] equal shares of its requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    requests: u64,
    points: Vec<Point>,
}

/// One share of the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// Blocks that its requests asked for.
    pub blocks: u64,
    /// Blocks found, by tier.
    pub hits: [u64; 4],
}

impl Timeline {
    /// Most points.
    pub const POINTS: u64 = 200;

    /// A timeline of so many requests.
    pub fn new(requests: u64) -> Self {
        let points = vec![Point::default(); requests.clamp(1, Self::POINTS) as usize];
        Self { requests: requests.max(1), points }
    }

    /// Counts request number `index` (from 0), which asked for `blocks` blocks and found `hits`.
    pub fn record(&mut self, index: u64, blocks: u64, hits: [u64; 4]) {
        let points = self.points.len() as u64;
        let at = (u128::from(index) * u128::from(points) / u128::from(self.requests.max(1))) as u64;
        let Some(point) = self.points.get_mut(at.min(points.saturating_sub(1)) as usize) else { return };
        point.blocks += blocks;
        for (sum, n) in point.hits.iter_mut().zip(hits) {
            *sum += n;
        }
    }

    /// The points, in order.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Requests that the whole timeline stands for.
    pub fn requests(&self) -> u64 {
        self.requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_exactly_the_documented_fields() {
        let mut summary = Summary { seed: 7, ..Summary::default() };
        summary.paths.insert("g1_g2".into(), PathFigures::default());
        let json = serde_json::to_string(&summary).unwrap();
        assert_eq!(
            json,
            r#"{"requests":0,"blocks":0,"hits":{"g1":0,"g2":0,"g3":0,"g4":0},"hit_ratio":0.0,"hit_ratio_first_10pct":0.0,"onboarded_blocks":0,"verified_blocks":0,"verified_onboarded_blocks":0,"corrupt_blocks":0,"failed_transfers":0,"quarantined_blocks":0,"offload_dropped":0,"wall_s":0.0,"paths":{"g1_g2":{"blocks":0,"bytes":0,"gb_per_s":0.0,"p50_us":0.0,"p99_us":0.0}},"evictions":{"g1":0,"g2":0,"g3":0},"g3":{"bytes_written":0,"hits_per_gib_written":null},"policy":"","capacity":[0,0,0],"seed":7}"#
        );
    }

    #[test]
    fn what_a_written_gib_was_good_for() {
        assert_eq!(DiskWrites::new(0, 7).hits_per_gib_written, None);
        assert_eq!(DiskWrites::new(3 << 29, 12).hits_per_gib_written, Some(8.0));
    }

    #[test]
    fn the_timeline_loses_nothing_whatever_its_length() {
        for requests in [1, 3, 199, 200, 201, 1234] {
            let mut timeline = Timeline::new(requests);
            for index in 0..requests {
                timeline.record(index, 10, [1, 2, 3, 0]);
            }
            assert_eq!(timeline.points().len() as u64, requests.min(Timeline::POINTS));
            assert!(timeline.points().iter().all(|point| point.blocks >= 10), "{requests}");
            let blocks: u64 = timeline.points().iter().map(|point| point.blocks).sum();
            let hits: u64 = timeline.points().iter().map(|point| point.hits.iter().sum::<u64>()).sum();
            assert_eq!((blocks, hits), (requests * 10, requests * 6));
        }
    }
}
