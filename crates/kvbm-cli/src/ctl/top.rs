//! `kvbm top`: a running manager, live in a terminal.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use super::client::Client;
use super::{ConnectArgs, render, status};
use crate::human::{bytes, count, micros, percent, share};
use crate::interrupt;
use crate::number::whole;
use crate::table::Table;

/// How often it looks whether it was asked to stop.
const TICK: Duration = Duration::from_millis(50);
/// Characters of the bar of a tier.
const BAR: usize = 20;
/// A screen of its own, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the upper left; what is behind a line, and what is below, goes.
const HOME: &str = "\x1b[H";
const END_LINE: &str = "\x1b[K\n";
const BELOW: &str = "\x1b[J";

/// Options of `kvbm top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Whom to watch.
    #[command(flatten)]
    pub to: ConnectArgs,

    /// Time between two frames.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u64>(1..=3600))]
    pub interval: u64,

    /// Print one frame and end: its rates are those since the manager's start.
    #[arg(long)]
    pub once: bool,
}

/// A status and when it was.
struct Seen {
    at: Instant,
    status: Value,
}

/// Shows frames until Ctrl-C, or one.
pub fn run(args: &TopArgs) -> Result<()> {
    let client = Client::new(&args.to)?;
    let mut before = Seen { at: Instant::now(), status: status(&client)? };
    if args.once {
        return crate::show(&frame(&before.status, &Value::Null, uptime(&before.status)), false);
    }
    let terminal = std::io::stdout().is_terminal();
    interrupt::catch();
    let _screen = Screen::enter(terminal)?;
    let mut text = frame(&before.status, &Value::Null, uptime(&before.status));
    // Of the last try, which may have had no answer.
    let mut tried = before.at;
    loop {
        draw(&text, terminal)?;
        let until = tried.checked_add(Duration::from_secs(args.interval));
        while until.is_some_and(|until| Instant::now() < until) {
            if interrupt::asked() {
                return Ok(());
            }
            std::thread::sleep(TICK);
        }
        let at = Instant::now();
        tried = at;
        match status(&client) {
            Ok(now) => {
                // Another life of the manager counts from 0 again.
                let same = now["epoch"] == before.status["epoch"] && now["pid"] == before.status["pid"];
                let since = if same { at - before.at } else { uptime(&now) };
                text = frame(&now, if same { &before.status } else { &Value::Null }, since);
                before = Seen { at, status: now };
            }
            Err(error) => {
                text = format!(
                    "{}\n\nno answer, trying again: {}\n",
                    render::heading(&before.status),
                    crate::explain(&error)
                );
            }
        }
    }
}

/// A terminal's other screen, until it is dropped.
struct Screen(bool);

impl Screen {
    fn enter(terminal: bool) -> Result<Self> {
        if terminal {
            crate::show(ENTER, false)?;
        }
        Ok(Self(terminal))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.0 {
            // Whoever closed the terminal needs it no more.
            let _ = crate::show(LEAVE, false);
        }
    }
}

fn draw(text: &str, terminal: bool) -> Result<()> {
    if terminal {
        crate::show(&format!("{HOME}{}{BELOW}", text.replace('\n', END_LINE)), false)
    } else {
        crate::show(&format!("{text}\n"), false)
    }
}

fn uptime(status: &Value) -> Duration {
    Duration::from_secs(status["uptime_s"].as_u64().unwrap_or(0).max(1))
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

/// The item of a list that has this name.
fn named<'a>(list: &'a Value, key: &str, name: &Value) -> &'a Value {
    let items = list.as_array().map_or(&[][..], Vec::as_slice);
    items.iter().find(|item| item[key] == *name).unwrap_or(&Value::Null)
}

/// A second's part of what a counter grew by.
fn per_second(now: &Value, old: &Value, name: &str, since: Duration) -> f64 {
    number(now, name).saturating_sub(number(old, name)) as f64 / since.as_secs_f64().max(1e-3)
}

