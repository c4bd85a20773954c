//! Requests of which a part is there already: prompts of skewed popularity, several times as many
//! as fit, each behind one of a few instructions and before blocks that come once. What is worth
//! keeping here is not what was used last, so `hazard` chooses its victims, which is seen from the
//! counters: a row of it that followed recency would be of another policy, and is an error.

use crate::clock::{cpu_seconds, median};
use crate::ours::Ours;
use crate::peer::Peer;
use crate::rows::{self, BATCH};
use crate::side::{Side, mix};
use crate::{DEFAULT, Options, Table};
use kvbm_plan::Tier;
use kvbm_pool::{PolicyKind, TierCounters};

/// Blocks of a request: instructions, a prompt, and what comes once.
const INSTRUCTIONS: usize = 16;
const PROMPT: usize = 80;
/// Instructions that there are, and times that the blocks of all prompts are those of the pool.
const KINDS: u64 = 64;
const TIMES_THE_POOL: usize = 4;
/// The prompt of rank n comes in proportion to 1 / n to the power of this.
const SKEW: f64 = 0.9;

/// Blocks asked for before anything is measured, and between two measurements that are not of
/// requests, in capacities.
const WARM_UP: usize = 12;
const AGAIN: usize = 1;
/// Requests whose hashes are made at a time, outside of the clock.
const AT_ONCE: usize = 1000;
/// Requests between two calls of which holds are measured: as many blocks as those evict.
const REQUESTS_BETWEEN: usize = 1024 / BATCH;
/// Of the victims, the default policy must have chosen so many in a row that is to be of its
/// choices.
const LEAST_CHOSEN: f64 = 0.9;

/// Which requests come, the same for whoever serves them.
struct Workload {
    /// Up to which share of all requests each prompt and those of lower rank come.
    ends: Vec<f64>,
}

impl Workload {
    fn new(capacity: usize) -> Self {
        let prompts = (TIMES_THE_POOL * capacity / PROMPT).max(1);
        let mut ends = Vec::with_capacity(prompts);
        let mut sum = 0.0;
        for rank in 1..=prompts {
            sum += (rank as f64).powf(-SKEW);
            ends.push(sum);
        }
        ends.iter_mut().for_each(|end| *end /= sum);
        Self { ends }
    }

    /// The hashes of the request with this number.
    fn request<S: Side>(&self, number: u64) -> S::Chain {
        let drawn = (mix(number) >> 11) as f64 / (1_u64 << 53) as f64;
        let prompt = self.ends.partition_point(|&end| end < drawn).min(self.ends.len() - 1) as u64;
        let [instructions, prompt, once] = [(1, prompt % KINDS), (2, prompt), (3, number)]
            .map(|(part, number)| mix(mix(part).wrapping_add(number)));
        S::chain_of(BATCH, |index| {
            let part = if index < INSTRUCTIONS {
                instructions
            } else if index < INSTRUCTIONS + PROMPT {
                prompt
            } else {
                once
            };
            mix(part ^ index as u64)
        })
    }
}

/// A side in steady state under the workload.
struct Served<'a, S: Side> {
    full: rows::Full<S>,
    workload: &'a Workload,
    capacity: usize,
    /// Requests so far.
    next: u64,
}

/// What was measured: million blocks asked for a second, and which share of them was there.
struct Rate {
    blocks: f64,
    hits: f64,
}

impl<'a, S: Side> Served<'a, S> {
    fn new(side: S, workload: &'a Workload, capacity: usize) -> Self {
        let mut served = Self { full: rows::Full::by_others(side), workload, capacity, next: 0 };
        served.go_on(WARM_UP);
        served
    }

    fn requests(&mut self, count: usize) -> Vec<S::Chain> {
        requests::<S>(self.workload, &mut self.next, count)
    }

    /// Serves requests for so many capacities of blocks.
    fn go_on(&mut self, capacities: usize) {
        for _ in 0..(capacities * self.capacity).div_ceil(BATCH * AT_ONCE) {
            let requests = self.requests(AT_ONCE);
            serve(&self.full.side, &requests);
        }
    }

    /// One thread, in its CPU time.
    fn one_thread(&mut self, blocks: usize) -> Rate {
        let (mut seconds, mut hits, mut requests) = (0.0, 0, 0);
        while requests * BATCH < blocks {
            let chains = self.requests(AT_ONCE);
            seconds += cpu_seconds(|| hits += serve(&self.full.side, &chains));
            requests += chains.len();
        }
        let blocks = (requests * BATCH) as f64;
        Rate { blocks: blocks / seconds / 1e6, hits: hits as f64 / blocks }
    }
}

/// The next requests; `next` is the number of the first.
fn requests<S: Side>(workload: &Workload, next: &mut u64, count: usize) -> Vec<S::Chain> {
    let first = *next;
    *next += count as u64;
    (first..*next).map(|number| workload.request::<S>(number)).collect()
}

