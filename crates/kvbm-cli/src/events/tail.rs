//! `kvbm events tail`: every event as it comes.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
#[cfg(feature = "zmq")]
use kvbm::events_plane::vllm::Continuity;
use kvbm::events_plane::{Delivery, EventReceiver, wire};

#[cfg(feature = "zmq")]
use super::engines::{self, Listener};
use super::follow::{self, FollowArgs, Source};
use super::joining::Joining;
use super::render;
use crate::interrupt;
use crate::note::note;
use crate::number::whole;

/// Options of `kvbm events tail`.
#[derive(Clone, Debug, Args)]
pub struct TailArgs {
    /// Whom to follow.
    #[command(flatten)]
    pub follow: FollowArgs,

    /// One JSON value a line.
    #[arg(long)]
    pub json: bool,

    /// Stop after N events, lost ones included, those before the first one heard not [default: on
    /// Ctrl-C].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u64>(1..=u64::MAX))]
    pub count: Option<u64>,
}

/// Prints to `out` until it was asked to stop.
pub(super) fn run(args: &TailArgs, out: &mut dyn Write) -> Result<()> {
    interrupt::catch();
    let (url, source) = follow::open(&args.follow)?;
    note(&format!("following {url}"));
    match source {
        Source::Kvbm(_transport, receiver) => print(receiver, args, out),
        #[cfg(feature = "zmq")]
        Source::Engines(engines) => print_engines(Listener::new(engines), args, out),
    }
}

/// Lost messages count as one event each.
#[cfg(feature = "zmq")]
fn print_engines(mut listener: Listener, args: &TailArgs, out: &mut dyn Write) -> Result<()> {
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 && !interrupt::asked() {
        let Some(mut spoken) = listener.next(follow::TICK)? else { continue };
        let address = &listener.engines().addresses[spoken.engine];
        if let Continuity::Gap { missing } = &spoken.continuity {
            left = left.saturating_sub(missing.end - missing.start);
        }
        if let Ok(batch) = &mut spoken.batch {
            batch.events.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            left -= batch.events.len() as u64;
        }
        if args.json {
            engines::values(&spoken, address).iter().try_for_each(|value| writeln!(out, "{value}"))?;
        } else {
            engines::lines(&spoken, address).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        out.flush()?;
    }
    Ok(())
}

fn print(mut receiver: Box<dyn EventReceiver>, args: &TailArgs, out: &mut dyn Write) -> Result<()> {
    let mut left = args.count.unwrap_or(u64::MAX);
    let (mut joining, mut deliveries) = (Joining::default(), Vec::new());
    while left > 0 && !interrupt::asked() {
        let Some(payload) = receiver.recv(follow::TICK)? else { continue };
        // What cannot be read shows up as a gap.
        let Ok(batch) = wire::decode(&payload) else { continue };
        let stream = batch.stream;
        if let Some(joined_at) = joining.accept(batch, Instant::now(), &mut deliveries) {
            if args.json {
                render::joined_json(stream, joined_at)
                    .iter()
                    .try_for_each(|value| writeln!(out, "{value}"))?;
            } else {
                render::joined_line(stream, joined_at).iter().try_for_each(|line| writeln!(out, "{line}"))?;
            }
        }
        for mut delivery in deliveries.drain(..) {
            if left > 0 {
                left -= shorten(&mut delivery, left);
                show(&delivery, args.json, out)?;
            }
        }
        out.flush()?;
    }
    Ok(())
}

/// Keeps at most `most` events of a delivery. How many it counts for, lost ones included.
fn shorten(delivery: &mut Delivery, most: u64) -> u64 {
    match delivery {
        Delivery::Events { events, .. } => {
            events.truncate(usize::try_from(most).unwrap_or(usize::MAX));
            events.len() as u64
        }
        Delivery::Gap { missing, .. } => most.min(missing.end - missing.start),
        Delivery::Restarted { .. } => 0,
    }
}

fn show(delivery: &Delivery, json: bool, out: &mut dyn Write) -> Result<()> {
    if json {
        render::delivery_json(delivery).iter().try_for_each(|value| writeln!(out, "{value}"))?;
    } else {
        render::delivery_lines(delivery).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::config::Secret;
    use kvbm::events_plane::{
        EventBatch, EventKind, EventTransport, InProcessTransport, KvEvent, SourceId, StreamId,
    };
    use kvbm::plan::Epoch;
    use std::time::Duration;

    fn nobody() -> FollowArgs {
        FollowArgs { url: Secret::new(""), wait: 0 }
    }

    #[test]
    fn as_many_lines_as_were_asked_for_losses_included() {
        let transport = InProcessTransport::default();
        let stream = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };
        for json in [false, true] {
            let receiver = transport.subscribe().unwrap();
            let event = |number| KvEvent::new(number, EventKind::Cleared);
            for numbers in [0..3, 5..9] {
                let next = numbers.end;
                let batch = EventBatch::new(stream, next, numbers.map(event).collect());
                transport.publish(&wire::encode(&batch).unwrap().into(), Duration::ZERO).unwrap();
            }
            let args = TailArgs { follow: nobody(), json, count: Some(7) };
            let mut out = Vec::new();
            print(receiver, &args, &mut out).unwrap();
            let text = String::from_utf8(out).unwrap();
            // Three events, a gap of two, two events.
            assert_eq!(text.lines().count(), 6, "{text}");
            assert!(text.lines().nth(3).unwrap().contains(if json {
                "\"missing\":2"
            } else {
                "GAP: 2 events"
            }));
        }
    }

    #[test]
    fn what_came_before_it_joined_is_not_counted() {
        let transport = InProcessTransport::default();
        for json in [false, true] {
            let receiver = transport.subscribe().unwrap();
            // A running source: its pool has told 5000 events, its volumes 80.
            for (shard, numbers) in [(0, 5000..5002), (1, 80..80), (0, 5004..5009)] {
                let stream = StreamId { source: SourceId(1), epoch: Epoch(1), shard };
                let next = numbers.end;
                let events = numbers.map(|number| KvEvent::new(number, EventKind::Cleared)).collect();
                let batch = EventBatch::new(stream, next, events);
                transport.publish(&wire::encode(&batch).unwrap().into(), Duration::ZERO).unwrap();
            }
            let args = TailArgs { follow: nobody(), json, count: Some(7) };
            let mut out = Vec::new();
            print(receiver, &args, &mut out).unwrap();
            let text = String::from_utf8(out).unwrap();
            // Joined, two events, joined, a gap of two, three events.
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines.len(), 8, "{text}");
            let joined = |number| {
                if json { format!("\"joined_at\":{number}") } else { format!("JOINED at number {number}") }
            };
            assert!(lines[0].contains(&joined(5000)) && lines[3].contains(&joined(80)), "{text}");
            assert!(lines[4].contains("5002") && lines[7].contains("5006"), "{text}");
        }
    }
}
