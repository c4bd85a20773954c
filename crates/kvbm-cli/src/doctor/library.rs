//! Libraries that kvbm finds at run time.

use std::ffi::CStr;

use kvbm_nixl::{Availability, LibrarySearch, NixlOptions};

use super::{Finding, Status};

/// The CUDA driver's library, as the loader knows it.
const CUDA: &CStr = c"libcuda.so.1";

/// Whether the loader finds and can load a library.
fn can_load(name: &CStr) -> bool {
    // SAFETY: `name` ends with a NUL and lives during the call; RTLD_LAZY | RTLD_LOCAL binds nothing of ours to it. Loading runs the
    // library's initialisers: of the driver's own library only, which every CUDA program loads in the same way.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: `handle` came from the dlopen above, was not closed before, and nothing of the library is in use.
    unsafe { libc::dlclose(handle) };
    true
}

pub(super) fn cuda() -> Finding {
    if can_load(CUDA) {
        return Finding::ok("CUDA", "driver library libcuda.so.1 loads; this build runs the emulated device");
    }
    Finding::short(
        "CUDA",
        Status::Missing,
        "the loader does not find libcuda.so.1",
        "G1 is the emulated device, in host memory",
        "install the NVIDIA driver (sudo apt-get install nvidia-driver-580), or start the container with --gpus all",
    )
}

pub(super) fn nixl() -> Finding {
    let availability = NixlOptions::new("doctor").probe();
    let fix = match &availability {
        Availability::NotCompiledIn { library: LibrarySearch::Found(_) } => {
            "nothing to do until a build with NIXL is used"
        }
        _ => "pip install --no-deps nixl-cu12",
    };
    let found = match &availability {
        Availability::NotCompiledIn { library: LibrarySearch::Found(path) } => {
            format!("its library is at {}, but this build has no NIXL", path.display())
        }
        _ => format!("{} not found, and this build has no NIXL", kvbm_nixl::LIBRARY),
    };
    Finding::short(
        "NIXL",
        Status::Missing,
        found,
        "no memory of other machines; everything on this machine works without",
        fix,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_is_asked() {
        assert!(can_load(c"libc.so.6"));
        assert!(!can_load(c"libno-such-library-of-kvbm.so.1"));
        assert!(matches!(cuda().status, Status::Ok | Status::Missing));
        assert_eq!(nixl().name, "NIXL");
    }
}
