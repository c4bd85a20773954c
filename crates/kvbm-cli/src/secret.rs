//! The keys of a deployment, for commands that read what it has signed or encrypted.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use kvbm::config::Secret;
use kvbm::encryption::{key_from_command, key_from_file};
use kvbm_disk::{DiskEncryption, DiskKeys};
use kvbm_keys::{DeploymentKey, OperatorKey};

/// The variable that a manager reads it from, too.
const VARIABLE: &str = "KVBM_NAMESPACE_DEPLOYMENT_SECRET";

/// Where the secret comes from.
#[derive(Clone, Debug, Default, Args)]
pub struct SecretArgs {
    /// File with the secret of the deployment (`namespace.deployment_secret`), mode 0600, where it
    /// has one. Without this option the variable `KVBM_NAMESPACE_DEPLOYMENT_SECRET` counts, if set.
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

impl SecretArgs {
    /// The deployment's key, if a secret is given.
    pub(crate) fn key(&self) -> Result<Option<DeploymentKey>> {
        let of = |secret: &Secret| DeploymentKey::from_secret(secret.expose());
        match (&self.secret_file, std::env::var_os(VARIABLE)) {
            (Some(file), _) => {
                let secret = Secret::from_file(file);
                let secret = secret.with_context(|| format!("--secret-file {}", file.display()))?;
                Ok(Some(of(&secret)))
            }
            (None, None) => Ok(None),
            (None, Some(text)) if text.is_empty() => Ok(None),
            (None, Some(text)) => match text.into_string() {
                Ok(text) => Ok(Some(of(&Secret::new(text)))),
                Err(_) => bail!("{VARIABLE} is no text: a manager would refuse it, too"),
            },
        }
    }
}

/// Where the operator's keys come from.
#[derive(Clone, Debug, Default, Args)]
pub struct OperatorKeyArgs {
    /// File with the operator's key (`encryption.key_file`), mode 0600, where blocks are encrypted.
    #[arg(long, value_name = "FILE", conflicts_with = "key_command")]
    pub key_file: Option<PathBuf>,
    /// Command that prints it (`encryption.key_command`); blanks divide its arguments. No shell
    /// reads it.
    #[arg(long, value_name = "COMMAND")]
    pub key_command: Option<String>,
    /// File with the key before (`encryption.previous_key_file`).
    #[arg(long, value_name = "FILE")]
    pub previous_key_file: Option<PathBuf>,
}

/// How long a command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

impl OperatorKeyArgs {
    /// The keys of a directory that is signed with `signing`.
    pub(crate) fn keys(&self, signing: Option<DeploymentKey>) -> Result<DiskKeys> {
        let file = |option: &str, file: Option<&Path>| -> Result<Option<OperatorKey>> {
            Ok(file.map(|file| key_from_file(option, file)).transpose()?)
        };
        let command = self.key_command.as_deref().map(|command| {
            let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
            key_from_command("--key-command", &words, COMMAND_TIMEOUT)
        });
        let key = command
            .transpose()?
            .map_or_else(|| file("--key-file", self.key_file.as_deref()), |key| Ok(Some(key)))?;
        let previous = file("--previous-key-file", self.previous_key_file.as_deref())?;
        if key.is_none() && previous.is_some() {
            bail!("--previous-key-file needs --key-file or --key-command beside it");
        }
        Ok(DiskKeys { signing, encryption: key.map(|key| DiskEncryption { key, previous }) })
    }
}
