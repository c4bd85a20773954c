//! Encrypted volumes through a manager: what lies in the folder, what another manager finds there,
//! and what a forget leaves.
#![cfg(feature = "worker")]

use crate::encrypted_files::{assert_none_has, files, key_file, samples};
use crate::support::heads::{self, serve};
use crate::support::{namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::volumes::{DirectoryVolume, EncryptedVolume, VolumeEncryption};
use kvbm::{BuildError, KvBlockManager, Owned, Tier, TokenSequence, VolumeDescriptor};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const BLOCKS: u32 = 6;
const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// A deployment with a volume and no disk.
struct Deployment {
    dir: tempfile::TempDir,
    ranks: u32,
    secret: Option<&'static str>,
}

impl Deployment {
    fn new(ranks: u32, secret: Option<&'static str>) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("volume")).expect("a folder");
        Self { dir, ranks, secret }
    }

    fn volume(&self) -> PathBuf {
        self.dir.path().join("volume")
    }

    fn build(&self, configure: impl FnOnce(&mut Config)) -> Result<KvBlockManager<Owned>, BuildError> {
        let namespace = namespace();
        KvBlockManager::<Owned>::builder()
            .model(heads::model())
            .namespace(match self.secret {
                Some(secret) => namespace.deployment_secret(secret),
                None => namespace,
            })
            .device(Blocks(8))
            .host(Blocks(16))
            .volume(format!("dir://{}", self.volume().display()))
            .tensor_parallel(self.ranks)
            .configure(|config| {
                unlimited(config);
                config.volumes.recheck = Duration::from_millis(1);
                configure(config);
            })
            .build()
    }

    fn encrypting(&self, digit: char) -> KvBlockManager<Owned> {
        let key = key_file(self.dir.path(), digit);
        self.build(|config| encrypt(config, key)).expect("a manager")
    }

    fn files(&self) -> Vec<PathBuf> {
        files(&self.volume())
    }
}

fn encrypt(config: &mut Config, key: PathBuf) {
    config.volumes.encrypt = true;
    config.encryption.key_file = Some(key);
}

/// Serves a request, and waits until its blocks are on the volume. How many were found.
fn serve_and_keep(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    let found = serve(manager, sequence);
    assert!(manager.wait_offloads(soon()));
    found
}

#[test]
fn another_manager_finds_the_blocks_and_the_folder_does_not_show_them() {
    for (ranks, secret) in [(1, None), (2, None), (1, Some(SECRET))] {
        let deployment = Deployment::new(ranks, secret);
        let manager = deployment.encrypting('7');
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve_and_keep(&manager, &sequence), 0);
        let secrets = samples::<16>(&manager, &sequence);
        let files = deployment.files();
        assert!(files.len() > BLOCKS as usize * ranks as usize, "blocks, and keys");
        assert_none_has(files, &secrets);
        // Another node at the same time, then one after a restart of all.
        let node = deployment.encrypting('7');
        assert_eq!(serve(&node, &sequence), BLOCKS as usize, "{ranks} ranks");
        assert_eq!(node.metrics().tier(Tier::G4).hits.get(), u64::from(BLOCKS));
        drop((manager, node));
        let again = deployment.encrypting('7');
        assert_eq!(serve(&again, &sequence), BLOCKS as usize, "{ranks} ranks");
        assert_eq!(again.metrics().tier(Tier::G4).corrupt.get(), 0);
    }
}

