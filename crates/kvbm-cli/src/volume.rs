//! `kvbm volume`: the data keys of encrypted volumes.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use kvbm::config::Config;
use kvbm::encryption::operator_keys;
use kvbm::plan::{NamespaceId, NamespaceTag, shown_uri};
use kvbm::volumes::{EncryptedVolume, VolumeEncryption};

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
    /// The deployment whose keys they are, where an engine's connector makes the namespace and not
    /// the configuration: 32 hexadecimal digits, which name its folder on the volume.
    #[arg(long, value_name = "DEPLOYMENT")]
    pub deployment: Option<NamespaceTag>,
    /// The key of this namespace alone, as the receipt of `kvbm ctl forget` and the log show it:
    /// eight hexadecimal digits.
    #[arg(long, value_name = "NAMESPACE", value_parser = crate::disk::namespace)]
    pub namespace: Option<NamespaceId>,
}

/// What the file and the `KVBM_*` variables say. Beside a named deployment it need not be complete:
/// a connector's file has no model and no namespace.
fn configuration(args: &RotateArgs) -> Result<Config> {
    if args.deployment.is_none() {
        return Ok(Config::load(Some(&args.config))?);
    }
    let name = args.config.display().to_string();
    let text = std::fs::read_to_string(&args.config).with_context(|| format!("{name} cannot be read"))?;
    let mut config = Config::from_toml(&text, &name)?;
    config.apply_variables(std::env::vars_os())?;
    Ok(config)
}

/// Does it.
pub fn run(command: &VolumeCommand) -> Result<()> {
    let VolumeCommand::Rotate(args) = command;
    let config = configuration(args)?;
    ensure!(
        config.volumes.encrypt && !config.volume.is_empty(),
        "{}: no volume is encrypted: set volumes.encrypt, and volume.uri",
        args.config.display()
    );
    let (key, previous) = operator_keys(&config)?.context("volumes.encrypt needs encryption.key_file")?;
    let deployment = args.deployment.unwrap_or_else(|| config.namespace().tag());
    for descriptor in config.volume_descriptors() {
        let (id, uri) = (descriptor.id, shown_uri(&descriptor.uri));
        let volume = kvbm::volume_registry(&config).register_volume(descriptor)?;
        let place = || format!("volume {id} ({uri})");
        ensure!(
            EncryptedVolume::has_keys(&*volume, deployment).with_context(place)?,
            "{}: deployment {deployment} has no data keys here: give --deployment, the name of a folder of the volume",
            place()
        );
        let encryption = VolumeEncryption { key: key.clone(), previous: previous.clone() };
        let made = EncryptedVolume::open(Arc::clone(&volume), deployment, encryption)
            .with_context(place)?
            .rotate(args.namespace)?;
        let of = args.namespace.map_or_else(String::new, |label| format!(" of namespace {:08x}", label.0));
        ensure!(made > 0, "{}: deployment {deployment} has no data key{of} to replace", place());
        println!("{}: {made} data keys were made, and encrypt new blocks", place());
    }
    Ok(())
}
