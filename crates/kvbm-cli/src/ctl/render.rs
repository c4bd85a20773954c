//! Answers for people.

use std::fmt::Write;

use serde_json::Value;

use super::CtlCall;
use crate::human::{bytes, count, micros, percent, share};
use crate::table::Table;

/// The answer to a call as text.
pub(super) fn answer(call: &CtlCall, answer: &Value) -> String {
    match call {
        CtlCall::Status => status(answer),
        CtlCall::LookUp(_) => look_up(answer),
        CtlCall::Pin { .. } => {
            format!("{} of {} blocks are pinned\n", number(answer, "pinned"), number(answer, "asked"))
        }
        CtlCall::Unpin { .. } => format!("{} pins ended\n", number(answer, "ended")),
        CtlCall::Ttl { .. } => time_to_live(answer),
        CtlCall::Quotas { .. } => quotas(answer),
        CtlCall::Clear { .. } => {
            format!("{} blocks removed from {}\n", number(answer, "removed"), text(&answer["tier"]))
        }
        CtlCall::Forget { .. } => receipt(answer),
        CtlCall::Flush { .. } => format!("{} blocks are durable\n", number(answer, "durable_blocks")),
        CtlCall::Drain { .. } => drained(answer),
        CtlCall::Volumes => volumes(answer),
        CtlCall::Log { .. } => match answer["level"].as_str() {
            Some(level) => format!("the log shows {} and above\n", plain(level)),
            None => "the program that has the manager decides what the log shows\n".to_owned(),
        },
    }
}

fn time_to_live(answer: &Value) -> String {
    let iterations = answer["iterations"].as_u64().map(|count_of| format!("{} iterations", count(count_of)));
    let limits: Vec<_> = iterations.into_iter().chain(answer["seconds"].as_u64().map(age)).collect();
    match limits.as_slice() {
        [] => "blocks stay until their slots are needed\n".to_owned(),
        limits => format!("blocks leave after {} without use\n", limits.join(" or ")),
    }
}

/// Text of others, without what a terminal would obey.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| "-".to_owned(), plain)
}

fn whole(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn number(value: &Value, name: &str) -> String {
    count(whole(value, name))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// `3 d 4 h`, `5 min`, `12 s`.
fn age(seconds: u64) -> String {
    let parts = [(seconds / 86_400, "d"), (seconds / 3600 % 24, "h"), (seconds / 60 % 60, "min")];
    let shown: Vec<_> = parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n} {unit}")).collect();
    if shown.is_empty() { format!("{seconds} s") } else { shown.join(" ") }
}

/// Who answers, and what state it is in.
pub(super) fn heading(status: &Value) -> String {
    let state = match (status["shut_down"].as_bool(), status["draining"].as_bool()) {
        (Some(true), _) => ", drained",
        (_, Some(true)) => ", draining",
        _ => "",
    };
    format!(
        "kvbm {}, {}, process {}, up {}{state}",
        text(&status["version"]),
        text(&status["model"]),
        whole(status, "pid"),
        age(whole(status, "uptime_s"))
    )
}

/// The tiers that exist.
pub(super) fn tiers(status: &Value) -> impl Iterator<Item = &Value> {
    list(&status["tiers"]).iter().filter(|tier| whole(tier, "capacity") > 0)
}

fn status(answer: &Value) -> String {
    let mut out = format!("{}\n", heading(answer));
    let pages = answer["host_pages"].as_str().map(|pages| format!(", host memory of {}", plain(pages)));
    let pages = pages.unwrap_or_default();
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        out,
        "namespace {}, epoch {}, iteration {}, log level {}{pages}\n",
        text(&answer["namespace"]),
        whole(answer, "epoch"),
        number(answer, "iteration"),
        text(&answer["log_level"])
    );
    let mut table =
        Table::new(["tier", "capacity", "used", "cached", "in use", "pinned", "hit blocks", "evicted"]);
    for tier in tiers(answer) {
        table.row([
            text(&tier["tier"]),
            number(tier, "capacity"),
            number(tier, "used"),
            number(tier, "cached"),
            count(whole(tier, "active") + whole(tier, "held") + whole(tier, "arriving")),
            number(tier, "pinned"),
            number(tier, "hit_blocks"),
            number(tier, "evicted_blocks"),
        ]);
    }
    out += &table.render();
    let here: u64 = list(&answer["tiers"]).iter().map(|tier| whole(tier, "hit_blocks")).sum();
    let peers = whole(answer, "peer_hit_blocks");
    let (hits, asked) = (here + peers, whole(answer, "lookup_blocks"));
    let at_peers = if peers > 0 { format!(", {} at peers", count(peers)) } else { String::new() };
    let _ = writeln!(
        out,
        "\n{} of {} blocks found ({}){at_peers}",
        count(hits),
        count(asked),
        percent(share(hits, asked))
    );
    out += &paths(answer);
    out += &troubles(answer);
    let engines = list(&answer["engines"]);
    if !engines.is_empty() {
        let mut table = Table::new(["engine", "blocks", "processes", "ready"]);
        for engine in engines {
            let pids: Vec<_> = list(&engine["pids"]).iter().map(ToString::to_string).collect();
            let ready = if engine["ready"].as_bool() == Some(true) { "yes" } else { "no" };
            table.row([text(&engine["name"]), number(engine, "blocks"), pids.join(" "), ready.to_owned()]);
        }
        let _ = write!(out, "\n{}", table.render());
    }
    if !list(&answer["volumes"]).is_empty() {
        let _ = write!(out, "\n{}", volumes(answer));
    }
    if !list(&answer["tenants"]).is_empty() {
        let _ = write!(out, "\n{}", quotas(answer));
    }
    out
}

