//! `kvbm disk`: looks at directories of G3 that no manager has open, and mends or empties them.

mod find;
mod keys;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use find::Set;
use kvbm::plan::NamespaceId;
use kvbm_disk::offline::{self, Inspection, Verification};
use kvbm_disk::{DiskKeys, Dropped};
use serde_json::{Value, json};

use crate::args::Output;
use crate::human;
use crate::progress::Progress;
use crate::secret::{OperatorKeyArgs, SecretArgs};

/// What to do with a directory.
#[derive(Clone, Debug, Subcommand)]
pub enum DiskCommand {
    /// Say what each directory holds, as its journal says. Also while a manager has it open.
    Inspect(DiskArgs),
    /// Read every block and compare its checksum; fails where bytes are damaged. Changes nothing.
    Verify(DiskArgs),
    /// Verify, then take damaged blocks out of use, and blocks without their parents off the books.
    Repair(DiskArgs),
    /// Remove all blocks, whatever their format: the files of kvbm and nothing else. The keys of
    /// encrypted blocks are overwritten first.
    Clear(DiskArgs),
    /// Give new blocks new keys, where blocks are encrypted. Blocks that are there stay readable
    /// until they are evicted; an opening destroys keys without blocks.
    Rotate {
        /// Which directories.
        #[command(flatten)]
        args: DiskArgs,
        /// The keys of this namespace alone, as `inspect` shows it: eight hexadecimal digits.
        #[arg(long, value_name = "NAMESPACE", value_parser = namespace)]
        namespace: Option<NamespaceId>,
    },
}

/// Which directories.
#[derive(Clone, Debug, Args)]
pub struct DiskArgs {
    /// What `disk.dir` (or `replay --dir`) names, or one of the folders in it; with commas what
    /// `disk.more_dirs` names too, in that order. Several, with spaces, are looked at one after the
    /// other.
    #[arg(value_name = "DIR,..", required = true, value_parser = OsStringValueParser::new().try_map(|text| striped(&text)))]
    pub dir: Vec<Dirs>,

    /// The secret with which blocks are signed.
    #[command(flatten)]
    pub secret: SecretArgs,

    /// The key with which blocks are encrypted.
    #[command(flatten)]
    pub operator: OperatorKeyArgs,

    /// Write what was found as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// The directories of one disk, over which its blocks are spread; there is one at least.
#[derive(Clone, Debug)]
pub struct Dirs(Vec<PathBuf>);

fn striped(text: &OsStr) -> Result<Dirs, &'static str> {
    let parts =
        text.as_bytes().split(|byte| *byte == b',').map(|part| PathBuf::from(OsStr::from_bytes(part)));
    let dirs: Vec<_> = parts.collect();
    if dirs.iter().any(|dir| dir.as_os_str().is_empty()) {
        Err("a directory has no name")
    } else {
        Ok(Dirs(dirs))
    }
}

pub(crate) fn namespace(text: &str) -> Result<NamespaceId, String> {
    let number = (text.len() == 8).then(|| u32::from_str_radix(text, 16).ok()).flatten();
    number
        .map(NamespaceId)
        .ok_or_else(|| "a namespace is eight hexadecimal digits, as inspect shows it".to_owned())
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
        let (Self::Inspect(args)
        | Self::Verify(args)
        | Self::Repair(args)
        | Self::Clear(args)
        | Self::Rotate { args, .. }) = self;
        args
    }
}

/// Does it.
pub fn run(command: &DiskCommand) -> Result<Found> {
    let known_by = if matches!(command, DiskCommand::Clear(_)) { find::LEFT } else { find::IN_USE };
    let mut dirs: Vec<Set> = Vec::new();
    for Dirs(named) in &command.args().dir {
        let found = find::directories(named, known_by)?;
        ensure!(
            !found.is_empty(),
            "{} is no directory of kvbm: neither it nor a folder in it has a journal.kvbm; name what disk.dir names",
            names(named)
        );
        dirs.extend(found.into_iter().filter(|set| !dirs.contains(set)).collect::<Vec<_>>());
    }
    let keys = command.args().operator.keys(command.args().secret.key()?)?;
    match command {
        DiskCommand::Inspect(_) => Ok(inspect(&dirs, &keys)),
        DiskCommand::Verify(_) => verify(&dirs, &keys),
        DiskCommand::Repair(_) => repair(&dirs, &keys),
        DiskCommand::Clear(_) => clear(&dirs),
        DiskCommand::Rotate { namespace, .. } => rotate(&dirs, &keys, *namespace),
    }
}

