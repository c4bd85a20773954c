//! Libraries that kvbm finds at run time.

use std::path::Path;

use kvbm_nixl::{Availability, LibrarySearch, NixlOptions};

use super::{Finding, Status};

/// NIXL's library, by default that of the usual places, and its back ends for files.
pub(super) fn nixl(library: Option<&Path>) -> Vec<Finding> {
    const EFFECT: &str = "no memory of other machines; everything on this machine works without";
    let missing = |found, fix| vec![Finding::short("NIXL", Status::Missing, found, EFFECT, fix)];
    let options = NixlOptions { library: library.map(Path::to_owned), ..NixlOptions::new("kvbm-doctor") };
    match options.probe() {
        Availability::Ready { library } => {
            let found = format!("{}: memory of other machines", library.display());
            [Finding::ok("NIXL", found)].into_iter().chain(files(&options)).collect()
        }
        Availability::NotCompiledIn { library: LibrarySearch::Found(path) } => missing(
            format!("its library is at {}, but this build has no NIXL", path.display()),
            "build with `--features nixl`",
        ),
        Availability::NotCompiledIn { .. } => missing(
            format!("{} not found, and this build has no NIXL", kvbm_nixl::LIBRARY),
            "pip install --no-deps nixl-cu12==1.5.1, and build with `--features nixl`",
        ),
        _ => missing(
            format!("{} not found", kvbm_nixl::LIBRARY),
            "pip install --no-deps nixl-cu12==1.5.1, and set NIXL_CAPI_LIBRARY to its file",
        ),
    }
}

/// Which back ends for files can be made: NIXL also lists those that cannot.
#[cfg(feature = "nixl")]
fn files(options: &NixlOptions) -> Vec<Finding> {
    use kvbm_nixl::{FileBackend, NixlAgent};

    const NAME: &str = "NIXL for files";
    let attempt = |backend: FileBackend| {
        let agent_name = format!("kvbm-doctor-{backend}");
        let options = NixlOptions { agent_name, files: Some(backend), peers: false, ..options.clone() };
        NixlAgent::new(&options).map(drop).map_err(|error| format!("{backend}: {error}"))
    };
    let (mut there, mut lacking) = (Vec::new(), Vec::new());
    for backend in FileBackend::ALL {
        match attempt(backend) {
            Ok(()) => there.push(backend.name()),
            Err(error) => lacking.push(error),
        }
    }
    let found = match (there.join(", "), lacking.join("; ")) {
        (there, lacking) if there.is_empty() => lacking,
        (there, lacking) if lacking.is_empty() => there,
        (there, lacking) => format!("{there} (not {lacking})"),
    };
    if there.contains(&FileBackend::Posix.name()) {
        return vec![Finding::ok(NAME, format!("{found}: disk.nixl_backend with disk.engine = \"nixl\""))];
    }
    vec![Finding::short(
        NAME,
        Status::Limited,
        found,
        "disk.engine = \"nixl\" is an error; the other engines work",
        "raise /proc/sys/fs/aio-max-nr, or install NIXL again: pip install --no-deps nixl-cu12==1.5.1",
    )]
}

#[cfg(not(feature = "nixl"))]
fn files(_options: &NixlOptions) -> Vec<Finding> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for() {
        let findings = nixl(None);
        assert_eq!(findings[0].name, "NIXL");
        let there = findings[0].status == Status::Ok;
        assert_eq!(findings.iter().any(|finding| finding.name == "NIXL for files"), there);
        let none = nixl(Some(Path::new("/no/such/libnixl_capi.so")));
        assert_eq!((none.len(), none[0].status), (1, Status::Missing));
    }
}
