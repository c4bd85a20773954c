//! What takes time is a span. Alone in its process, for the subscriber is the process's.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod support;

use kvbm::Tier;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::{serve, soon, three_tiers, tokens};
use tracing::span;

/// Counts spans of the target `kvbm` by name.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<BTreeMap<&'static str, usize>>>);

impl tracing::Subscriber for Spans {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == "kvbm"
    }
    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        *self.0.lock().unwrap().entry(span.metadata().name()).or_default() += 1;
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn onboard_offload_flush_and_recovery_are_spans() {
    let spans = Spans::default();
    let dir = tempfile::tempdir().unwrap();
    tracing::subscriber::set_global_default(spans.clone()).unwrap();
    {
        let manager =
            three_tiers([16, 32, 64], dir.path(), |config| config.offload.g2_g3.write_through = false);
        let sequence = tokens(&manager, 1, 4);
        serve(&manager, &sequence);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.clear(Tier::G1), Ok(4));
        assert_eq!(serve(&manager, &sequence), 4);
        assert!(manager.wait_offloads(soon()));
        manager.flush(Duration::from_secs(60)).unwrap();
    }
    let spans = spans.0.lock().unwrap();
    let names: Vec<_> = spans.iter().map(|(&name, &count)| (name, count)).collect();
    assert_eq!(names, [("flush", 1), ("offload", 1), ("onboard", 1), ("recovery", 1)]);
}
