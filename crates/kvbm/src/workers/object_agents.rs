//! Volumes in S3-compatible stores whose objects NIXL moves (`transport=nixl`).

use crate::config::Config;
use kvbm_volume::VolumeRegistry;

/// A registry that opens all that `VolumeRegistry::new()` does. With the features `s3` and `nixl`
/// it also opens `s3:` URIs with `transport=nixl`, by NIXL's library of `remote.library`.
pub fn volume_registry(config: &Config) -> VolumeRegistry {
    with_nixl(VolumeRegistry::new(), config)
}

#[cfg(not(all(feature = "s3", feature = "nixl")))]
fn with_nixl(registry: VolumeRegistry, _config: &Config) -> VolumeRegistry {
    registry
}

#[cfg(all(feature = "s3", feature = "nixl"))]
fn with_nixl(registry: VolumeRegistry, config: &Config) -> VolumeRegistry {
    use kvbm_volume::S3Volume;
    use std::sync::Arc;

    let library = config.remote.library.clone();
    registry.with_scheme(
        "s3",
        Box::new(move |descriptor| {
            let library = library.clone();
            let open = move |store: &_| moves::open(library.clone(), store);
            Ok(Arc::new(S3Volume::open_with(descriptor, &open)?))
        }),
    )
}

/// Objects by agents of NIXL.
#[cfg(all(feature = "s3", feature = "nixl"))]
mod moves {
    use kvbm_nixl::{BackendOptions, NixlObjects, NixlOptions, ObjectTransfer};
    use kvbm_volume::{ObjectMove, ObjectTransport, TransportStore};
    use std::io;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// NIXL's name of the back end.
    const BACKEND: &str = "OBJ";

    /// Makes the back end for a bucket.
    pub(super) fn open(
        library: Option<PathBuf>,
        store: &TransportStore,
    ) -> io::Result<Arc<dyn ObjectTransport>> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let mut options = NixlOptions::new(format!("kvbm-objects-{}-{number}", std::process::id()));
        (options.library, options.objects, options.peers) = (library, true, false);
        options.backends.push(BackendOptions { name: BACKEND.to_owned(), parameters: parameters(store) });
        let objects = NixlObjects::new(&options)
            .map_err(|error| io::Error::other(format!("option transport=nixl: {error}")))?;
        Ok(Arc::new(Objects(objects)))
    }

    /// What NIXL calls it.
    fn parameters(store: &TransportStore) -> Vec<(String, String)> {
        let mut parameters = Vec::new();
        let mut set = |name: &str, value: &str| parameters.push((name.to_owned(), value.to_owned()));
        set("bucket", &store.bucket);
        set("num_threads", &store.concurrency.to_string());
        if let Some(endpoint) = &store.endpoint {
            set("endpoint_override", endpoint);
            set("scheme", if endpoint.starts_with("http://") { "http" } else { "https" });
        }
        if let Some(region) = &store.region {
            set("region", region);
        }
        if let Some((id, secret, token)) = &store.credentials {
            set("access_key", id);
            set("secret_key", secret);
            if let Some(token) = token {
                set("session_token", token);
            }
        }
        parameters
    }

    #[derive(Debug)]
    struct Objects(NixlObjects);

    impl ObjectTransport for Objects {
        fn start_put(&self, location: &str, object: &[u8]) -> io::Result<Box<dyn ObjectMove>> {
            let started = self.0.write(location, object).map_err(io::Error::other)?;
            Ok(Box::new(Move(started)))
        }

        fn start_get(&self, location: &str, bytes: u64) -> io::Result<Box<dyn ObjectMove>> {
            let started = self.0.read(location, bytes).map_err(io::Error::other)?;
            Ok(Box::new(Move(started)))
        }
    }

    struct Move(ObjectTransfer);

    impl ObjectMove for Move {
        fn poll(&mut self) -> Option<io::Result<Vec<u8>>> {
            self.0.poll().map_err(io::Error::other).transpose()
        }
    }
}