/// One frame: what is now, and what happened since `before`.
fn frame(now: &Value, before: &Value, since: Duration) -> String {
    let mut out = format!("{}\n\n", render::heading(now));
    let asked = number(now, "lookup_blocks").saturating_sub(number(before, "lookup_blocks"));
    let (tiers, here) = tiers(now, before, since, asked);
    let peers = number(now, "peer_hit_blocks").saturating_sub(number(before, "peer_hit_blocks"));
    let at_peers = if number(now, "peer_hit_blocks") > 0 {
        format!(" ({} at peers)", percent(share(peers, asked)))
    } else {
        String::new()
    };
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "{tiers}\nlook-ups: {:.0} blocks/s, {} found{at_peers}; iteration {}\n",
        per_second(now, before, "lookup_blocks", since),
        percent(share(here + peers, asked)),
        count(number(now, "iteration")),
    );
    out += &paths(now, before, since);
    let engines = now["engines"].as_array().map_or(0, Vec::len);
    if engines > 0 {
        let _ = writeln!(out, "\n{engines} engines are attached");
    }
    out += &render::troubles(now);
    out
}

/// The tiers, and the blocks that were found on them.
fn tiers(now: &Value, before: &Value, since: Duration, asked: u64) -> (String, u64) {
    let mut table = Table::new(["tier", "used", "of", "", "pinned", "hits", "hits/s", "evicted/s"]);
    let mut found = 0;
    for tier in render::tiers(now) {
        let old = named(&before["tiers"], "tier", &tier["tier"]);
        let (capacity, used) = (number(tier, "capacity"), number(tier, "used"));
        let hits = number(tier, "hit_blocks").saturating_sub(number(old, "hit_blocks"));
        found += hits;
        table.row([
            tier["tier"].as_str().map(render::plain).unwrap_or_default(),
            count(used),
            count(capacity),
            bar(share(used, capacity)),
            count(number(tier, "pinned")),
            percent(share(hits, asked)),
            format!("{:.0}", per_second(tier, old, "hit_blocks", since)),
            format!("{:.0}", per_second(tier, old, "evicted_blocks", since)),
        ]);
    }
    (table.render(), found)
}

/// The paths that have moved anything, or are about to.
fn paths(now: &Value, before: &Value, since: Duration) -> String {
    let all = now["paths"].as_array().map_or(&[][..], Vec::as_slice);
    let is_used = |path: &&Value| {
        ["blocks", "queued_blocks", "running_blocks"].iter().any(|name| number(path, name) > 0)
    };
    let used: Vec<_> = all.iter().filter(is_used).collect();
    if used.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["path", "moves", "blocks/s", "waiting", "running", "p99"]);
    for path in used {
        let old = named(&before["paths"], "path", &path["path"]);
        table.row([
            path["path"].as_str().map(render::plain).unwrap_or_default(),
            format!("{}/s", bytes(per_second(path, old, "bytes", since) as u64)),
            format!("{:.0}", per_second(path, old, "blocks", since)),
            count(number(path, "queued_blocks")),
            count(number(path, "running_blocks")),
            micros(path["p99_us"].as_f64().unwrap_or(0.0)),
        ]);
    }
    format!("\n{}", table.render())
}

fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("[{}{}]", "#".repeat(full), " ".repeat(BAR - full))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn seen(hits: u64, bytes: u64) -> Value {
        json!({
            "version": "1", "model": "m", "pid": 1, "uptime_s": 10, "lookup_blocks": hits * 2, "iteration": 7,
            "tiers": [
                { "tier": "g1", "capacity": 0 },
                { "tier": "g2", "capacity": 100, "used": 50, "hit_blocks": hits, "evicted_blocks": 0 },
            ],
            "paths": [{ "path": "g2_g1", "blocks": 1, "bytes": bytes }],
        })
    }

    #[test]
    fn a_frame_has_what_happened_since_the_last_one() {
        let text = frame(&seen(300, 30 << 20), &seen(100, 10 << 20), Duration::from_secs(2));
        assert!(text.contains("[##########          ]"), "{text}");
        assert!(text.contains("look-ups: 200 blocks/s, 50.0 % found"), "{text}");
        assert!(text.contains("10 MiB/s") && !text.contains("\n  g1 "), "{text}");
        let first = frame(&seen(300, 30 << 20), &Value::Null, Duration::from_secs(10));
        assert!(first.contains("look-ups: 60 blocks/s, 50.0 % found; "), "{first}");
        let mut with_peers = seen(300, 0);
        with_peers["peer_hit_blocks"] = json!(60);
        let text = frame(&with_peers, &Value::Null, Duration::from_secs(10));
        assert!(text.contains("60.0 % found (10.0 % at peers); "), "{text}");
    }
}
