//! Finds NIXL's library and loads it, before anything calls it.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use super::signals::KeptHandlers;
use super::sys::FUNCTIONS;
use crate::{AgentError, LIBRARY, LibrarySearch, NixlOptions};

/// `RTLD_NOLOAD`: only find what is loaded.
const RTLD_NOLOAD: i32 = libc::RTLD_NOLOAD;

/// The file that is loaded. The library stays loaded until the process ends: NIXL's threads and its
/// exit handlers use its code.
static LOADED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Loads the library once; afterwards NIXL's functions may be called.
///
/// # Errors
/// [`AgentError::Unavailable`]: not found, not loadable, without a function, or another file than
/// the one that is loaded.
pub(super) fn load(options: &NixlOptions) -> Result<PathBuf, AgentError> {
    let path = match options.find_library() {
        LibrarySearch::Found(path) => path,
        missing @ LibrarySearch::NotFound { .. } => return Err(AgentError::Unavailable(missing.to_string())),
    };
    let mut loaded = LOADED.lock();
    match &*loaded {
        Some(known) if *known == path || options.library.is_none() => return Ok(known.clone()),
        Some(known) => {
            let known = known.display();
            let text = format!("{known} is loaded already, so {} cannot be; use one library", path.display());
            return Err(AgentError::Unavailable(text));
        }
        None => {}
    }
    open(&path).map_err(AgentError::Unavailable)?;
    *loaded = Some(path.clone());
    Ok(path)
}

fn open(path: &Path) -> Result<(), String> {
    let _kept = KeptHandlers::new();
    let shown = path.display();
    // SAFETY: the initialisers of NIXL's library make no demands on their caller. An operator chose
    // the file.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        format!("{shown} cannot be loaded: {error}; install NIXL again: {}", crate::availability::INSTALL)
    })?;
    for name in FUNCTIONS {
        // SAFETY: the address is only looked at, never called.
        let found = unsafe { library.get::<*const ()>(*name) };
        found.map_err(|_| {
            format!("{shown} has no {name}; install NIXL 1.5: {}", crate::availability::INSTALL)
        })?;
    }
    // The stubs look for the library by its name, and find the one that is loaded under it.
    // SAFETY: nothing is loaded.
    let by_name = unsafe { Library::open(Some(LIBRARY), RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL) };
    by_name.map_err(|_| {
        format!("{shown} does not call itself {LIBRARY} (SONAME); give the file of that name")
    })?;
    std::mem::forget(library);
    if nixl_sys::is_stub() {
        return Err(format!("{shown} is a stub of NIXL, not NIXL; {}", crate::availability::INSTALL));
    }
    Ok(())
}
