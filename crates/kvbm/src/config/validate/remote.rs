//! Memory of other nodes: how they are found, what moves the bytes, and what can be offered.

use super::{broken, positive};
use crate::config::choices::ChainRootKind;
use crate::config::sections::RemoteConfig;
use crate::config::{Config, ConfigError};
use kvbm_events::BucketUrl;
#[cfg(feature = "worker")]
use kvbm_nixl::{BackendOptions, MAX_BLOCK_SETS, NixlOptions};
use std::time::Duration;

/// Checks every rule of the section `[remote]`.
pub(super) fn check(config: &Config) -> Result<(), ConfigError> {
    let remote = &config.remote;
    if !remote.enabled {
        return Ok(());
    }
    if remote.node == 0 {
        return broken("remote.node", &0, "must be from 1 on, and unique among the peers");
    }
    check_discovery(config)?;
    check_agent(remote)?;
    check_offered_blocks(config)?;
    for (key, value) in [
        ("remote.refresh", remote.refresh),
        ("remote.lookup_deadline", remote.lookup_deadline),
        ("remote.read_deadline", remote.read_deadline),
        ("remote.longest_pause", remote.longest_pause),
    ] {
        positive(key, value)?;
    }
    if !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&remote.lease) {
        return broken("remote.lease", &format!("{:?}", remote.lease), "must be from 100 ms to 10 minutes");
    }
    if remote.per_peer > remote.threads {
        let rule = format!("must be at most remote.threads ({})", remote.threads);
        return broken("remote.per_peer", &remote.per_peer, &rule);
    }
    Ok(())
}

/// What the agent is given. Without workers there is no agent.
#[cfg(not(feature = "worker"))]
fn check_agent(_remote: &RemoteConfig) -> Result<(), ConfigError> {
    Ok(())
}

/// What the agent is given, before it is made: a daemon that takes over from another one must not
/// find out later.
#[cfg(feature = "worker")]
fn check_agent(remote: &RemoteConfig) -> Result<(), ConfigError> {
    let Err(error) = remote.nixl_options("any").check_settings() else { return Ok(()) };
    let key = match error.option() {
        "library" => "remote.library",
        "progress_delay" => "remote.progress_delay",
        _ => "remote.ucx",
    };
    broken(key, &error.value(), error.rule())
}

#[cfg(feature = "worker")]
impl RemoteConfig {
    /// The options of an agent with this name.
    pub(crate) fn nixl_options(&self, agent_name: impl Into<String>) -> NixlOptions {
        let mut options = NixlOptions::new(agent_name);
        options.library.clone_from(&self.library);
        options.progress_delay = self.progress_delay;
        let parameters = self.ucx.as_slice().to_vec();
        options.backends.push(BackendOptions { name: "UCX".into(), parameters });
        options
    }
}

/// Where nodes find each other.
fn check_discovery(config: &Config) -> Result<(), ConfigError> {
    let (folder, url) = (config.remote.directory.as_ref(), config.remote.url.as_ref());
    if folder.is_some() == url.is_some() {
        let found = folder.map_or("none".to_owned(), |path| path.display().to_string());
        let rule = "or remote.url must name where nodes find each other: one of the two";
        return broken("remote.directory", &found, rule);
    }
    // A URL may hold a password.
    match url.map(|url| url.text().parse::<BucketUrl>()) {
        Some(Err(error)) => broken("remote.url", "(not shown)", &error.to_string()),
        Some(Ok(url)) if !url.is_closed_to_strangers() && config.namespace.deployment_secret.is_none() => {
            let rule = "needs namespace.deployment_secret where the server is on another machine: else whoever \
                        may write there could announce a node and serve forged blocks (or allow it with insecure=true)";
            broken("remote.url", &url, rule)
        }
        _ => Ok(()),
    }
}

/// Whether peers can use the blocks of this node.
fn check_offered_blocks(config: &Config) -> Result<(), ConfigError> {
    if config.host.capacity.is_none() {
        let rule = "must be above 0 with remote.enabled: peers read and fill host memory";
        return broken("host.capacity", &config.host.capacity, rule);
    }
    check_block_sets(config)?;
    if config.namespace.chain_root == ChainRootKind::PerProcess {
        let rule =
            "must be \"fixed\" or \"external\" with remote.enabled: otherwise peers compute other hashes";
        return broken("namespace.chain_root", &"per-process", rule);
    }
    Ok(())
}

/// How many block sets are announced. Without workers there are none.
#[cfg(not(feature = "worker"))]
fn check_block_sets(_config: &Config) -> Result<(), ConfigError> {
    Ok(())
}

/// How many block sets are announced: a peer takes only so many.
#[cfg(feature = "worker")]
fn check_block_sets(config: &Config) -> Result<(), ConfigError> {
    let (groups, ranks) = (config.model.cache_groups().len(), config.parallelism.tensor_parallel);
    if groups.saturating_mul(ranks as usize) > MAX_BLOCK_SETS {
        let rule = format!(
            "must be at most {} with remote.enabled and {groups} cache groups: a node announces {MAX_BLOCK_SETS} \
             block sets, one for each rank and group",
            MAX_BLOCK_SETS / groups
        );
        return broken("parallelism.tensor_parallel", &ranks, &rule);
    }
    Ok(())
}