fn inspect(dirs: &[Set], keys: &DiskKeys) -> Found {
    let (mut text, mut all, mut unread) = (String::new(), Vec::new(), Vec::new());
    for dir in dirs {
        match offline::inspect(dir, Some(keys)) {
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

fn verify(dirs: &[Set], keys: &DiskKeys) -> Result<Found> {
    let progress = block_progress(dirs, keys)?;
    let mut checked = Checked::default();
    for dir in dirs {
        let found = offline::verify(dir, Some(keys), &mut |_, _| progress.advance(1))?;
        checked.add(dir, &found);
    }
    progress.finish();
    let damaged = checked.damaged;
    let failed = (damaged > 0)
        .then(|| format!("{damaged} blocks are damaged; kvbm disk repair takes their slots out of use"));
    Ok(Found { failed, ..checked.found() })
}

fn repair(dirs: &[Set], keys: &DiskKeys) -> Result<Found> {
    let progress = block_progress(dirs, keys)?;
    let mut checked = Checked::default();
    let [mut quarantined, mut freed] = [0; 2];
    for dir in dirs {
        let repair = offline::repair(dir, Some(keys), &mut |_, _| progress.advance(1))?;
        checked.add(dir, &repair.found);
        quarantined += repair.quarantined;
        freed += repair.freed;
    }
    progress.finish();
    // What was damaged no longer is: nothing failed.
    let mut found = checked.found();
    let _ = writeln!(
        found.text,
        "repaired: {quarantined} slots taken out of use, {freed} blocks freed that were half written or without their parents"
    );
    found.json["repaired"] = json!({ "quarantined_slots": quarantined, "freed_blocks": freed });
    Ok(found)
}

/// A progress over all blocks: the journals are read first, so that it knows its end and a bad
/// directory is found before hours of reading.
fn block_progress(dirs: &[Set], keys: &DiskKeys) -> Result<Progress> {
    let mut total = 0;
    for dir in dirs {
        total += offline::inspect(dir, Some(keys))?.blocks;
    }
    Ok(Progress::new("blocks", total))
}

/// What reading every block of some directories found.
#[derive(Default)]
struct Checked {
    text: String,
    directories: Vec<Value>,
    verified: u64,
    damaged: u64,
    orphans: u64,
}

impl Checked {
    fn add(&mut self, dir: &[PathBuf], found: &Verification) {
        let damaged = found.damaged.len() as u64;
        self.text += &describe(dir, &found.inspection);
        let _ = writeln!(self.text, "  {} blocks verified, {damaged} damaged", found.verified);
        self.verified += found.verified;
        self.damaged += damaged;
        self.orphans += found.inspection.orphans;
        let mut facts = facts(dir, &found.inspection);
        facts["verified_blocks"] = found.verified.into();
        facts["damaged_blocks"] = damaged.into();
        facts["damaged_slots"] = found.damaged.iter().map(|slot| slot.0).collect();
        self.directories.push(facts);
    }

    fn found(self) -> Found {
        let Self { mut text, directories, verified, damaged, orphans } = self;
        let _ =
            writeln!(text, "{verified} blocks verified, {damaged} damaged, {orphans} without their parents");
        let json = json!({
            "directories": directories, "verified_blocks": verified, "damaged_blocks": damaged, "orphans": orphans,
            "passed": damaged == 0,
        });
        Found { text, json, failed: None }
    }
}

fn rotate(dirs: &[Set], keys: &DiskKeys, namespace: Option<NamespaceId>) -> Result<Found> {
    let (mut text, mut all) = (String::new(), Vec::new());
    for dir in dirs {
        let retired = offline::rotate(dir, keys, namespace)?;
        let _ = writeln!(text, "{}\n  {retired} data keys encrypt no new blocks any more", names(dir));
        all.push(json!({ "dirs": dir, "retired_keys": retired }));
    }
    Ok(Found { text, json: json!({ "directories": all }), failed: None })
}

fn clear(sets: &[Set]) -> Result<Found> {
    let sets: Vec<Set> = sets.iter().map(|set| find::present(set)).collect::<Result<_>>()?;
    let progress = Progress::new("directories", sets.len() as u64);
    let mut bytes = 0;
    for set in &sets {
        bytes += find::clear(set).with_context(|| format!("cannot clear {}", names(set)))?;
        progress.advance(1);
    }
    progress.finish();
    let text = format!("{} directories cleared, {} freed\n", sets.len(), human::bytes(bytes));
    let cleared: Vec<_> = sets.iter().flatten().map(|dir| dir.display().to_string()).collect();
    Ok(Found { text, json: json!({ "cleared": cleared, "bytes": bytes }), failed: None })
}

/// For people.
fn names(dirs: &[PathBuf]) -> String {
    let names: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    names.join(", ")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn describe(dirs: &[PathBuf], found: &Inspection) -> String {
    let owner = found.owner.as_ref().map_or_else(String::new, |owner| format!(", in use by {owner}"));
    let end = if found.clean { "closed in order" } else { "not closed in order" };
    let Dropped { torn_tail_bytes, damaged_records, invalid_records, without_bytes, duplicates, .. } =
        found.dropped;
    let unread = if found.dropped == Dropped::default() {
        String::new()
    } else {
        format!(
            "  left out: {damaged_records} damaged records, {invalid_records} that make no sense, {without_bytes} blocks that \
             the slot file does not have, {duplicates} older copies, {torn_tail_bytes} bytes of a torn tail\n"
        )
    };
    format!(
        "{}\n  {}\n  namespace {}, {end}{owner}\n  {} blocks of {} in {} slots, {} without their parents, {} slots quarantined, {} \
         records\n{unread}{}",
        names(dirs),
        String::from_utf8_lossy(&found.geometry),
        hex(&found.namespace),
        found.blocks,
        human::bytes(found.block_bytes),
        found.num_slots,
        found.orphans,
        found.quarantined_slots,
        found.journal_records,
        keys::describe(found.encryption.as_ref()),
    )
}

fn facts(dirs: &[PathBuf], found: &Inspection) -> Value {
    json!({
        "dir": dirs[0],
        "dirs": dirs,
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
        "encryption": keys::facts(found.encryption.as_ref()),
        "dropped": {
            "torn_tail_bytes": found.dropped.torn_tail_bytes,
            "damaged_records": found.dropped.damaged_records,
            "invalid_records": found.dropped.invalid_records,
            "without_bytes": found.dropped.without_bytes,
            "duplicates": found.dropped.duplicates,
        },
    })
}
