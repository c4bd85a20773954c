//! The secret of a deployment, for commands that read what it has signed.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use kvbm::config::Secret;
use kvbm_keys::DeploymentKey;

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
