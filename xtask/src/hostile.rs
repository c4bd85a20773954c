//! `cargo xtask hostile`: strangers send random bytes to every socket that listens, while honest
//! clients are served.
//!
//! The work is done by `crates/kvbm-node/examples/node`; this builds it and judges what it found.

use crate::json_report;
use crate::node_programs::NodePrograms;
use crate::steps::Outcome;
use crate::workspace::Workspace;
use serde_json::Value;
use std::path::PathBuf;

/// Growth of resident memory that the bounds of docs/security.md allow, in KiB: queues, heads and
/// bodies of as many connections as each socket takes.
const BOUND_KIB: u64 = 64 << 10;
/// Longest time in which an honest client may be without an answer, in seconds: what a stranger may
/// hold a connection for, and the next try.
const LONGEST_WAIT: f64 = 10.0;
/// Descriptors that a process may have more of when the strangers are gone.
const SPARE: u64 = 4;

/// Threads that a process may have more of meanwhile: docs/security.md bounds the connections and
/// handshakes of each socket.
const BOUND_THREADS: u64 = 256;

/// Share of the streams asked for that each socket must have had: fewer show less than was asked.
/// The step of `cargo xtask test` takes what a busy machine sends.
const LEAST_SHARE: f64 = 0.95;
const LEAST_SHARE_OF_STEP: f64 = 0.05;

/// How long, and how many strangers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    seconds: u64,
    rate: u64,
    seed: u64,
    json: Option<PathBuf>,
}

impl Options {
    /// Reads `[--seconds N] [--rate N] [--seed N] [--json FILE]`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { seconds: 600, rate: 1000, seed: 1, json: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("`{name}` of `hostile` needs a value"))?;
            let number = |most: u64| {
                let number = value.parse::<u64>().ok().filter(|number| (1..=most).contains(number));
                number.ok_or_else(|| format!("{name} {value}: expected 1 to {most}"))
            };
            match name.as_str() {
                "--seconds" => options.seconds = number(86_400)?,
                "--rate" => options.rate = number(100_000)?,
                "--seed" => options.seed = number(u64::MAX)?,
                "--json" => options.json = Some(value.into()),
                other => return Err(format!("unknown argument `{other}` of `hostile`")),
            }
        }
        Ok(options)
    }
}

/// Runs it; whether every bound held.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let (report, wrong) = hostile(&Workspace::load()?, options, LEAST_SHARE)?;
    json_report::deliver(options.json.as_deref(), &report)?;
    for line in &wrong {
        println!("{line}");
    }
    Ok(wrong.is_empty())
}

/// A few seconds, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let options = Options { seconds: 5, rate: 300, seed: 1, json: None };
    match hostile(workspace, &options, LEAST_SHARE_OF_STEP) {
        Ok((_, wrong)) if wrong.is_empty() => Outcome::Passed { tests: 0 },
        Ok((report, wrong)) => {
            Outcome::Failed { why: format!("{}\n{report:#}", wrong.join("\n")), tests: 0, failed: 0 }
        }
        Err(error) => Err(error).into(),
    }
}

/// What the program found, and a line for each bound that did not hold.
fn hostile(
    workspace: &Workspace,
    options: &Options,
    least_share: f64,
) -> anyhow::Result<(Value, Vec<String>)> {
    let programs = NodePrograms::build(workspace, "hostile")?;
    println!("strangers for {} s, {} streams a second at each socket", options.seconds, options.rate);
    let Options { seconds, rate, seed, .. } = *options;
    let arguments = [("--seconds", seconds), ("--rate", rate), ("--seed", seed), ("--pause-ms", 20)];
    let (ended_well, report) = programs.run("hostile", &arguments)?;
    let mut wrong = judge(&report, options, least_share);
    if !ended_well {
        wrong.push("the honest engine: see above".to_owned());
    }
    Ok((report, wrong))
}

