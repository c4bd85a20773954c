//! Batches, for stores that take one object at a time.

use std::time::Instant;

use kvbm_plan::{VolumeId, clock};

use crate::{BlobKey, GetRequest, PutRequest, VolumeError};

/// What names an object: a request, or a key.
pub trait Keyed {
    /// The object.
    fn key(&self) -> BlobKey;
}

impl Keyed for BlobKey {
    fn key(&self) -> BlobKey {
        *self
    }
}

impl Keyed for GetRequest<'_> {
    fn key(&self) -> BlobKey {
        self.key
    }
}

impl Keyed for PutRequest<'_> {
    fn key(&self) -> BlobKey {
        self.key
    }
}

impl<K: Keyed> Keyed for &K {
    fn key(&self) -> BlobKey {
        K::key(self)
    }
}

impl<K: Keyed> Keyed for &mut K {
    fn key(&self) -> BlobKey {
        K::key(self)
    }
}

/// Serves a batch one request after the other, as [`Volume`](crate::Volume) asks for. Each has a
/// result, in order, whatever became of the others. From the deadline on it is
/// [`DeadlineExceeded`](VolumeError::DeadlineExceeded) for those whose turn has not come.
pub fn one_by_one<R: Keyed, T>(
    volume: VolumeId,
    operation: &'static str,
    requests: impl IntoIterator<Item = R>,
    deadline: Instant,
    mut serve: impl FnMut(R) -> Result<T, VolumeError>,
) -> Vec<Result<T, VolumeError>> {
    let turn = |request: R| {
        if clock::now() < deadline {
            serve(request)
        } else {
            Err(VolumeError::DeadlineExceeded { volume, operation, key: request.key() })
        }
    };
    requests.into_iter().map(turn).collect()
}
