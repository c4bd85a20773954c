//! `kvbm disk`: looks at directories of G3 that no manager has open, and mends or empties them.

mod find;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use kvbm_disk::offline::{self, Inspection, Verification};
use serde_json::{Value, json};

use crate::args::Output;
use crate::human;
use crate::progress::Progress;

/// What to do with a directory.
#[derive(Clone, Debug, Subcommand)]
pub enum DiskCommand {
    /// Say what each directory holds, as its journal says. Also while a manager has it open.
    Inspect(DiskArgs),
    /// Read every block and compare its checksum; fails where bytes are damaged. Changes nothing.
    Verify(DiskArgs),
    /// Verify, then take damaged blocks out of use, and blocks without their parents off the books.
    Repair(DiskArgs),
    /// Remove all blocks, whatever their format: the files of kvbm and nothing else.
    Clear(DiskArgs),
}

/// Which directory.
#[derive(Clone, Debug, Args)]
pub struct DiskArgs {
    /// What `disk.dir` (or `replay --dir`) names, or one of the folders in it.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// Write what was found as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// What a command found: for people, as JSON, and whether all was well.
pub struct Found {
    /// For people.
    pub text: String,
    /// As JSON.
    pub json: Value,
    /// Why the command failed, although it could say what it found.
    pub failed: Option<String>,
}

impl DiskCommand {
    /// The options.
    pub fn args(&self) -> &DiskArgs {
        let (Self::Inspect(args) | Self::Verify(args) | Self::Repair(args) | Self::Clear(args)) = self;
        args
    }
}

/// Does it.
pub fn run(command: &DiskCommand) -> Result<Found> {
    let dir = &command.args().dir;
    let dirs = find::directories(dir)?;
    ensure!(
        !dirs.is_empty(),
        "{} is no directory of kvbm: neither it nor a folder in it has a journal.kvbm; name what disk.dir names",
        dir.display()
    );
    match command {
        DiskCommand::Inspect(_) => Ok(inspect(&dirs)),
        DiskCommand::Verify(_) => {
            verify(&dirs, offline::verify, "damaged; kvbm disk repair takes them out of use")
        }
        DiskCommand::Repair(_) => {
            let mut found = verify(&dirs, offline::repair, "repaired")?;
            // What was damaged no longer is.
            found.failed = None;
            Ok(found)
        }
        DiskCommand::Clear(_) => clear(&dirs),
    }
}

fn inspect(dirs: &[PathBuf]) -> Found {
    let (mut text, mut all, mut unread) = (String::new(), Vec::new(), Vec::new());
    for dir in dirs {
        match offline::inspect(dir) {
            Ok(found) => {
                text += &describe(dir, &found);
                all.push(facts(dir, &found));
            }
            Err(error) => unread.push(format!("{error}")),
        }
    }
    let failed = (!unread.is_empty()).then(|| unread.join("\n"));
    Found { text, json: json!({ "directories": all, "errors": unread }), failed }
}

type Check = fn(&Path, &mut dyn FnMut(u64, u64)) -> Result<Verification, kvbm_disk::OpenError>;

fn verify(dirs: &[PathBuf], check: Check, bad: &str) -> Result<Found> {
    // Asked first, so that the progress knows its end and a bad directory is found before hours of reading.
    let mut total = 0;
    for dir in dirs {
        total += offline::inspect(dir)?.blocks;
    }
    let progress = Progress::new("blocks", total);
    let (mut text, mut all) = (String::new(), Vec::new());
    let [mut verified, mut damaged, mut orphans] = [0_u64; 3];
    for dir in dirs {
        let found = check(dir, &mut |_, _| progress.advance(1))?;
        text += &describe(dir, &found.inspection);
        let _ = writeln!(text, "  {} blocks verified, {} damaged", found.verified, found.damaged.len());
        verified += found.verified;
        damaged += found.damaged.len() as u64;
        orphans += found.inspection.orphans;
        let mut facts = facts(dir, &found.inspection);
        facts["verified_blocks"] = found.verified.into();
        facts["damaged_blocks"] = found.damaged.len().into();
        facts["damaged_slots"] = found.damaged.iter().map(|slot| slot.0).collect();
        all.push(facts);
    }
    progress.finish();
    let _ = writeln!(text, "{verified} blocks verified, {damaged} damaged, {orphans} without their parents");
    let failed = (damaged > 0).then(|| format!("{damaged} of {total} blocks are {bad}"));
    let json = json!({
        "directories": all, "verified_blocks": verified, "damaged_blocks": damaged, "orphans": orphans,
        "passed": damaged == 0,
    });
    Ok(Found { text, json, failed })
}

fn clear(dirs: &[PathBuf]) -> Result<Found> {
    let progress = Progress::new("directories", dirs.len() as u64);
    let mut bytes = 0;
    for dir in dirs {
        bytes += find::clear(dir).with_context(|| format!("cannot clear {}", dir.display()))?;
        progress.advance(1);
    }
    progress.finish();
    let text = format!("{} directories cleared, {} freed\n", dirs.len(), human::bytes(bytes));
    let cleared: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    Ok(Found { text, json: json!({ "cleared": cleared, "bytes": bytes }), failed: None })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn describe(dir: &Path, found: &Inspection) -> String {
    let owner = found.owner.as_ref().map_or_else(String::new, |owner| format!(", in use by {owner}"));
    let end = if found.clean { "closed in order" } else { "not closed in order" };
    format!(
        "{}\n  {}\n  namespace {}, {end}{owner}\n  {} blocks of {} in {} slots, {} without their parents, {} slots quarantined, {} \
         records\n",
        dir.display(),
        String::from_utf8_lossy(&found.geometry),
        hex(&found.namespace),
        found.blocks,
        human::bytes(found.block_bytes),
        found.num_slots,
        found.orphans,
        found.quarantined_slots,
        found.journal_records,
    )
}

fn facts(dir: &Path, found: &Inspection) -> Value {
    json!({
        "dir": dir,
        "namespace": hex(&found.namespace),
        "geometry": String::from_utf8_lossy(&found.geometry),
        "slots": found.num_slots,
        "block_bytes": found.block_bytes,
        "slot_stride": found.slot_stride,
        "blocks": found.blocks,
        "orphans": found.orphans,
        "quarantined_slots": found.quarantined_slots,
        "journal_records": found.journal_records,
        "clean": found.clean,
        "owner": found.owner,
        "dropped": {
            "torn_tail_bytes": found.dropped.torn_tail_bytes,
            "damaged_records": found.dropped.damaged_records,
            "invalid_records": found.dropped.invalid_records,
            "beyond_capacity": found.dropped.beyond_capacity,
        },
    })
}
