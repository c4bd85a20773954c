//! What a run must have reached, so that to lose nothing says something: without it a part in which
//! nothing was acknowledged, or nothing was interrupted, would pass.

use serde_json::Value;

/// A figure of a part, and the least that it may be.
pub(super) type Floor = (&'static str, u64);

/// Blocks that were acknowledged when a life ended, on average: a life that flushes makes some
/// thirty durable before that, however slow the machine is, and the others find what is there.
const ACKNOWLEDGED: u64 = 10;
/// Lives over which chance may have it otherwise.
const FEW: u64 = 9;

/// Of a part that kills processes. Half of them are killed after a flush and three quarters
/// after their opening, by construction, so no machine is too slow for this.
pub(super) fn of_kills(rounds: u64) -> Vec<Floor> {
    vec![
        ("rounds", rounds),
        ("met_a_writer", rounds),
        ("ready", rounds - rounds / 4),
        ("flushed", rounds.div_ceil(2)),
        ("flushes", rounds.div_ceil(2)),
        ("made_durable", rounds),
        ("acknowledged", rounds.max(ACKNOWLEDGED * rounds.saturating_sub(FEW))),
    ]
}

/// Of a simulation of `seeds` seeds.
pub(super) fn of_simulation(seeds: u64) -> Vec<Floor> {
    vec![("seeds", seeds), ("acknowledged", seeds)]
}

/// The same, and of power that fails in the middle of anything.
pub(super) fn of_power_failures(seeds: u64) -> Vec<Floor> {
    let mut floors = of_simulation(seeds);
    floors.extend([("power_failures", seeds), ("in_a_change", seeds / 2), ("in_an_opening", seeds / 50)]);
    floors
}

/// What the part `name` fell short of, as its `report` says.
pub(super) fn missed(name: &str, report: &Value, floors: &[Floor]) -> Vec<String> {
    let miss = |(field, least): &Floor| match report[field].as_u64() {
        Some(found) if found >= *least => None,
        Some(found) => {
            Some(format!("{name} proves too little: {field} is {found}, at least {least} are wanted"))
        }
        None => Some(format!("{name} does not say {field}: {report}")),
    };
    floors.iter().filter_map(miss).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_run_that_does_nothing_is_not_enough() {
        let good = json!({
            "rounds": 10, "met_a_writer": 10, "ready": 8, "flushed": 5, "flushes": 40, "made_durable": 90, "acknowledged": 900,
        });
        let floors = of_kills(10);
        assert_eq!(missed("kill_9", &good, &floors), [""; 0]);
        for (field, least) in &floors {
            let mut weak = good.clone();
            weak[field] = (least - 1).into();
            let missed = missed("kill_9", &weak, &floors);
            assert_eq!(missed.len(), 1, "{missed:?}");
            assert!(missed[0].contains(&format!("kill_9 proves too little: {field} is")), "{missed:?}");
        }
        let ended = json!({ "ended": "exit status: 101" });
        assert_eq!(missed("turmoil_fs", &ended, &of_power_failures(20)).len(), of_power_failures(20).len());
        assert!(of_kills(200).contains(&("acknowledged", 1910)), "one of each life would be next to nothing");
        assert_eq!(of_kills(1).iter().map(|(_, least)| *least).min(), Some(1), "one round wants one of each");
    }
}
