//! `kvbm volume` as people and scripts run it.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm::plan::{
    BlockIdentity, GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeDescriptor, VolumeId,
};
use kvbm::volumes::{BlobKey, BlobSlice, DirectoryVolume, EncryptedVolume, VolumeEncryption, VolumeExt};

const LABEL: NamespaceId = NamespaceId(0x1234_abcd);
const OTHER_DEPLOYMENT: NamespaceTag = NamespaceTag::from_bytes([0x5a; 16]);

/// A configuration with an encrypted volume; the volume's folder.
fn deployment(dir: &Path) -> PathBuf {
    let (volume, key) = (dir.join("volume"), dir.join("operator.key"));
    std::fs::create_dir(&volume).unwrap();
    std::fs::set_permissions(&volume, std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&key).unwrap();
    std::io::Write::write_all(&mut file, "0123456789abcdef".repeat(4).as_bytes()).unwrap();
    let model = "[model]\nnum_layers = 2\nnum_kv_heads = 1\nhead_dim = 16\n[namespace]\nmodel = \"m\"\n";
    let text = format!(
        "{model}[host]\ncapacity = \"16 blocks\"\n[[volume]]\nid = 1\nuri = \"dir://{}\"\n[volumes]\nencrypt = true\n\
         [encryption]\nkey_file = \"{}\"\n",
        volume.display(),
        key.display()
    );
    std::fs::write(dir.join("kvbm.toml"), text).unwrap();
    volume
}

/// The volume as a manager of `deployment` has it.
fn opened(dir: &Path, deployment: NamespaceTag) -> EncryptedVolume {
    let descriptor = VolumeDescriptor::new(VolumeId(1), format!("dir://{}", dir.join("volume").display()));
    let key = kvbm::encryption::key_from_file("key", &dir.join("operator.key")).unwrap();
    let encryption = VolumeEncryption { key, previous: None };
    EncryptedVolume::open(Arc::new(DirectoryVolume::open(descriptor).unwrap()), deployment, encryption)
        .unwrap()
}

fn object(deployment: NamespaceTag, number: u8) -> BlobKey {
    let hash = SequenceHash::from_bytes([number; 16]);
    let identity = BlockIdentity { namespace: LABEL, group: GroupId(0), hash, parent: None, position: 0 };
    BlobKey::of(
        deployment,
        &identity,
        BlobSlice { first_layer: 0, num_layers: 2, first_head: 0, num_heads: 1 },
    )
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The exit status, and what was printed or said to be wrong.
fn rotate(dir: &Path, rest: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.args(["volume", "rotate", "--config"]).arg(dir.join("kvbm.toml")).args(rest);
    let output = command.output().unwrap();
    let text = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn data_keys_of_a_volume_are_replaced_and_old_blocks_stay_readable() {
    let dir = tempfile::tempdir().unwrap();
    deployment(dir.path());
    let config = kvbm::config::Config::load(Some(&dir.path().join("kvbm.toml"))).unwrap();
    let ours = config.namespace().tag();
    opened(dir.path(), ours).put_one(&object(ours, 1), &[1; 512], soon()).unwrap();

    let (is_good, text) = rotate(dir.path(), &["--namespace", "1234abcd"]);
    assert!(is_good && text.contains("1 data keys were made"), "{text}");
    let (is_good, text) = rotate(dir.path(), &[]);
    assert!(is_good && text.contains("1 data keys were made"), "{text}");

    let volume = opened(dir.path(), ours);
    volume.put_one(&object(ours, 2), &[2; 512], soon()).unwrap();
    assert_eq!(volume.get_one(&object(ours, 1), 512, soon()).unwrap(), [1; 512]);
    assert_eq!(volume.get_one(&object(ours, 2), 512, soon()).unwrap(), [2; 512]);
}

#[test]
fn a_deployment_without_keys_is_an_error_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let volume = deployment(dir.path());
    let (is_good, text) = rotate(dir.path(), &[]);
    assert!(!is_good && text.contains("has no data keys here: give --deployment"), "{text}");
    let config = kvbm::config::Config::load(Some(&dir.path().join("kvbm.toml"))).unwrap();
    assert!(!volume.join(config.namespace().tag().to_string()).exists(), "nothing of it was made");

    // An engine's connector makes a namespace that the configuration does not have.
    opened(dir.path(), OTHER_DEPLOYMENT).put_one(&object(OTHER_DEPLOYMENT, 1), &[1; 512], soon()).unwrap();
    assert!(!rotate(dir.path(), &[]).0);
    // Nor has the configuration of a connector a model.
    let file = dir.path().join("kvbm.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, &text[text.find("[host]").unwrap()..]).unwrap();
    let (is_good, text) = rotate(dir.path(), &[]);
    assert!(!is_good && text.contains("model.num_layers is not set"), "{text}");
    let other = OTHER_DEPLOYMENT.to_string();
    let (is_good, text) = rotate(dir.path(), &["--deployment", &other]);
    assert!(is_good && text.contains("1 data keys were made"), "{text}");
    let (is_good, text) = rotate(dir.path(), &["--deployment", &other, "--namespace", "00000001"]);
    assert!(!is_good && text.contains("has no data key of namespace 00000001 to replace"), "{text}");
    let (is_good, text) = rotate(dir.path(), &["--deployment", "5a5a"]);
    assert!(!is_good && text.contains("5a5a"), "{text}");
}
