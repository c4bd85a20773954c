//! CPU, memory and limits, as the kernel tells them.

use std::fs::read_to_string;

use super::{Finding, Status};
use crate::human::bytes;

pub(super) fn examine() -> Vec<Finding> {
    let text = |path: &str| read_to_string(path).unwrap_or_default();
    let meminfo = text("/proc/meminfo");
    vec![
        cpu(&text("/proc/cpuinfo")),
        memory(&meminfo),
        memlock(&text("/proc/self/limits")),
        huge_pages(&text("/sys/kernel/mm/transparent_hugepage/enabled"), &meminfo),
    ]
}

fn cpu(cpuinfo: &str) -> Finding {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned());
    Finding::ok("CPU", format!("{threads} threads, {model}"))
}

/// Bytes of a line like `MemTotal:  16384 kB`.
fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn memory(meminfo: &str) -> Finding {
    match (meminfo_bytes(meminfo, "MemTotal"), meminfo_bytes(meminfo, "MemAvailable")) {
        (Some(total), Some(available)) => {
            Finding::ok("memory", format!("{}, {} available", bytes(total), bytes(available)))
        }
        _ => Finding::short(
            "memory",
            Status::Limited,
            "the kernel does not report it (/proc/meminfo)",
            "give host.capacity with care: it is not checked against the memory that there is",
            "mount /proc",
        ),
    }
}

fn memlock(limits: &str) -> Finding {
    const NAME: &str = "memlock limit";
    const EFFECT: &str =
        "host memory beyond the limit is not page-locked: slower device copies, and it may be swapped";
    const FIX: &str =
        "ulimit -l unlimited (or LimitMEMLOCK=infinity in the service, --ulimit memlock=-1 for a container)";
    let soft = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|rest| rest.split_whitespace().next());
    match soft {
        Some("unlimited") => Finding::ok(NAME, "unlimited"),
        Some(limit) => {
            let limit = limit.parse().map_or_else(|_| limit.to_owned(), bytes);
            Finding::short(NAME, Status::Limited, limit, EFFECT, FIX)
        }
        None => Finding::short(NAME, Status::Limited, "unknown (/proc/self/limits)", EFFECT, FIX),
    }
}

fn huge_pages(transparent: &str, meminfo: &str) -> Finding {
    const NAME: &str = "huge pages";
    let mode = transparent.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(mode, _)| mode);
    let reserved = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("HugePages_Total:"))
        .and_then(|count| count.trim().parse::<u64>().ok())
        .unwrap_or(0);
    match mode {
        Some(mode @ ("always" | "madvise")) => {
            Finding::ok(NAME, format!("transparent: {mode}; reserved: {reserved}"))
        }
        _ => Finding::short(
            NAME,
            Status::Limited,
            format!("transparent: {}; reserved: {reserved}", mode.unwrap_or("not offered")),
            "host memory uses 4 KiB pages: more address translation in large copies",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_words_are_understood() {
        let meminfo = "MemTotal:       16384 kB\nMemAvailable:    8192 kB\nHugePages_Total:       7\n";
        assert_eq!(memory(meminfo).found, "16 MiB, 8 MiB available");
        assert_eq!(memory("").status, Status::Limited);

        let limits = |soft| {
            format!("Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {soft}  {soft}  bytes\n")
        };
        assert_eq!(memlock(&limits("unlimited")).status, Status::Ok);
        let finding = memlock(&limits("8388608"));
        assert_eq!((finding.status, finding.found.as_str()), (Status::Limited, "8 MiB"));
        assert!(finding.fix.unwrap().contains("ulimit -l"));
        assert_eq!(memlock("").status, Status::Limited);

        assert_eq!(huge_pages("always [madvise] never", meminfo).found, "transparent: madvise; reserved: 7");
        assert_eq!(huge_pages("always madvise [never]", meminfo).status, Status::Limited);
        assert_eq!(huge_pages("", "").status, Status::Limited);

        assert!(cpu("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n").found.ends_with("Some CPU @ 2 GHz"));
    }
}
