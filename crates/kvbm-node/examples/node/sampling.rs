//! What a process uses, and what lies in a folder, at one moment.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Values by time, under one name each.
#[derive(Default)]
pub(crate) struct Series(BTreeMap<String, Vec<u64>>);

impl Series {
    pub(crate) fn push(&mut self, name: String, value: u64) {
        self.0.entry(name).or_default().push(value);
    }

    /// What process `id`, called `name`, uses.
    pub(crate) fn process(&mut self, name: &str, id: u32) {
        let usage = Usage::of(id);
        self.push(format!("{name}_anonymous_kib"), usage.anonymous_kib);
        self.push(format!("{name}_shared_kib"), usage.shared_kib);
        self.push(format!("{name}_threads"), usage.threads);
        self.push(format!("{name}_descriptors"), usage.descriptors);
    }

    pub(crate) fn into_json(self) -> serde_json::Value {
        serde_json::json!(self.0)
    }
}

/// What a process uses; zeros where it is gone.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    /// Resident memory in KiB.
    pub(crate) rss_kib: u64,
    /// The part of it that is the process's own: heap and stacks.
    pub(crate) anonymous_kib: u64,
    /// The part of it that is host memory for blocks, as far as the process has touched it.
    pub(crate) shared_kib: u64,
    pub(crate) threads: u64,
    /// Open file descriptors.
    pub(crate) descriptors: u64,
}

impl Usage {
    pub(crate) fn of(id: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let descriptors = fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count) as u64;
        Self {
            rss_kib: number("VmRSS:"),
            anonymous_kib: number("RssAnon:"),
            shared_kib: number("RssShmem:"),
            threads: number("Threads:"),
            descriptors,
        }
    }

    /// The more of each of two.
    pub(crate) fn most_of_each(self, other: Self) -> Self {
        Self {
            rss_kib: self.rss_kib.max(other.rss_kib),
            anonymous_kib: self.anonymous_kib.max(other.anonymous_kib),
            shared_kib: self.shared_kib.max(other.shared_kib),
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

/// Bytes that the files below `dir` occupy. A file that goes meanwhile counts as nothing.
pub(crate) fn bytes_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().map_while(Result::ok);
    entries
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => bytes_below(&entry.path()),
            Ok(data) => data.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}
