//! What each crate may pull in, as `cargo tree` tells it.

use crate::workspace::{Workspace, cargo, output_of};
use anyhow::bail;
use std::collections::BTreeSet;

/// Most external crates in `kvbm` with default features, normal and build edges.
const MAX_EXTERNAL: usize = 79;

/// Async runtimes.
const RUNTIMES: &[&str] = &[
    "async-executor",
    "async-global-executor",
    "async-io",
    "async-std",
    "compio",
    "futures-executor",
    "glommio",
    "monoio",
    "smol",
    "tokio",
];

/// Crates that open sockets.
const NETWORK: &[&str] = &[
    "async-nats",
    "curl",
    "h2",
    "hyper",
    "mio",
    "nats",
    "native-tls",
    "object_store",
    "openssl",
    "quinn",
    "reqwest",
    "rustls",
    "socket2",
    "tonic",
    "ureq",
    "zeromq",
    "zmq",
];

/// What only the feature `nixl` may bring.
const NIXL: &[&str] = &["bindgen", "clang-sys", "nixl-sys"];

/// What a scheduler process must not link.
const WORKER: &[&str] = &[
    "cudarc",
    "kvbm-device",
    "kvbm-disk",
    "kvbm-kernels",
    "kvbm-nixl",
    "kvbm-storage",
    "kvbm-transfer",
    "kvbm-volume",
    "nixl-sys",
];

/// Checks every rule and names every crate that breaks one.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    let mut broken = Vec::new();
    for name in ["kvbm-layout", "kvbm-pool"] {
        let tree = tree(workspace, name, &[])?;
        broken.extend(found(&tree, RUNTIMES, name, "async runtime"));
        broken.extend(found(&tree, NETWORK, name, "network crate"));
    }
    let events = tree(workspace, "kvbm-events", &["--no-default-features"])?;
    broken.extend(found(&events, NETWORK, "kvbm-events without features", "network crate"));

    let volume = tree(workspace, "kvbm-volume", &[])?;
    broken.extend(found(&volume, NETWORK, "kvbm-volume without features", "network crate"));

    let program = tree(workspace, "kvbm-cli", &[])?;
    broken.extend(found(&program, NIXL, "kvbm-cli without features", "part of NIXL's build"));

    let external = tree(workspace, "kvbm", &[])?.into_iter().filter(|package| !package.ours).count();
    println!("kvbm with default features: {external} external crates (at most {MAX_EXTERNAL})");
    if external > MAX_EXTERNAL {
        broken.push(format!(
            "kvbm with default features has {external} external crates, at most {MAX_EXTERNAL} are allowed: \
             see `cargo tree -p kvbm -e normal,build` and drop a crate or put it behind a feature"
        ));
    }
    if workspace.find("kvbm").is_some_and(|kvbm| kvbm.features.iter().any(|feature| feature == "worker")) {
        let scheduler = tree(workspace, "kvbm", &["--no-default-features"])?;
        broken.extend(found(&scheduler, WORKER, "kvbm without features (a scheduler)", "part of the worker"));
    } else {
        println!("kvbm has no feature `worker`: the dependencies of a scheduler are not checked");
    }
    if broken.is_empty() { Ok(()) } else { bail!("{}", broken.join("\n")) }
}

/// A line of `cargo tree`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    /// Whether it lies in this workspace.
    ours: bool,
}

fn tree(workspace: &Workspace, name: &str, args: &[&str]) -> anyhow::Result<BTreeSet<Package>> {
    let mut command = cargo(&workspace.root);
    command.args(["tree", "-p", name, "-e", "normal,build", "--prefix", "none"]).args(args);
    Ok(output_of(&mut command)?.lines().filter_map(parse).collect())
}

/// Reads `name vX.Y.Z (/path) (proc-macro) (*)`.
fn parse(line: &str) -> Option<Package> {
    let mut words = line.split_whitespace();
    let name = words.next()?.to_owned();
    let version = words.next()?.strip_prefix('v')?.to_owned();
    let ours = words.any(|word| word.starts_with("(/"));
    Some(Package { name, version, ours })
}

fn found<'a>(
    tree: &'a BTreeSet<Package>,
    banned: &'a [&str],
    what: &'a str,
    kind: &'a str,
) -> impl Iterator<Item = String> + 'a {
    let is_banned = |package: &&Package| banned.contains(&package.name.as_str());
    tree.iter().filter(is_banned).map(move |package| {
        format!(
            "{what} depends on `{}`, a {kind}: `cargo tree -i {}` shows through whom",
            package.name, package.name
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_cargo_tree_are_read() {
        let package =
            |name: &str, version: &str, ours| Package { name: name.into(), version: version.into(), ours };
        assert_eq!(parse("serde v1.0.2 (*)"), Some(package("serde", "1.0.2", false)));
        assert_eq!(parse("serde_derive v1.0.2 (proc-macro)"), Some(package("serde_derive", "1.0.2", false)));
        assert_eq!(
            parse("kvbm-plan v0.1.0 (/w/crates/kvbm-plan)"),
            Some(package("kvbm-plan", "0.1.0", true))
        );
        assert_eq!(parse("[build-dependencies]"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn banned_crates_are_named() {
        let tree = ["tokio v1.0.0", "serde v1.0.0"].into_iter().filter_map(parse).collect();
        let found: Vec<String> = found(&tree, RUNTIMES, "kvbm-pool", "async runtime").collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("kvbm-pool depends on `tokio`"), "{found:?}");
    }
}
