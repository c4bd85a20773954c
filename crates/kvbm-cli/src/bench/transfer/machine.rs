//! What the machine has: caches, memory, space, processor time.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::args::WrongUsage;
use crate::{human, space};

/// Blocks of a set by default, at least: three times what is on its way at a time.
const DEFAULT_BLOCKS: u64 = 96;
/// Blocks of any set, at least.
const MIN_BLOCKS: u64 = 8;
/// Where the machine does not tell how large its last cache is.
const DEFAULT_CACHE: u64 = 32 << 20;
/// Space that must stay free.
const SPARE_SPACE: u64 = 256 << 20;

/// Blocks in a set: `set` bytes, or more than four times the last cache.
pub(super) fn slots(block_bytes: u64, set: Option<u64>) -> Result<u32> {
    let bytes =
        set.unwrap_or_else(|| (4 * last_cache_bytes() + block_bytes).max(DEFAULT_BLOCKS * block_bytes));
    let blocks = (bytes / block_bytes).max(MIN_BLOCKS);
    u32::try_from(blocks).map_err(|_| {
        WrongUsage(format!("--set: {blocks} blocks are too many, {} is the most", u32::MAX)).into()
    })
}

/// Bytes of the largest cache of the first processor.
fn last_cache_bytes() -> u64 {
    let size = |index: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        parse_cache_size(fs::read_to_string(path).ok()?.trim())
    };
    (0..8).filter_map(size).max().unwrap_or(DEFAULT_CACHE)
}

fn parse_cache_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Says so before anything is measured if `bytes` do not fit into memory.
pub(super) fn expect_memory(bytes: u64) -> Result<()> {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_memory(&text));
    ensure!(
        available.is_none_or(|available| bytes < available),
        "{} of memory are needed, {} are available: lower --set, or leave the largest of --sizes out",
        human::bytes(bytes),
        human::bytes(available.unwrap_or(0))
    );
    Ok(())
}

fn available_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Says so before anything is written if `bytes` do not fit on the disk.
pub(super) fn expect_space(dir: &Path, bytes: u64) -> Result<()> {
    let free = space::free(dir)
        .with_context(|| format!("cannot use {}: name a directory with --dir", dir.display()))?;
    ensure!(
        bytes.saturating_add(SPARE_SPACE) <= free,
        "{} of space are needed in {}, {} are free: name another --dir, or lower --set",
        human::bytes(bytes + SPARE_SPACE),
        dir.display(),
        human::bytes(free)
    );
    Ok(())
}

/// Processor time that this process has used, in user code and in the kernel.
pub(super) fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the struct behind the pointer.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: zeroed at first, and filled by the kernel since.
    let usage = unsafe { usage.assume_init() };
    let time = |value: libc::timeval| {
        Duration::from_secs(value.tv_sec as u64) + Duration::from_micros(value.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_understood() {
        assert_eq!(parse_cache_size("32768K"), Some(32 << 20));
        assert_eq!(parse_cache_size("1M"), Some(1 << 20));
        assert_eq!(parse_cache_size("1x"), None);
        assert_eq!(available_memory("MemFree: 1 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert!(slots(1 << 20, Some(200 << 20)).is_ok_and(|slots| slots == 200));
        assert!(slots(1 << 20, Some(1)).is_ok_and(|slots| slots == 8));
        assert!(slots(256 << 20, None).is_ok_and(|slots| slots >= 96));
        assert!(slots(4096, None).is_ok_and(|slots| u64::from(slots) * 4096 > 4 * last_cache_bytes()));
        assert!(slots(4096, Some(u64::MAX)).unwrap_err().to_string().contains("too many"));
    }

    #[test]
    fn what_does_not_fit_is_reported_with_the_way_out() {
        let error = expect_memory(u64::MAX).unwrap_err().to_string();
        assert!(error.contains("lower --set"), "{error}");
        let error = expect_space(Path::new("."), 1 << 60).unwrap_err().to_string();
        assert!(error.contains("another --dir"), "{error}");
        assert!(expect_space(Path::new("no/such/folder"), 1).is_err());
        assert!(expect_space(Path::new("."), 1).is_ok());
    }

    #[test]
    fn work_takes_processor_time() {
        let before = cpu_time();
        let mut sum = 0_u64;
        while cpu_time() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(cpu_time() > before);
    }
}
