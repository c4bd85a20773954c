//! `kvbm remote ls`.

use std::fmt::Write;
use std::path::Path;
#[cfg(feature = "nats")]
use std::time::Duration;

use anyhow::{Result, ensure};
use kvbm::events_plane::BucketUrl;
use kvbm_layout::BlockLayout;
use kvbm_nixl::{BlockSet, FileDirectory, NodeAnnouncement};
use serde_json::{Value, json};

use super::{ListArgs, deliver};
use crate::args::Output;
use crate::ctl::plain;
use crate::human::{bytes, count};

pub(super) fn run(args: &ListArgs) -> Result<()> {
    args.json.as_ref().and_then(Output::file).map_or(Ok(()), crate::writable::expect)?;
    let key = args.secret.key()?;
    let (mut text, mut nodes, mut broken) = (String::new(), Vec::new(), Vec::new());
    let Found { place, announcements } = find(&args.place.checked()?.text())?;
    for (file, content) in announcements {
        match NodeAnnouncement::decode(&content, key.as_ref()) {
            Ok(node) => {
                describe(&mut text, &node);
                nodes.push(value_of(&node));
            }
            Err(error) => {
                let _ = writeln!(text, "{}: {error}", plain(&file));
                broken.push(json!({ "file": file, "error": error.to_string() }));
            }
        }
    }
    if text.is_empty() {
        let _ = writeln!(text, "no node is announced in {place}");
    }
    let failed = broken.len();
    deliver(args.json.as_ref(), &text, &json!({ "nodes": nodes, "broken": broken }))?;
    ensure!(
        failed == 0,
        "{failed} announcements cannot be read; their nodes run another version or have another secret, or remove them"
    );
    Ok(())
}

/// Announcements with their names, and where they are, without a password.
pub(super) struct Found {
    pub(super) place: String,
    pub(super) announcements: Vec<(String, Vec<u8>)>,
}

pub(super) fn find(place: &str) -> Result<Found> {
    if place.contains("://") {
        return on_server(place);
    }
    let folder = Path::new(place);
    ensure!(folder.is_dir(), "there is no folder {place}; name what remote.directory of the nodes names");
    Ok(Found { place: place.to_owned(), announcements: FileDirectory::open(folder)?.announcements()? })
}

#[cfg(feature = "nats")]
fn on_server(url: &str) -> Result<Found> {
    let url: BucketUrl = url.parse()?;
    // The lease counts where the bucket is made here: then nobody is there.
    let bucket = url.open(Duration::from_secs(15), Duration::from_secs(5))?;
    let values = bucket.values().into_iter().map(|(name, bytes)| (name, bytes.to_vec()));
    Ok(Found { place: url.to_string(), announcements: values.collect() })
}

#[cfg(not(feature = "nats"))]
fn on_server(url: &str) -> Result<Found> {
    // Without the feature no URL is one: the error names the feature.
    let url: BucketUrl = url.parse()?;
    Ok(Found { place: url.to_string(), announcements: Vec::new() })
}

fn describe(text: &mut String, node: &NodeAnnouncement) {
    let _ = writeln!(text, "node {}, agent {}, epoch {}", node.node, node.agent, node.epoch);
    for set in &node.sets {
        let layout = set.layout.layout().config();
        let (slice, size) = (&set.slice, memory_of(set));
        let _ = writeln!(
            text,
            "  rank {}: {} blocks in {}, group {}, layers {}..{}, heads {}..{}, namespace {}",
            slice.rank,
            count(layout.num_blocks.into()),
            bytes(size),
            set.group,
            slice.first_layer,
            slice.first_layer.saturating_add(slice.num_layers),
            slice.heads.start,
            slice.heads.start.saturating_add(slice.heads.count),
            set.namespace,
        );
    }
}

fn memory_of(set: &BlockSet) -> u64 {
    set.layout.memory().iter().fold(0, |sum, memory| sum.saturating_add(memory.bytes))
}

fn value_of(node: &NodeAnnouncement) -> Value {
    let set = |set: &BlockSet| {
        let layout = set.layout.layout().config();
        json!({
            "namespace": set.namespace.to_string(),
            "rank": set.slice.rank.0,
            "group": set.group.0,
            "first_layer": set.slice.first_layer,
            "layers": set.slice.num_layers,
            "first_head": set.slice.heads.start,
            "heads": set.slice.heads.count,
            "page_size": layout.page_size,
            "dtype": layout.dtype.name(),
            "blocks": layout.num_blocks,
            "bytes": memory_of(set),
        })
    };
    json!({
        "node": node.node.0,
        "epoch": node.epoch.0,
        "agent": node.agent,
        "sets": node.sets.iter().map(set).collect::<Vec<_>>(),
    })
}
