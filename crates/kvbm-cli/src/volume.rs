//! `kvbm volume`: the data keys of encrypted volumes.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use kvbm::config::Config;
use kvbm::encryption::operator_keys;
use kvbm::plan::{NamespaceId, shown_uri};
use kvbm::volumes::{EncryptedVolume, VolumeEncryption, VolumeRegistry};

/// What is done with volumes.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeCommand {
    /// Give new blocks new data keys, where volumes are encrypted. Blocks that are there stay
    /// readable until they are evicted or forgotten. Managers may run: they use the new keys half a
    /// minute later.
    Rotate(RotateArgs),
}

/// Which keys.
#[derive(Clone, Debug, Args)]
pub struct RotateArgs {
    /// The configuration of the deployment: its namespace, volumes and operator's key.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// The key of this namespace alone, as the receipt of `kvbm ctl forget` and the log show it:
    /// eight hexadecimal digits.
    #[arg(long, value_name = "NAMESPACE", value_parser = crate::disk::namespace)]
    pub namespace: Option<NamespaceId>,
}

/// Does it.
pub fn run(command: &VolumeCommand) -> Result<()> {
    let VolumeCommand::Rotate(args) = command;
    let config = Config::load(Some(&args.config))?;
    ensure!(
        config.volumes.encrypt && !config.volume.is_empty(),
        "{}: no volume is encrypted: set volumes.encrypt, and volume.uri",
        args.config.display()
    );
    let (key, previous) = operator_keys(&config)?.context("volumes.encrypt needs encryption.key_file")?;
    let namespace = config.namespace().tag();
    for descriptor in config.volume_descriptors() {
        let (id, uri) = (descriptor.id, shown_uri(&descriptor.uri));
        let volume = VolumeRegistry::new().register_volume(descriptor)?;
        let encryption = VolumeEncryption { key: key.clone(), previous: previous.clone() };
        let made = EncryptedVolume::open(Arc::clone(&volume), namespace, encryption)
            .with_context(|| format!("volume {id} ({uri})"))?
            .rotate(args.namespace)?;
        println!("volume {id} ({uri}): {made} data keys were made, and encrypt new blocks");
    }
    Ok(())
}
