//! How fast the engine computes prompts, from what it says of its steps.

use parking_lot::Mutex;
use std::time::Duration;

/// Steps that are looked at.
const SAMPLES: usize = 32;
/// Steps that have to be seen before they say anything.
const EVIDENCE: usize = 4;
/// A step of fewer tokens says little about prompts: most of its time is not theirs.
const LEAST_TOKENS: u64 = 64;
/// A longer step is a pause.
const LONGEST: Duration = Duration::from_secs(30);

/// The time of a token in the last steps that computed prompts.
#[derive(Default)]
pub(super) struct PrefillSpeed(Mutex<Samples>);

#[derive(Default)]
struct Samples {
    /// Seconds a token, as a ring.
    times: Vec<f64>,
    next: usize,
    per_token: Option<f64>,
}

impl PrefillSpeed {
    /// The engine computed so many tokens of prompts in `elapsed`. Whether that counts.
    pub(super) fn saw(&self, tokens: u64, elapsed: Duration) -> bool {
        if tokens < LEAST_TOKENS || elapsed.is_zero() || elapsed > LONGEST {
            return false;
        }
        let time = elapsed.as_secs_f64() / tokens as f64;
        let mut samples = self.0.lock();
        let next = samples.next;
        match samples.times.get_mut(next) {
            Some(oldest) => *oldest = time,
            None => samples.times.push(time),
        }
        samples.next = (next + 1) % SAMPLES;
        if samples.times.len() >= EVIDENCE {
            let mut sorted = samples.times.clone();
            sorted.sort_by(f64::total_cmp);
            // A step whose time includes a pause is slow. The faster ones show what the engine can.
            samples.per_token = sorted.get(sorted.len() / 4).copied();
        }
        true
    }

    /// Seconds a token, where enough steps were seen.
    pub(super) fn per_token(&self) -> Option<f64> {
        self.0.lock().per_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_do_not_count_and_a_change_is_followed() {
        let speed = PrefillSpeed::default();
        let ms = Duration::from_millis;
        assert!(!speed.saw(63, ms(1)), "too few tokens");
        assert!(!speed.saw(1000, Duration::ZERO));
        assert!(!speed.saw(1000, Duration::from_secs(31)), "a pause");
        for step in 0..SAMPLES as u64 {
            assert_eq!(speed.per_token().is_some(), step >= EVIDENCE as u64);
            // Every second step ends with a pause.
            assert!(speed.saw(1000, ms(if step % 2 == 0 { 100 } else { 5_000 })));
        }
        assert_eq!(speed.per_token(), Some(1e-4));
        for _ in 0..SAMPLES {
            assert!(speed.saw(1000, ms(400)));
        }
        assert_eq!(speed.per_token(), Some(4e-4));
    }
}
