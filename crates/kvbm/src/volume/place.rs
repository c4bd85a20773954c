//! Where a volume is, however its URI is written.

use std::path::{Component, Path, PathBuf};

/// What is equal for two URIs that name the same objects, as far as they tell. Nothing is looked
/// up: it is the workers that reach the place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place<'a> {
    Folder(PathBuf),
    /// A bucket, the prefix in it, and the service that is not the usual one.
    Bucket(&'a str, &'a str, Option<&'a str>),
    /// Of a kind that is not known here.
    Other(&'a str),
}

/// The place that a volume's URI names.
pub(super) fn place(uri: &str) -> Place<'_> {
    if let Some(rest) = uri.strip_prefix("s3://") {
        return bucket(rest);
    }
    let folder = ["file://", "dir://", "dir:"].iter().find_map(|scheme| uri.strip_prefix(scheme));
    match folder {
        Some(path) => Place::Folder(folded(path)),
        None if uri.contains("://") => Place::Other(uri),
        None => Place::Folder(folded(uri)),
    }
}

/// The options but one are about how it is reached.
fn bucket(rest: &str) -> Place<'_> {
    let (at, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (bucket, prefix) = at.split_once('/').unwrap_or((at, ""));
    let endpoint = options.split('&').find_map(|option| option.strip_prefix("endpoint="));
    Place::Bucket(bucket, prefix.trim_matches('/'), endpoint.map(|endpoint| endpoint.trim_end_matches('/')))
}

/// Without `.` and without slashes that say nothing. What `..` leads to is the file system's to
/// say.
fn folded(path: &str) -> PathBuf {
    Path::new(path).components().filter(|part| *part != Component::CurDir).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_the_same_however_it_is_written() {
        let places: [&[&str]; 11] = [
            &["/a/b", "/a/b/", "/a//b", "/a/./b", "file:///a/b", "dir:///a/b/", "dir:/a/b"],
            &["a/b", "./a/b", "dir:a/b"],
            &["/a/../b"],
            &["/b"],
            &["s3://one/kv", "s3://one//kv/", "s3://one/kv?region=eu&concurrency=4"],
            &["s3://one/kv?endpoint=https://here", "s3://one/kv/?anonymous=true&endpoint=https://here/"],
            &["s3://one/kv?endpoint=https://there"],
            &["s3://one"],
            &["s3://two/kv"],
            &["mine://a/b"],
            &["mine://a/b/"],
        ];
        for (at, one) in places.iter().enumerate() {
            for (other_at, other) in places.iter().enumerate() {
                for uris in one.iter().flat_map(|uri| other.iter().map(move |other| [*uri, *other])) {
                    assert_eq!(place(uris[0]) == place(uris[1]), at == other_at, "{uris:?}");
                }
            }
        }
    }
}
