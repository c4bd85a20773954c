//! A deployment with a secret: what it leaves on disk and on volumes is signed, found again by
//! whoever has the secret, and nothing that somebody else made is served.
#![cfg(feature = "worker")]

use crate::support::heads::{self, serve};
use crate::support::store::{Store, hashes, onboard, put, registry};
use crate::support::{model, namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, DiskEngine};
use kvbm::{KvBlockManager, Owned, Tier};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const SECRET: &str = "0123456789abcdef0123456789abcdef";

fn on_disk(dir: &Path, ranks: u32) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(heads::model())
        .namespace(namespace().deployment_secret(SECRET))
        .device(Blocks(8))
        .host(Blocks(8))
        .disk(dir, Blocks(8))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            config.disk.engine = DiskEngine::Buffered;
        })
        .build()
        .expect("a manager")
}

fn on_volume(store: &Arc<Store>) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace().deployment_secret(SECRET))
        .device(Blocks(8))
        .host(Blocks(16))
        .volume("test:")
        .volumes(registry(&[("test", store)]))
        .configure(|config| {
            unlimited(config);
            config.volumes.recheck = Duration::from_millis(1);
        })
        .build()
        .expect("a manager")
}

/// The journals below a folder.
fn journals(dir: &Path) -> Vec<PathBuf> {
    let entries =
        |dir: &Path| fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
    let ranks = entries(dir)
        .filter(|path| path.is_dir())
        .flat_map(|namespace| entries(&namespace).collect::<Vec<_>>());
    ranks.map(|rank| rank.join("journal.kvbm")).filter(|journal| journal.is_file()).collect()
}

#[test]
fn signed_blocks_are_found_again_and_taken_over_by_another_number_of_ranks() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = on_disk(dir.path(), 2);
    let sequence = tokens(&first, 1, 4);
    serve(&first, &sequence);
    assert!(first.wait_offloads(soon()));
    assert!(first.shutdown(Duration::from_secs(60)).is_complete());
    drop(first);
    let found = journals(dir.path());
    assert_eq!(found.len(), 2);
    for journal in found {
        assert_eq!(fs::read(journal).expect("a journal")[8..12], [3, 0, 0, 0], "it is signed");
    }
    for ranks in [2, 1] {
        let again = on_disk(dir.path(), ranks);
        assert_eq!(again.look_up(&sequence).len(), 4, "{ranks} ranks");
        assert_eq!(serve(&again, &sequence), 4, "{ranks} ranks");
        assert_eq!(again.metrics().tier(Tier::G3).corrupt.get(), 0);
        assert!(again.shutdown(Duration::from_secs(60)).is_complete());
    }
}

#[test]
fn a_journal_that_nobody_signed_is_counted_and_nothing_of_it_is_found() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = on_disk(dir.path(), 1);
    let sequence = tokens(&first, 1, 4);
    serve(&first, &sequence);
    assert!(first.wait_offloads(soon()));
    assert!(first.shutdown(Duration::from_secs(60)).is_complete());
    drop(first);
    let journal = journals(dir.path()).remove(0);
    let mut bytes = fs::read(&journal).expect("a journal");
    bytes[8] = 2;
    fs::write(&journal, bytes).expect("written");
    let again = on_disk(dir.path(), 1);
    assert_eq!(again.look_up(&sequence).len(), 0);
    let text = again.metrics().encode();
    let line = text.lines().find(|line| line.starts_with("kvbm_disk_other_key_records_total{rank=\"0\"}"));
    let counted: f64 = line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("the counter");
    assert!(counted >= 4.0, "{text}");
    assert_eq!(serve(&again, &sequence), 0, "it is computed");
    assert!(again.wait_offloads(soon()));
    assert!(again.shutdown(Duration::from_secs(60)).is_complete());
    drop(again);
    assert_eq!(serve(&on_disk(dir.path(), 1), &sequence), 4);
}

#[test]
fn objects_are_signed_and_an_object_that_somebody_else_made_is_a_miss() {
    let store = Store::new();
    let first = on_volume(&store);
    let sequence = tokens(&first, 1, 4);
    put(&first, &sequence);
    let namespace = first.namespace().tag();
    drop(first);
    let of = |at: usize| {
        let objects = store.keys_of(namespace);
        objects.into_iter().find(|key| key.hash == hashes(&sequence)[at]).expect("an object")
    };
    for at in 0..4 {
        store.memory.tamper(&of(at), |object| assert_eq!(object[8..10], [2, 0], "it is signed"));
    }
    assert_eq!(onboard(&on_volume(&store), &sequence), 4, "with the secret it is found");
    // Somebody without the secret replaces the third one: it would be right in a deployment
    // without a secret.
    store.memory.tamper(&of(2), |object| {
        let last = object.len() - 1;
        object[last] ^= 1;
        object[8..10].copy_from_slice(&[1, 0]);
        object[84..88].fill(0);
    });
    let again = on_volume(&store);
    assert_eq!(onboard(&again, &sequence), 2);
    assert_eq!(again.metrics().tier(Tier::G4).corrupt.get(), 1);
    assert!(again.wait_offloads(soon()));
}