/// A line for each bound that does not hold.
fn judge(report: &Value, options: &Options, least_share: f64) -> Vec<String> {
    let mut wrong = Vec::new();
    let asked = options.seconds.saturating_mul(options.rate);
    let least = asked as f64 * least_share;
    let rows = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    for socket in rows("sockets") {
        let name = &socket["name"];
        let waited = socket["longest_wait_s"].as_f64().unwrap_or(f64::INFINITY);
        if waited > LONGEST_WAIT {
            wrong.push(format!("{name}: its honest client waited {waited} s; {LONGEST_WAIT} s are allowed"));
        }
        let streams = socket["streams"].as_u64().unwrap_or(0);
        if (streams as f64) < least {
            wrong.push(format!(
                "{name}: {streams} of {asked} streams reached it, {least:.0} are needed: use a quieter machine"
            ));
        }
        if socket["alerts"].as_u64() == Some(0) {
            wrong.push(format!("{name}: it refused no certificate, so nothing was shown"));
        }
    }
    for process in rows("processes") {
        let (name, number) = (&process["name"], |key: &str| process[key].as_u64().unwrap_or(0));
        let grown = number("rss_most_kib").saturating_sub(number("rss_before_kib"));
        if grown > BOUND_KIB {
            wrong.push(format!("{name}: its memory grew by {grown} KiB; {BOUND_KIB} are allowed"));
        }
        let (before, after) = (number("descriptors_before"), number("descriptors_after"));
        if after > before + SPARE || after == 0 {
            wrong.push(format!("{name}: {before} descriptors before, {after} behind the attack"));
        }
        let [before, most, after] =
            ["before", "most", "after"].map(|when| number(&format!("threads_{when}")));
        if most > before + BOUND_THREADS || after > before + SPARE {
            wrong.push(format!("{name}: {before} threads before, {most} at most, {after} behind the attack"));
        }
    }
    if rows("sockets").is_empty() || rows("processes").is_empty() {
        wrong.push(format!("{} s without a report", options.seconds));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_have_defaults_and_bounds() {
        assert_eq!(parse("").unwrap(), Options { seconds: 600, rate: 1000, seed: 1, json: None });
        assert_eq!(parse("--seconds 5 --rate 7").unwrap().rate, 7);
        assert!(parse("--seconds").unwrap_err().contains("needs a value"));
        assert!(parse("--rate 0").unwrap_err().contains("1 to 100000"));
        assert!(parse("--fast 1").unwrap_err().contains("unknown argument"));
    }

    #[test]
    fn each_bound_that_does_not_hold_is_named() {
        let report = |wait: f64, most: u64, after: u64| {
            let socket = json!({ "name": "metrics", "streams": 590_000, "longest_wait_s": wait });
            let process = json!({ "name": "serve", "rss_before_kib": 1000, "rss_most_kib": most,
                "descriptors_before": 20, "descriptors_after": after,
                "threads_before": 9, "threads_most": most / 100, "threads_after": 9 });
            let report = json!({ "sockets": [socket], "processes": [process] });
            judge(&report, &parse("").unwrap(), LEAST_SHARE)
        };
        assert_eq!(report(1.0, 2000, 20), Vec::<String>::new());
        assert!(report(11.0, 2000, 20)[0].contains("metrics"));
        assert!(report(1.0, 100_000, 20)[0].contains("grew"));
        assert!(report(1.0, 2000, 40)[0].contains("descriptors"));
        assert!(report(1.0, 2000, 0)[0].contains("descriptors"));
        assert!(report(1.0, 60_000, 20)[0].contains("600 at most"));
        let socket = json!({ "name": "worker_tls", "streams": 500_000, "longest_wait_s": 1, "alerts": 0 });
        let process = json!({ "name": "worker_tls", "descriptors_after": 1 });
        let report = json!({ "sockets": [socket], "processes": [process] });
        let wrong = judge(&report, &parse("").unwrap(), LEAST_SHARE);
        assert!(wrong[0].contains("500000 of 600000 streams") && wrong[1].contains("no certificate"));
        assert_eq!(judge(&report, &parse("").unwrap(), LEAST_SHARE_OF_STEP).len(), 1);
        assert_eq!(judge(&json!({}), &parse("").unwrap(), LEAST_SHARE).len(), 1);
    }
}
