//! What the disk engine would do in a directory: it is opened there on a scratch folder and asked.

use std::path::{Path, PathBuf};

use kvbm_disk::{DiskConfig, DiskEngine, EngineChoice, EngineKind};

use super::{Finding, Status};

const NAME: &str = "disk";
/// One small slot is enough to learn how its file can be opened.
const PROBE_BLOCK_BYTES: u64 = 64 << 10;

/// A folder that is removed when dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is small and carries our name.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn examine(dir: &Path) -> Finding {
    let shown = dir.display();
    let missing = |why: String| {
        Finding::short(
            NAME,
            Status::Missing,
            format!("{shown}: {why}"),
            "no G3 tier there",
            "choose a writable directory on a local SSD: kvbm doctor --dir DIR",
        )
    };
    if !dir.is_dir() {
        return missing("not a directory".into());
    }
    let scratch = Scratch(dir.join(format!(".kvbm-doctor-{}", std::process::id())));
    let config = DiskConfig::new(&scratch.0, 1, PROBE_BLOCK_BYTES, [0; 16]);
    let engine = match DiskEngine::open(config) {
        Ok((engine, _)) => engine,
        Err(error) => return missing(error.to_string()),
    };
    let EngineChoice { kind, reason, alignment, .. } = engine.info().engine;
    match kind {
        EngineKind::IoUring => {
            Finding::ok(NAME, format!("{shown}: io_uring with O_DIRECT, aligned to {alignment} bytes"))
        }
        // The product's choice is never one of these.
        EngineKind::Custom(name) => Finding::ok(NAME, format!("{shown}: {name} ({reason})")),
        EngineKind::Threads => Finding::short(
            NAME,
            Status::Limited,
            format!("{shown}: threads with O_DIRECT ({reason})"),
            "G3 is as fast, for two to four times the CPU time",
            "allow io_uring: Linux 5.19 or later, sysctl -w kernel.io_uring_disabled=0, a seccomp profile with io_uring_setup, \
             io_uring_enter and io_uring_register",
        ),
        EngineKind::Buffered => Finding::short(
            NAME,
            Status::Limited,
            format!("{shown}: buffered I/O only ({reason})"),
            "G3 goes through the page cache: more CPU, and it competes with host memory",
            "use a directory on a local file system such as ext4 or xfs",
        ),
    }
}
