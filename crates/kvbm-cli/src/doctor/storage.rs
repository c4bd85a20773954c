//! What the disk engine would do in a directory: it is opened there on a scratch folder and asked.

use std::path::{Path, PathBuf};

use kvbm_disk::{DiskConfig, DiskEngine, IoChoice};

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
    match engine.info().io {
        IoChoice::Direct { alignment } => {
            Finding::ok(NAME, format!("{shown}: direct I/O (O_DIRECT), aligned to {alignment} bytes"))
        }
        IoChoice::Buffered { reason } => Finding::short(
            NAME,
            Status::Limited,
            format!("{shown}: buffered I/O only ({reason})"),
            "G3 goes through the page cache: more CPU, and it competes with host memory",
            "use a directory on a local file system such as ext4 or xfs",
        ),
    }
}
