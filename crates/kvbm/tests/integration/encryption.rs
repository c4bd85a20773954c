//! Encryption at rest through a manager: what lies on the disk, and what is found again with which
//! key.
#![cfg(feature = "worker")]

use crate::encrypted_files::{assert_none_has, files, key_file, samples};
use crate::support::heads::{self, serve};
use crate::support::{namespace, tokens, unlimited};
use kvbm::config::{Blocks, CommandLine, Config, ModelConfig};
use kvbm::{BuildError, KvBlockManager, Owned, Tier};
use std::path::{Path, PathBuf};
use std::time::Duration;

const BLOCKS: u32 = 6;
const PATIENCE: Duration = Duration::from_secs(30);

/// One latent of a token in each layer, which all ranks hold.
fn latent() -> ModelConfig {
    ModelConfig { num_kv_heads: 1, outer_dim: 1, head_dim: 64, ..heads::model() }
}

fn build(
    dir: &Path,
    model: ModelConfig,
    ranks: u32,
    key: impl FnOnce(&mut Config),
) -> Result<KvBlockManager<Owned>, BuildError> {
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(8))
        .host(Blocks(16))
        .disk(dir.join("cache"), Blocks(16))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            key(config);
        })
        .build()
}

fn encrypting(key: PathBuf) -> impl FnOnce(&mut Config) {
    move |config| {
        config.disk.encrypt = true;
        config.encryption.key_file = Some(key);
    }
}

#[test]
fn ranks_find_their_blocks_again_and_the_disk_does_not_show_them() {
    for (model, ranks) in [(heads::model(), 1), (heads::model(), 2), (latent(), 2)] {
        let dir = tempfile::tempdir().expect("a directory");
        let key = key_file(dir.path(), '7');
        let manager = build(dir.path(), model.clone(), ranks, encrypting(key.clone())).expect("a manager");
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &sequence), 0);
        assert!(manager.shutdown(PATIENCE).is_complete());
        drop(manager);
        let manager = build(dir.path(), model.clone(), ranks, encrypting(key)).expect("a manager");
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "{ranks} ranks");
        let secrets = samples::<32>(&manager, &sequence);
        drop(manager);
        let files = files(&dir.path().join("cache"));
        assert!(files.iter().any(|path| path.ends_with("keys.kvbm")));
        assert_none_has(files, &secrets);
    }
}

#[test]
fn another_number_of_ranks_takes_over_what_is_encrypted_and_encrypts_it_again() {
    for (former, ranks) in [(2, 1), (1, 2)] {
        let dir = tempfile::tempdir().expect("a directory");
        let key = key_file(dir.path(), '7');
        let manager = build(dir.path(), heads::model(), former, encrypting(key.clone())).expect("a manager");
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &sequence), 0);
        assert!(manager.shutdown(PATIENCE).is_complete());
        drop(manager);
        let manager = build(dir.path(), heads::model(), ranks, encrypting(key)).expect("a manager");
        let taken_over: u64 = manager.workers().took_over().iter().map(|folders| folders.blocks).sum();
        assert_eq!(taken_over, u64::from(BLOCKS), "{former} to {ranks}");
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "{former} to {ranks}");
        assert_eq!(manager.metrics().tier(Tier::G3).corrupt.get(), 0);
        let secrets = samples::<32>(&manager, &sequence);
        drop(manager);
        let written = format!("rank-0-of-{ranks}");
        let files = files(&dir.path().join("cache"));
        assert!(files.iter().any(|path| path.to_string_lossy().contains(&written)));
        assert_none_has(files, &secrets);
    }
}

/// The folders of the former ranks stay as they are, for whoever has their key.
#[test]
fn another_number_of_ranks_takes_over_nothing_without_the_right_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let (ours, theirs) = (key_file(dir.path(), '7'), key_file(dir.path(), '8'));
    let manager = build(dir.path(), heads::model(), 2, encrypting(ours.clone())).expect("a manager");
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    assert!(manager.shutdown(PATIENCE).is_complete());
    drop(manager);
    for digit in [None, Some(theirs)] {
        let wrong = |config: &mut Config| {
            if let Some(key) = digit.clone() {
                encrypting(key)(config);
            }
        };
        let manager = build(dir.path(), heads::model(), 1, wrong).expect("folders of its own");
        let taken_over: u64 = manager.workers().took_over().iter().map(|folders| folders.blocks).sum();
        assert_eq!((taken_over, serve(&manager, &sequence)), (0, 0));
        drop(manager);
        let own = files(&dir.path().join("cache")).into_iter();
        own.filter(|path| path.to_string_lossy().contains("rank-0-of-1")).for_each(|path| {
            std::fs::remove_file(path).expect("removed");
        });
    }
    let manager = build(dir.path(), heads::model(), 2, encrypting(ours)).expect("a manager");
    assert_eq!(serve(&manager, &sequence), BLOCKS as usize);
}

