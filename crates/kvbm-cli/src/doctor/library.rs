//! Libraries that kvbm finds at run time.

use kvbm_nixl::{Availability, LibrarySearch, NixlOptions};

use super::{Finding, Status};

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
    fn the_library_is_looked_for() {
        assert_eq!(nixl().name, "NIXL");
    }
}