/// Blocks that were there.
fn serve<S: Side>(side: &S, requests: &[S::Chain]) -> usize {
    requests.iter().map(|chain| side.request(chain, BATCH)).sum()
}

/// Which share of the victims the policy has chosen since.
struct Choices {
    since: TierCounters,
}

impl Choices {
    fn from_now(side: &Ours) -> Self {
        Self { since: side.registry.counters(Tier::G1) }
    }

    fn share(&self, side: &Ours) -> f64 {
        let now = side.registry.counters(Tier::G1);
        let evicted = now.evicted - self.since.evicted;
        (now.evicted_by_choice - self.since.evicted_by_choice) as f64 / evicted.max(1) as f64
    }

    /// The share, which has to be nearly all of them.
    fn of_default(&self, side: &Ours, row: &str) -> Result<f64, String> {
        match self.share(side) {
            share if share >= LEAST_CHOSEN => Ok(share),
            share => Err(format!(
                "`{row}`: the default policy chose {:.1} % of the victims, the others went in order of recency, so this would be no \
                 row of its choices (at least {:.0} %). Its trial did not find it ahead of recency: look for what changed in \
                 crates/kvbm-pool/src/policy/hazard, or leave the group `requests` out (`--only`)",
                100.0 * share,
                100.0 * LEAST_CHOSEN
            )),
        }
    }
}

/// All rows of such requests.
pub fn rows(table: &mut Table, options: &Options) -> Result<(), String> {
    let workload = Workload::new(options.blocks);
    let served = |policy| Served::new(Ours::with_policy(options.blocks, policy), &workload, options.blocks);
    let (mut ours, mut default) = (served(PolicyKind::LruLeaf), served(DEFAULT));
    let mut peer = Served::new(Peer::new(options.blocks), &workload, options.blocks);
    throughput(&mut ours, &mut default, &mut peer, table, options)?;
    churn(&mut default, &mut peer, table, options)?;
    holds(&mut default, table)
}

fn throughput(
    ours: &mut Served<'_, Ours>,
    default: &mut Served<'_, Ours>,
    peer: &mut Served<'_, Peer>,
    table: &mut Table,
    options: &Options,
) -> Result<(), String> {
    let choices = Choices::from_now(&default.full.side);
    let mut rates: [Vec<Rate>; 3] = Default::default();
    for round in 0..options.rounds {
        for side in 0..rates.len() {
            let side = (side + round) % rates.len();
            rates[side].push(match side {
                0 => ours.one_thread(options.blocks / 2),
                1 => default.one_thread(options.blocks / 2),
                _ => peer.one_thread(options.blocks / 2),
            });
        }
    }
    let share = choices.of_default(&default.full.side, "requests_1m_default")?;
    let [ours, default, peer] = rates;
    let medians = |rates: &[Rate]| {
        let of = |value: fn(&Rate) -> f64| median(rates.iter().map(value).collect());
        (of(|rate| rate.blocks), of(|rate| rate.hits))
    };
    let (peer, peer_hits) = medians(&peer);
    for (suffix, rates) in [("", &ours), ("_default", &default)] {
        let (rate, hits) = medians(rates);
        table.row(&format!("requests_1m{suffix}"), "M/s", rate, Some(peer), Some(rate / peer));
        let name = format!("requests_hit_ratio{suffix}");
        table.row(&name, "share", hits, Some(peer_hits), Some(hits / peer_hits));
    }
    table.row("requests_chosen_default", "share", share, None, None);
    Ok(())
}

/// The churn of `churn_1m_default`, while the default policy chooses. Requests between two
/// measurements keep it so.
fn churn(
    default: &mut Served<'_, Ours>,
    peer: &mut Served<'_, Peer>,
    table: &mut Table,
    options: &Options,
) -> Result<(), String> {
    let (mut a, mut b, mut least) = (Vec::new(), Vec::new(), f64::INFINITY);
    for _ in 0..options.rounds {
        let choices = Choices::from_now(&default.full.side);
        a.push(default.full.churn(options.blocks / 2));
        least = least.min(choices.of_default(&default.full.side, "churn_1m_reuse_default")?);
        b.push(peer.full.churn(options.blocks / 2));
        default.go_on(AGAIN);
        peer.go_on(AGAIN);
    }
    table.rate("churn_1m_reuse_default", a, b);
    table.row("churn_chosen_default", "share", least, None, None);
    Ok(())
}

fn holds(default: &mut Served<'_, Ours>, table: &mut Table) -> Result<(), String> {
    let row = "lock_hold_p999_us_reuse";
    let choices = Choices::from_now(&default.full.side);
    let Served { full, workload, next, .. } = default;
    let time = full.hold_between(50_000, |side| {
        for _ in 0..REQUESTS_BETWEEN {
            side.request(&workload.request::<Ours>(*next), BATCH);
            *next += 1;
        }
    });
    choices.of_default(&default.full.side, row)?;
    table.row(row, "us", time, None, None);
    Ok(())
}
