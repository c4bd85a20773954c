//! One thread beside two, in wall time.
//!
//! A virtual machine gives two threads two cores at one time and one core's two halves at another, and changes that within a
//! tenth of a second. So both are measured in turn, in many short parts, after two threads have run for a while; and beside them two
//! threads that share nothing (`two_threads_apart`): more than that is not to be had from the machine at that time.

use crate::rows::BATCH;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Chains of [`BATCH`] blocks that a thread works on at a time.
pub const PART: usize = 100_000 / BATCH;
/// How long two threads run before a figure, and how long one runs for it at least.
const WARM_UP: Duration = Duration::from_millis(100);
const MEASURED: Duration = Duration::from_millis(250);

/// Million blocks per second of wall time.
pub struct Rates {
    pub one: f64,
    pub two: f64,
}

/// What `work` does with one thread and with two. `part` makes the chains of a part, outside of the clock; `work` is told which
/// thread it is, 0 or 1; `settle` ends what goes on behind it and counts as part of the time.
pub fn one_and_two<T: Send + Sync>(
    mut part: impl FnMut() -> Vec<T>,
    work: impl Fn(usize, &[T]) + Sync,
    settle: impl Fn(),
) -> Rates {
    let mut warm = Duration::ZERO;
    while warm < WARM_UP {
        warm += side_by_side(&[part(), part()], &work, &settle);
    }
    let (mut one, mut two, mut parts) = (Duration::ZERO, Duration::ZERO, 0);
    while one < MEASURED {
        one += side_by_side(&[part()], &work, &settle);
        two += side_by_side(&[part(), part()], &work, &settle);
        parts += 1;
    }
    let blocks = (parts * PART * BATCH) as f64 / 1e6;
    Rates { one: blocks / one.as_secs_f64(), two: 2.0 * blocks / two.as_secs_f64() }
}

/// A thread for each part, which begin together; from the first's begin to the last's end.
fn side_by_side<T: Sync>(
    parts: &[Vec<T>],
    work: &(impl Fn(usize, &[T]) + Sync),
    settle: impl Fn(),
) -> Duration {
    let ready = Barrier::new(parts.len());
    let start = std::thread::scope(|scope| {
        let begin = |(thread, part)| {
            let ready = &ready;
            scope.spawn(move || {
                ready.wait();
                let start = Instant::now();
                work(thread, part);
                start
            })
        };
        let threads: Vec<_> = parts.iter().map(Vec::as_slice).enumerate().map(begin).collect();
        threads.into_iter().map(|thread| thread.join().expect("a workload does not panic")).min()
    });
    settle();
    start.map_or(Duration::ZERO, |start| start.elapsed())
}
