//! `kvbm events tail`: every event as it comes.

use std::io::Write;

use anyhow::Result;
use clap::Args;
use kvbm::config::Secret;
use kvbm::events_plane::{Delivery, Subscriber};

use super::{follow, shown};
use crate::args::events_url;
use crate::interrupt;

/// Options of `kvbm events tail`.
#[derive(Clone, Debug, Args)]
pub struct TailArgs {
    /// Where the events are published, like `nats://127.0.0.1:4222` (docs/events.md).
    #[arg(value_name = "URL", value_parser = events_url)]
    pub url: Secret,

    /// One JSON value a line.
    #[arg(long)]
    pub json: bool,

    /// Stop after N events, lost ones included [default: on Ctrl-C].
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
}

/// Prints to `out` until it was asked to stop.
pub(super) fn run(args: &TailArgs, out: &mut dyn Write) -> Result<()> {
    interrupt::catch();
    let (url, transport) = follow::open(&args.url)?;
    let subscriber = Subscriber::new(follow::subscribe(&url, transport.as_ref())?);
    eprintln!("following {url}");
    print(subscriber, args, out)
}

fn print(mut subscriber: Subscriber, args: &TailArgs, out: &mut dyn Write) -> Result<()> {
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 && !interrupt::asked() {
        let Some(mut delivery) = subscriber.next(follow::TICK)? else { continue };
        if let Delivery::Events { events, .. } = &mut delivery {
            events.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        }
        left = left.saturating_sub(match &delivery {
            Delivery::Events { events, .. } => events.len() as u64,
            Delivery::Gap { missing, .. } => missing.end - missing.start,
            Delivery::Restarted { .. } => 0,
        });
        if args.json {
            shown::delivery_json(&delivery).iter().try_for_each(|value| writeln!(out, "{value}"))?;
        } else {
            shown::delivery_lines(&delivery).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        out.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::events_plane::{
        EventBatch, EventKind, EventTransport, InProcessTransport, KvEvent, SourceId, StreamId, wire,
    };
    use kvbm::plan::Epoch;
    use std::time::Duration;

    #[test]
    fn as_many_lines_as_were_asked_for_losses_included() {
        let transport = InProcessTransport::default();
        let stream = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };
        for json in [false, true] {
            let subscriber = Subscriber::new(transport.subscribe().unwrap());
            let event = |number| KvEvent::new(number, EventKind::Cleared);
            for numbers in [0..3, 5..9] {
                let next = numbers.end;
                let batch = EventBatch::new(stream, next, numbers.map(event).collect());
                transport.publish(&wire::encode(&batch).unwrap().into(), Duration::ZERO).unwrap();
            }
            let args = TailArgs { url: Secret::new(""), json, count: Some(7) };
            let mut out = Vec::new();
            print(subscriber, &args, &mut out).unwrap();
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
}
