//! redb: a table from slots to what they hold.

use crate::blocks::{first, identity, later};
use crate::{Outcome, Round, length};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::path::Path;
use std::time::{Duration, Instant};

/// Generation, hash, parent, position, namespace, group, checksum, bytes: what a record of ours
/// says beside its slot.
type Entry = (u64, [u8; 16], [u8; 16], u32, u32, u16, u64, u64);

const SLOTS: TableDefinition<u32, Entry> = TableDefinition::new("slots");

/// Measures once in `dir`, with transactions of `per_commit` entries, each durable when it returns.
pub fn round(dir: &Path, entries: u32, per_commit: u32) -> Outcome<Round> {
    let [file, filled, killed] = ["peer", "filled", "killed"].map(|name| dir.join(format!("{name}.redb")));
    let database = Database::create(&file)?;
    let mut generation = 0;
    let insert = write(&database, first(entries), per_commit, &mut generation)?;
    std::fs::copy(&file, &filled)?;
    let replace = write(&database, later(entries), per_commit, &mut generation)?;
    // What the end of the process would leave now.
    std::fs::copy(&file, &killed)?;
    drop(database);
    let bytes_replaced = length(&file)?;
    let recover = read_back(&file, entries)?;
    let recover_killed = read_back(&killed, entries)?;
    // As small as it gets.
    let mut database = Database::open(&filled)?;
    database.compact()?;
    drop(database);
    let bytes = length(&filled)?;
    Ok(Round { insert, replace, recover, recover_killed, bytes, bytes_replaced })
}

fn write(
    database: &Database,
    blocks: impl Iterator<Item = (u32, u32)>,
    per_commit: u32,
    generation: &mut u64,
) -> Outcome<Duration> {
    let blocks: Vec<(u32, u32)> = blocks.collect();
    let started = Instant::now();
    for part in blocks.chunks(per_commit as usize) {
        let transaction = database.begin_write()?;
        {
            let mut table = transaction.open_table(SLOTS)?;
            for (slot, block) in part {
                *generation += 1;
                table.insert(slot, entry(*block, *generation))?;
            }
        }
        transaction.commit()?;
    }
    Ok(started.elapsed())
}

fn entry(block: u32, generation: u64) -> Entry {
    let identity = identity(block);
    let parent = identity.parent.map_or([0; 16], |parent| *parent.as_bytes());
    let (namespace, group) = (identity.namespace.0, identity.group.0);
    (generation, *identity.hash.as_bytes(), parent, identity.position, namespace, group, u64::from(block), 64)
}

fn read_back(file: &Path, entries: u32) -> Outcome<Duration> {
    let started = Instant::now();
    let database = Database::open(file)?;
    let table = database.begin_read()?.open_table(SLOTS)?;
    let mut found: Vec<(Entry, u32)> = Vec::with_capacity(entries as usize);
    for row in table.iter()? {
        let (slot, entry) = row?;
        found.push((entry.value(), slot.value()));
    }
    found.sort_unstable_by_key(|(entry, _)| entry.0);
    let took = started.elapsed();
    if found.len() == entries as usize { Ok(took) } else { Err(format!("{} came back", found.len()).into()) }
}
