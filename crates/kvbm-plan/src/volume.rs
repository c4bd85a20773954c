//! What an operator says about a blob store.

use crate::VolumeId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A volume of G4. Its owner creates and mounts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeDescriptor {
    /// The volume's id in plans and locations.
    pub id: VolumeId,
    /// Where it is: `file:///mnt/kv`, `memory:`, or a scheme of a vendor.
    pub uri: String,
    /// Bytes that the objects of a deployment's namespace may take there, headers included; `None`:
    /// as many as the store takes. What others keep there is not counted.
    pub capacity_bytes: Option<u64>,
    /// Payloads begin at a multiple of this many bytes in their object; a power of two up to 1 MiB.
    pub alignment: u32,
    /// How long an operation may take when its caller has no better idea; more than zero, at most
    /// [`Self::MAX_DEADLINE`].
    pub deadline: Duration,
}

impl VolumeDescriptor {
    /// The longest deadline.
    pub const MAX_DEADLINE: Duration = Duration::from_secs(3600);

    /// A descriptor without a capacity limit, with alignment 1 and a deadline of 5 seconds.
    pub fn new(id: VolumeId, uri: impl Into<String>) -> Self {
        Self { id, uri: uri.into(), capacity_bytes: None, alignment: 1, deadline: Duration::from_secs(5) }
    }
}

/// What a [`VolumeDescriptor`] says beside the id: what a worker has to know to open a volume.
/// Credentials are named in the URI by reference, so each worker finds its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumePlace {
    /// As in the descriptor, at most [`VolumePlace::MAX_URI`] bytes.
    pub uri: String,
    /// As in the descriptor.
    pub capacity_bytes: Option<u64>,
    /// As in the descriptor.
    pub alignment: u32,
    /// As in the descriptor, in microseconds.
    pub deadline_us: u64,
}

impl VolumePlace {
    /// Most bytes of a URI.
    pub const MAX_URI: usize = 4096;

    /// The descriptor of volume `id` at this place.
    pub fn describe(self, id: VolumeId) -> VolumeDescriptor {
        let Self { uri, capacity_bytes, alignment, deadline_us } = self;
        VolumeDescriptor { id, uri, capacity_bytes, alignment, deadline: Duration::from_micros(deadline_us) }
    }
}

impl From<&VolumeDescriptor> for VolumePlace {
    fn from(descriptor: &VolumeDescriptor) -> Self {
        let VolumeDescriptor { ref uri, capacity_bytes, alignment, deadline, .. } = *descriptor;
        let deadline_us = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        Self { uri: uri.clone(), capacity_bytes, alignment, deadline_us }
    }
}

/// A volume's URI as errors show it. A path is shown as it is. Any other URI is shown without its
/// options and without the text before an `@`: these may hold a secret, and errors go to logs.
pub fn shown_uri(uri: &str) -> String {
    let is_path = uri
        .split_once(':')
        .is_none_or(|(scheme, _)| matches!(scheme, "dir" | "file") || scheme.contains(['/', '.']));
    if is_path {
        return uri.to_owned();
    }
    let (place, options) = uri.split_once('?').unwrap_or((uri, ""));
    let Some((before, rest)) = place.rsplit_once('@') else {
        // A secret may have a `?` itself, and what stands before that is its beginning.
        let end = if options.contains('@') { place.find(':').map_or(0, |at| at + 1) } else { place.len() };
        return place[..end].to_owned();
    };
    match (before.split_once("://"), before.split_once(':')) {
        (Some((scheme, _)), _) => format!("{scheme}://{rest}"),
        (None, Some((scheme, _))) => format!("{scheme}:{rest}"),
        (None, None) => rest.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_secret_in_a_uri_is_not_shown() {
        for (uri, told) in [
            ("/mnt/a@b?c", "/mnt/a@b?c"),
            ("./a:b@c", "./a:b@c"),
            ("mnt", "mnt"),
            ("dir:///mnt/a@b", "dir:///mnt/a@b"),
            ("memory:", "memory:"),
            ("s3://bucket/p?endpoint=http://h&secret_key=hunter2", "s3://bucket/p"),
            ("s3://AKIA:hunter2@bucket/p", "s3://bucket/p"),
            ("vendor://user:hun/ter2@pool/7?x", "vendor://pool/7"),
            ("vendor:pool?token=hunter2", "vendor:pool"),
            ("vendor:user:hunter2@pool/7", "vendor:pool/7"),
            ("hunter2@host:pool", "host:pool"),
            ("s3://AKIA:hun?ter2@bucket/p", "s3:"),
            ("hun?ter2@host:pool", ""),
            ("s3://AKIA@bucket?x=a@b", "s3://bucket"),
            ("", ""),
        ] {
            assert_eq!(shown_uri(uri), told);
        }
    }
}
