//! How much disk is left: a full one fails tests in many ways, none of which says so.

use crate::workspace::output_of;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the files of tests take at most, beside the build.
pub(crate) const TESTS_NEED: u64 = 1 << 30;

/// Free bytes where builds go and where temporary files go.
#[derive(Debug)]
pub(crate) struct Space {
    target: PathBuf,
    temporary: PathBuf,
}

impl Space {
    pub(crate) fn of(target: &Path) -> Self {
        Self { target: target.to_owned(), temporary: std::env::temp_dir() }
    }

    /// What is free now, and a warning where it is too little for the tests.
    pub(crate) fn now(&self) -> String {
        let places = [("the build", &self.target), ("temporary files", &self.temporary)];
        let free = places.map(|(what, path)| (what, path, free(path)));
        let mut text = String::from("free disk: ");
        for (number, (what, path, free)) in free.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let amount = free.map_or("unknown".to_owned(), gib);
            let _ = write!(text, "{separator}{amount} for {what} ({})", path.display());
        }
        if free.iter().any(|(_, _, free)| free.is_some_and(|bytes| bytes < TESTS_NEED)) {
            let _ = write!(text, "; TOO LITTLE: tests need {} beside the build", gib(TESTS_NEED));
        }
        text
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Free bytes of the file system that `path`, or the nearest folder above it that is there, lies
/// on.
fn free(path: &Path) -> Option<u64> {
    let there = path.ancestors().find(|folder| folder.is_dir())?;
    available(&output_of(Command::new("df").arg("-Pk").arg(there)).ok()?)
}

/// The fourth word of the second line that `df -P -k` prints, in bytes.
fn available(output: &str) -> Option<u64> {
    output.lines().nth(1)?.split_whitespace().nth(3)?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_bytes_are_read_from_df() {
        let output = "Filesystem     1024-blocks     Used Available Capacity Mounted on\n\
                    /dev/vda         263174212 67899092  27892128      71% /\n";
        assert_eq!(available(output), Some(27_892_128 << 10));
        assert_eq!(available("df: nothing\n"), None);
        let below = std::env::temp_dir().join("a-folder-that-is-not-there").join("deeper");
        assert!(free(&below).is_some_and(|bytes| bytes > 0), "that of the folder above");
    }

    #[test]
    fn what_is_free_is_reported_for_both_places() {
        let output = Space::of(Path::new("/")).now();
        assert!(
            output.contains("GiB for the build (/), ") && output.contains("GiB for temporary files"),
            "{output}"
        );
    }
}
