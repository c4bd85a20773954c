//! Time of the calling thread, and medians.

use std::time::Duration;

/// CPU time that this thread has used: other load on the machine does not count.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that the call fills in; it outlives the call.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(status, 0, "the clock exists on every Linux");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Seconds of thread CPU time that `work` takes.
pub fn cpu_seconds(work: impl FnOnce()) -> f64 {
    let start = thread_time();
    work();
    (thread_time() - start).as_secs_f64()
}

/// The middle one; the mean of the two middle ones of an even number.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}
