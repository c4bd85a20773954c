//! Time of the calling thread, and medians.

use std::time::Duration;

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that the call fills in; it outlives the call.
    let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(status, 0, "the clock exists on every Linux");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time that this thread has used: other load on the machine does not count.
pub fn thread_time() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// How often this thread lost its CPU although it wanted to run.
pub fn involuntary_switches() -> i64 {
    // SAFETY: all-zero bytes are a valid `rusage`, a struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid rusage that the call fills in; it outlives the call.
    let status = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(status, 0, "RUSAGE_THREAD exists on every Linux");
    usage.ru_nivcsw
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

/// The value below which a share of the values lies.
pub fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share) as usize;
    values[rank.min(values.len() - 1)]
}
