//! How hot a prefix is.

use std::time::{Duration, Instant};

/// A sum of uses that halves every so often.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heat {
    value: f64,
    at: Option<Instant>,
}

impl Heat {
    /// A block that was not there before.
    pub const NEW: f64 = 1.0;
    /// A block that was brought up again from a lower tier: it was asked for.
    pub const REUSE: f64 = 8.0;

    pub(crate) const fn new(now: Instant) -> Self {
        Self { value: 0.0, at: Some(now) }
    }

    pub(crate) fn add(&mut self, weight: f64, now: Instant, half_life: Duration) {
        self.value = self.now(now, half_life) + weight;
        self.at = Some(now);
    }

    /// The heat at `now`.
    pub fn now(&self, now: Instant, half_life: Duration) -> f64 {
        let age = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.value * 0.5_f64.powf(age.as_secs_f64() / half_life.as_secs_f64().max(1e-9))
    }
}