fn paths(answer: &Value) -> String {
    let used = |path: &&Value| {
        ["blocks", "queued_blocks", "running_blocks"].iter().any(|name| whole(path, name) > 0)
    };
    let used: Vec<_> = list(&answer["paths"]).iter().filter(used).collect();
    if used.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["path", "blocks", "moved", "while busy", "p50", "p99", "waiting", "running"]);
    for path in used {
        let busy = path["busy_s"].as_f64().unwrap_or(0.0);
        let speed = if busy > 0.0 { whole(path, "bytes") as f64 / busy } else { 0.0 };
        table.row([
            text(&path["path"]),
            number(path, "blocks"),
            bytes(whole(path, "bytes")),
            format!("{}/s", bytes(speed as u64)),
            micros(path["p50_us"].as_f64().unwrap_or(0.0)),
            micros(path["p99_us"].as_f64().unwrap_or(0.0)),
            number(path, "queued_blocks"),
            number(path, "running_blocks"),
        ]);
    }
    format!("\n{}", table.render())
}

/// A line for everything that is not as it should be.
pub(super) fn troubles(status: &Value) -> String {
    let mut out = String::new();
    for rank in list(&status["ranks"]).iter().filter(|rank| rank["lost"].as_bool() == Some(true)) {
        let _ = writeln!(out, "! rank {} is lost: start its worker again", whole(rank, "rank"));
    }
    for (at, directory) in list(&status["disk"]["directories"]).iter().enumerate() {
        let (reads, writes) = (text(&directory["reads"]), text(&directory["writes"]));
        if reads != "closed" || writes != "closed" {
            let why = text(&directory["failure"]);
            let _ = writeln!(
                out,
                "! directory {at} of the disk: breaker of reads {reads}, of writes {writes}: {why}"
            );
        }
    }
    for peer in list(&status["peers"]).iter().filter(|peer| peer["circuit"].as_str() != Some("closed")) {
        let (node, why) = (whole(peer, "node"), text(&peer["failure"]));
        let _ = writeln!(out, "! peer {node} is left alone: {why}");
    }
    for volume in list(&status["volumes"]).iter().filter(|volume| volume["state"].as_str() != Some("up")) {
        let why =
            volume["failure"].as_str().or(volume["refusal"].as_str()).unwrap_or("a rank cannot open it");
        let _ =
            writeln!(out, "! volume {} is {}: {}", whole(volume, "id"), text(&volume["state"]), plain(why));
    }
    for tier in list(&status["tiers"]).iter().filter(|tier| whole(tier, "corrupt_blocks") > 0) {
        let _ = writeln!(
            out,
            "! {}: {} blocks were damaged",
            text(&tier["tier"]),
            number(tier, "corrupt_blocks")
        );
    }
    if out.is_empty() { out } else { format!("\n{out}") }
}

fn look_up(answer: &Value) -> String {
    let (asked, found) = (whole(answer, "asked"), whole(answer, "found"));
    let on = |tier: &str| format!("{tier} {}", number(&answer["by_tier"], tier));
    let tiers = ["g1", "g2", "g3", "g4"].map(on).join(", ");
    let peers = match whole(answer, "at_peers") {
        0 => String::new(),
        blocks => format!("; {} are at a peer alone", count(blocks)),
    };
    format!(
        "{} of {} blocks are there (a block may be on several tiers): {tiers}{peers}\n",
        count(found),
        count(asked)
    )
}

fn quotas(answer: &Value) -> String {
    let tenants = list(&answer["tenants"]);
    if tenants.is_empty() {
        return "no tenants have shares: see tenants.shares of the configuration\n".to_owned();
    }
    let mut table = Table::new(["tenant", "share", "tier", "limit", "blocks", "held", "evicted", "refused"]);
    for tenant in tenants {
        for on in list(&tenant["tiers"]) {
            table.row([
                tenant["name"].as_str().map_or_else(|| "(all others)".to_owned(), plain),
                percent(tenant["share"].as_f64().unwrap_or(0.0)),
                text(&on["tier"]),
                number(on, "limit"),
                number(on, "blocks"),
                number(on, "held"),
                number(on, "evicted"),
                number(on, "refused"),
            ]);
        }
    }
    table.render()
}