#[test]
fn a_start_without_the_right_key_says_which_one_is_needed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (ours, theirs) = (key_file(dir.path(), '7'), key_file(dir.path(), '8'));
    let manager = build(dir.path(), heads::model(), 1, encrypting(ours.clone())).expect("a manager");
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    assert!(manager.shutdown(PATIENCE).is_complete());
    drop(manager);
    let refused = |key: Box<dyn FnOnce(&mut Config)>| {
        build(dir.path(), heads::model(), 1, key).map(drop).expect_err("refused").to_string()
    };
    let error = refused(Box::new(|_| ()));
    assert!(error.contains("disk.encrypt") && error.contains("encrypted"), "{error}");
    let error = refused(Box::new(encrypting(theirs.clone())));
    assert!(error.contains("encryption.previous_key_file"), "{error}");
    let error = refused(Box::new(encrypting(dir.path().join("nowhere"))));
    assert!(error.contains("encryption.key_file") && error.contains("nowhere"), "{error}");
    let error = refused(Box::new(|config| config.disk.encrypt = true));
    assert!(error.contains("needs encryption.key_file or encryption.key_command"), "{error}");
    let error = refused(Box::new({
        let ours = ours.clone();
        move |config| config.encryption.key_file = Some(ours)
    }));
    assert!(error.contains("has no use without disk.encrypt"), "{error}");
    let hangs = |config: &mut Config| {
        config.disk.encrypt = true;
        config.encryption.key_command = CommandLine::from_iter(["sleep", "1000"]);
        config.encryption.command_timeout = Duration::from_millis(100);
    };
    let error = refused(Box::new(hangs));
    assert!(error.contains("encryption.command_timeout"), "{error}");

    // From a command, and with a new key that takes the old one's place.
    let command = move |config: &mut Config| {
        config.disk.encrypt = true;
        config.encryption.key_command = CommandLine::from_iter(["cat", &theirs.display().to_string()]);
        config.encryption.previous_key_file = Some(ours);
    };
    let manager = build(dir.path(), heads::model(), 1, command).expect("a manager");
    assert_eq!(serve(&manager, &sequence), BLOCKS as usize);
}

/// Mutation that makes it fail: `release_namespace` leaves the keys.
#[test]
fn forgetting_destroys_the_key_and_old_copies_of_the_disk_say_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let key = key_file(dir.path(), '7');
    let manager = build(dir.path(), heads::model(), 2, encrypting(key.clone())).expect("a manager");
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    manager.flush(PATIENCE).expect("durable");
    let copied = |name: &str| -> Vec<(PathBuf, Vec<u8>)> {
        let paths = files(&dir.path().join("cache")).into_iter().filter(|path| path.ends_with(name));
        paths.map(|path| (path.clone(), std::fs::read(path).expect("a file"))).collect()
    };
    let old = [copied("slots.kvbm"), copied("journal.kvbm")].concat();
    let receipt = manager.forget_with_receipt(&manager.namespace().clone(), PATIENCE);
    assert!(receipt.is_complete() && receipt.copies[2] == u64::from(BLOCKS), "{receipt:?}");
    let mut keys: Vec<_> =
        receipt.keys.iter().map(|key| (key.rank.0, key.tier(), key.is_destroyed)).collect();
    keys.sort_unstable();
    assert_eq!(keys, [(0, Tier::G3, true), (1, Tier::G3, true)]);
    let named =
        |path: &PathBuf, id: &[u8]| std::fs::read(path).expect("a file").windows(16).any(|at| at == id);
    let key_files: Vec<_> =
        files(&dir.path().join("cache")).into_iter().filter(|path| path.ends_with("keys.kvbm")).collect();
    for key in &receipt.keys {
        assert_eq!(
            key_files.iter().filter(|path| named(path, key.id.as_bytes())).count(),
            1,
            "a receipt there too"
        );
    }
    let again = manager.forget_with_receipt(&manager.namespace().clone(), PATIENCE);
    assert_eq!(again.keys, [], "nothing is left to destroy");
    drop(manager);
    for (path, bytes) in old {
        std::fs::write(path, bytes).expect("written");
    }
    let manager = build(dir.path(), heads::model(), 2, encrypting(key)).expect("a manager");
    assert_eq!(serve(&manager, &sequence), 0, "nobody can read them");
}