#[test]
fn a_start_without_the_right_key_says_which_one_is_needed() {
    let deployment = Deployment::new(1, None);
    let manager = deployment.encrypting('7');
    let sequence = tokens(&manager, 1, BLOCKS);
    serve_and_keep(&manager, &sequence);
    drop(manager);
    let refused = |configure: &dyn Fn(&mut Config)| {
        deployment.build(configure).map(drop).expect_err("refused").to_string()
    };
    let error = refused(&|_| ());
    assert!(error.contains("set volumes.encrypt with"), "{error}");
    let theirs = key_file(deployment.dir.path(), '8');
    let error = refused(&|config| encrypt(config, theirs.clone()));
    assert!(error.contains("encryption.previous_key_file"), "{error}");
    let error = refused(&|config| config.volumes.encrypt = true);
    assert!(error.contains("volumes.encrypt") && error.contains("needs encryption.key_file"), "{error}");
    let ours = key_file(deployment.dir.path(), '7');
    let error = refused(&|config| config.encryption.key_file = Some(ours.clone()));
    assert!(error.contains("has no use without disk.encrypt or volumes.encrypt"), "{error}");
    // A new key takes the old one's place.
    let both = |config: &mut Config| {
        encrypt(config, theirs.clone());
        config.encryption.previous_key_file = Some(ours.clone());
    };
    let manager = deployment.build(both).expect("a manager");
    assert_eq!(serve(&manager, &sequence), BLOCKS as usize);
    drop(manager);
    assert_eq!(serve(&deployment.encrypting('8'), &sequence), BLOCKS as usize);

    let plain = Deployment::new(1, None);
    serve_and_keep(&plain.build(|_| ()).expect("a manager"), &sequence);
    let key = key_file(plain.dir.path(), '7');
    let error = plain.build(|config| encrypt(config, key)).map(drop).expect_err("refused").to_string();
    assert!(error.contains("not encrypted"), "{error}");
}

/// Mutation that makes it fail: a purge destroys no keys.
#[test]
fn forgetting_destroys_the_key_and_old_copies_of_the_volume_say_nothing() {
    let deployment = Deployment::new(2, None);
    let manager = deployment.encrypting('7');
    let sequence = tokens(&manager, 1, BLOCKS);
    serve_and_keep(&manager, &sequence);
    let blocks = deployment.files().into_iter().filter(|path| !path.to_string_lossy().contains("/ffffffff/"));
    let old: Vec<_> = blocks.map(|path| (path.clone(), std::fs::read(path).expect("a file"))).collect();
    assert_eq!(old.len(), 2 * BLOCKS as usize);
    let receipt = manager.forget_with_receipt(&manager.namespace().clone(), PATIENCE);
    assert!(receipt.is_complete() && receipt.on_volumes == u64::from(BLOCKS), "{receipt:?}");
    let keys: Vec<_> =
        receipt.keys.iter().map(|key| (key.tier(), key.volume.is_some(), key.is_destroyed)).collect();
    assert_eq!(keys, [(Tier::G4, true, true)], "one key for all ranks");
    drop(manager);
    for (path, bytes) in &old {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, bytes).expect("written");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("mode");
    }
    let manager = deployment.encrypting('7');
    assert_eq!(serve(&manager, &sequence), 0, "nobody can read them");
    assert!(manager.metrics().tier(Tier::G4).corrupt.get() > 0, "and they count as damaged");
}

#[test]
fn data_keys_are_replaced_while_a_manager_runs() {
    let deployment = Deployment::new(1, None);
    let manager = deployment.encrypting('7');
    let [first, second] = [1, 2].map(|start| tokens(&manager, start, BLOCKS));
    serve_and_keep(&manager, &first);
    let uri = format!("dir://{}", deployment.volume().display());
    let volume = DirectoryVolume::open(VolumeDescriptor::new(kvbm::VolumeId(0), uri)).expect("a volume");
    let path = key_file(deployment.dir.path(), '7');
    let key = kvbm::encryption::key_from_file("key", &path).expect("a key");
    let encryption = VolumeEncryption { key, previous: None };
    let tag = manager.namespace().tag();
    let volume = EncryptedVolume::open(Arc::new(volume), tag, encryption).expect("the same key");
    assert_eq!(volume.rotate(None).expect("a folder"), 1);
    serve_and_keep(&manager, &second);
    drop(manager);
    let manager = deployment.encrypting('7');
    assert_eq!([serve(&manager, &first), serve(&manager, &second)], [BLOCKS as usize; 2]);
    let receipt = manager.forget_with_receipt(&manager.namespace().clone(), PATIENCE);
    assert_eq!(receipt.keys.len(), 2, "the old key goes with the new one");
}