fn volumes(answer: &Value) -> String {
    let volumes = list(&answer["volumes"]);
    if volumes.is_empty() {
        return "there are no volumes\n".to_owned();
    }
    let mut table = Table::new(["volume", "uri", "state", "blocks", "bytes", "hits", "misses", "errors"]);
    for volume in volumes {
        table.row([
            number(volume, "id"),
            text(&volume["uri"]),
            text(&volume["state"]),
            number(volume, "blocks"),
            bytes(whole(volume, "bytes")),
            number(volume, "hit_blocks"),
            number(volume, "missed_blocks"),
            number(volume, "errors"),
        ]);
    }
    table.render()
}

fn receipt(answer: &Value) -> String {
    let mut out = String::new();
    let on = |tier: &str| format!("{tier} {}", number(&answer["removed"], tier));
    let copies = ["g1", "g2", "g3", "g4"].map(on).join(", ");
    let _ = writeln!(out, "{} blocks forgotten; copies removed: {copies}", number(answer, "blocks"));
    for (name, what) in [
        ("slots_in_use", "slots are still in use: their bytes go with their last user"),
        ("disks_unconfirmed", "ranks have not confirmed it on their disks: they are sent it again"),
    ] {
        if whole(answer, name) > 0 {
            let _ = writeln!(out, "{} {what}", number(answer, name));
        }
    }
    for volume in list(&answer["volumes_unconfirmed"]) {
        let _ = writeln!(out, "volume {volume} has not confirmed it: the request is repeated");
    }
    for (state, what) in [("destroyed", "is destroyed"), ("pending", "is still to be destroyed")] {
        for key in list(&answer["keys"][state]) {
            let _ = writeln!(out, "data key {} of {} {what}", text(&key["id"]), key_place(key));
        }
    }
    out
}

fn key_place(key: &Value) -> String {
    match key["volume"].as_u64() {
        Some(volume) => format!("volume {volume}"),
        None => format!("rank {} on {}", number(key, "rank"), text(&key["tier"])),
    }
}

fn drained(answer: &Value) -> String {
    let mut out = String::from("new work is refused\n");
    match answer["durable_blocks"].as_u64() {
        Some(blocks) => {
            let _ = writeln!(out, "{} blocks are durable", count(blocks));
            let _ = writeln!(out, "{} blocks are lost with the process", number(answer, "not_saved_blocks"));
        }
        None => out += "nothing that lasts is configured, or the flush failed: what is in memory is lost\n",
    }
    if let Some(error) = answer["flush_error"].as_str() {
        let _ = writeln!(out, "flush: {}", plain(error));
    }
    for (name, what) in [
        ("removals_unconfirmed", "ranks and volumes have not confirmed removals"),
        ("events_unpublished", "events were not published"),
    ] {
        if whole(answer, name) > 0 {
            let _ = writeln!(out, "{} {what}", number(answer, name));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_others_named_cannot_steer_a_terminal() {
        let status = json!({ "model": "a\u{1b}[2Jb\nc", "version": "1", "uptime_s": 90_061 });
        let text = heading(&status);
        assert_eq!(text, "kvbm 1, a?[2Jb?c, process 0, up 1 d 1 h 1 min");
    }

    #[test]
    fn hits_at_peers_are_hits() {
        let status = json!({
            "lookup_blocks": 20, "peer_hit_blocks": 5,
            "tiers": [{ "tier": "g2", "capacity": 9, "hit_blocks": 8 }, { "tier": "g4", "hit_blocks": 2 }],
        });
        let text = super::status(&status);
        assert!(text.contains("\n15 of 20 blocks found (75.0 %), 5 at peers\n"), "{text}");
        let none = super::status(&json!({ "lookup_blocks": 20 }));
        assert!(none.contains("\n0 of 20 blocks found (0.0 %)\n"), "{none}");
    }

    #[test]
    fn what_is_wrong_has_a_line_each() {
        let status = json!({
            "ranks": [{ "rank": 0, "lost": false }, { "rank": 1, "lost": true }],
            "disk": { "directories": [{ "reads": "closed", "writes": "open", "failure": "io" }] },
            "volumes": [{ "id": 7, "state": "down", "failure": null, "refusal": null }],
            "peers": [{ "node": 1, "circuit": "closed" }, { "node": 2, "circuit": "open", "failure": "gone" }],
            "tiers": [{ "tier": "g3", "corrupt_blocks": 2 }],
        });
        let text = troubles(&status);
        for line in [
            "! rank 1 is lost",
            "of writes open: io",
            "! peer 2 is left alone: gone",
            "! volume 7 is down: a rank",
            "! g3: 2 blocks",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(troubles(&json!({})), "");
    }
}
