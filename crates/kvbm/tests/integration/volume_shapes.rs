//! A volume holds blocks in an order that knows nothing of ranks: what a deployment wrote, one of
//! another size reads.
#![cfg(feature = "worker")]

use crate::support::heads::{model, serve};
use crate::support::store::hashes;
use crate::support::{namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::volumes::{BlobKey, DirectoryVolume};
use kvbm::{KvBlockManager, Owned, Path, Tier, VolumeDescriptor, VolumeId};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, Instant};

fn manager(folder: &FilePath, ranks: u32, configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(8))
        .host(Blocks(16))
        .volume(format!("dir://{}", folder.display()))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            config.volumes.queue_share = 1.0;
            config.volumes.recheck = Duration::from_millis(1);
            configure(config);
        })
        .build()
        .expect("a manager")
}

/// Objects of a folder, by key.
fn objects(folder: &FilePath) -> Vec<BlobKey> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(below) = folders.pop() {
        for entry in fs::read_dir(folder.join(&below)).expect("a folder") {
            let entry = entry.expect("an entry");
            let path = below.join(entry.file_name());
            if entry.file_type().expect("a type").is_dir() {
                folders.push(path);
            } else {
                found.extend(BlobKey::parse(path.to_str().expect("text")));
            }
        }
    }
    found
}

fn widths(folder: &FilePath) -> BTreeSet<u32> {
    objects(folder).iter().map(|key| key.slice.num_heads).collect()
}

#[test]
fn what_two_ranks_wrote_one_and_four_and_eight_read() {
    for writers in [1, 2, 4] {
        let folder = tempfile::tempdir().expect("a folder");
        let first = manager(folder.path(), writers, |_| {});
        let (sequence, longer) = (tokens(&first, 1, 6), tokens(&first, 1, 8));
        assert_eq!(serve(&first, &sequence), 0);
        assert!(first.shutdown(Duration::from_secs(30)).is_complete());
        drop(first);
        assert_eq!(objects(folder.path()).len(), 6 * writers as usize);
        // Eight ranks share four heads.
        for readers in [1, 2, 4, 8] {
            let second = manager(folder.path(), readers, |_| {});
            assert_eq!(serve(&second, &sequence), 6, "written by {writers}, read by {readers}");
            assert_eq!(second.metrics().path(Path::G4_G1).blocks.get(), 6);
            assert_eq!(second.metrics().path(Path::G2_G4).blocks.get(), 0, "nothing is written again");
            assert_eq!(second.metrics().tier(Tier::G4).corrupt.get(), 0);
        }
        // What goes on in other objects is read together with the beginning.
        let other = if writers == 2 { 4 } else { 2 };
        let second = manager(folder.path(), other, |_| {});
        assert_eq!(serve(&second, &longer), 6);
        drop(second);
        assert_eq!(widths(folder.path()), [4 / writers, 4 / other].into());
        for readers in [1, 2, 4] {
            assert_eq!(serve(&manager(folder.path(), readers, |_| {}), &longer), 8, "{readers} ranks");
        }
    }
}

#[test]
fn damaged_forgotten_and_surplus_objects_of_other_sizes_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let two = manager(folder.path(), 2, |_| {});
    let sequence = tokens(&two, 1, 6);
    serve(&two, &sequence);
    drop(two);
    let descriptor = VolumeDescriptor::new(VolumeId(9), folder.path().display().to_string());
    let directory = DirectoryVolume::open(descriptor).expect("a folder");
    let of = |at: usize| {
        let hash = hashes(&sequence)[at];
        objects(folder.path()).into_iter().filter(move |key| key.hash == hash).collect::<Vec<_>>()
    };
    let until = soon();
    let wait = |what: &str, met: &dyn Fn() -> bool| {
        while !met() {
            assert!(Instant::now() < until, "{what}");
            std::thread::yield_now();
        }
    };

    // One half of a block is damaged: one rank and four miss it, and it goes.
    let file = directory.object_file(&of(4)[0]);
    let mut bytes = fs::read(&file).expect("an object");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&file, &bytes).expect("an object");
    let one = manager(folder.path(), 1, |_| {});
    assert_eq!(one.match_prefix(&sequence).len(), 6, "presence is a hint");
    assert_eq!(serve(&one, &sequence), 4);
    assert_eq!(one.metrics().tier(Tier::G4).corrupt.get(), 1);
    // It was computed again, and lies there as one rank writes it. Where that came before the
    // removal it is removed in place of the halves, which the next look at them finds.
    wait("the halves go", &|| {
        let went = of(4).len() == 1 && of(4)[0].slice.num_heads == 4;
        if !went {
            for tier in [Tier::G1, Tier::G2] {
                one.clear(tier).expect("a tier of ours");
            }
            serve(&one, &sequence);
        }
        went
    });
    drop(one);
    assert_eq!(serve(&manager(folder.path(), 4, |_| {}), &sequence), 6);

    // Half of a block is gone.
    fs::remove_file(directory.object_file(&of(2)[0])).expect("an object");
    assert_eq!(serve(&manager(folder.path(), 1, |_| {}), &sequence), 2);

    // What four ranks forget is gone for all.
    let four = manager(folder.path(), 4, |_| {});
    assert_eq!(four.match_prefix(&sequence).len(), 6);
    four.clear(Tier::G4).expect("a volume");
    wait("all objects go", &|| objects(folder.path()).is_empty());
}
