//! Libraries that kvbm finds at run time.

use kvbm_nixl::{Availability, LibrarySearch, NixlOptions};

use super::{Finding, Status};

pub(super) fn nixl() -> Finding {
    const EFFECT: &str = "no memory of other machines; everything on this machine works without";
    let missing = |found, fix| Finding::short("NIXL", Status::Missing, found, EFFECT, fix);
    match NixlOptions::new("doctor").probe() {
        Availability::Ready { library } => {
            Finding::short("NIXL", Status::Ok, library.display().to_string(), "memory of other machines", "")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for() {
        assert_eq!(nixl().name, "NIXL");
    }
}
