//! Whether NIXL can be used here, and what is missing.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// The library that NIXL is used through.
pub const LIBRARY: &str = "libnixl_capi.so";

/// Where NIXL's own installers and the system put libraries.
const SYSTEM_FOLDERS: [&str; 6] = [
    "/usr/local/nixl/lib/x86_64-linux-gnu",
    "/usr/local/nixl/lib/aarch64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib/x86_64-linux-gnu",
    "/opt/nvidia/nvda_nixl/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/lib",
];

/// The hidden folder of the Python wheel that holds the library.
const WHEEL_FOLDERS: [&str; 2] = [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"];

/// How a worker takes part in remote memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlOptions {
    /// Name of this worker's agent, unique in the deployment. 1 to 255 bytes.
    pub agent_name: String,
    /// The library's file; `None`: look for it in the usual places.
    pub library: Option<PathBuf>,
}

/// An option with a value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NIXL option {option} is {value:?}; {rule}")]
pub struct OptionsError {
    option: &'static str,
    value: String,
    rule: &'static str,
}

impl NixlOptions {
    /// Options of a worker with this agent name.
    pub fn new(agent_name: impl Into<String>) -> Self {
        Self { agent_name: agent_name.into(), library: None }
    }

    /// Checks the values without looking at the machine.
    ///
    /// # Errors
    /// The first option with a value that cannot be, and what is allowed.
    pub fn validate(&self) -> Result<(), OptionsError> {
        if !(1..=255).contains(&self.agent_name.len()) {
            let value = self.agent_name.chars().take(40).collect();
            return Err(OptionsError { option: "agent_name", value, rule: "give a name of 1 to 255 bytes" });
        }
        match &self.library {
            Some(path) if !path.is_absolute() => {
                let value = path.display().to_string();
                Err(OptionsError { option: "library", value, rule: "give the library's absolute path" })
            }
            _ => Ok(()),
        }
    }

    /// Looks for NIXL on this machine: in [`library`](Self::library) only, if that is given; else
    /// in the folders of `LD_LIBRARY_PATH`, the active Python environment (`VIRTUAL_ENV`), and the
    /// system's. Loads nothing.
    pub fn probe(&self) -> Availability {
        let library = match &self.library {
            Some(path) => LibrarySearch::among([path.clone()]),
            None => LibrarySearch::among(usual_places()),
        };
        Availability::NotCompiledIn { library }
    }
}

/// What stands between this process and remote memory. Its text says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// This build of kvbm has no NIXL in it. Peers, GDS and NIXL's object stores cannot be used;
    /// everything else can.
    NotCompiledIn {
        /// Whether NIXL's library is installed all the same.
        library: LibrarySearch,
    },
}

impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::NotCompiledIn { library } = self;
        write!(f, "NIXL is not compiled into this build, so remote memory cannot be used; {library}")
    }
}

/// The outcome of looking for NIXL's library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibrarySearch {
    /// It is here.
    Found(PathBuf),
    /// It is in none of these places.
    NotFound {
        /// Files that were looked for.
        tried: Vec<PathBuf>,
    },
}

impl LibrarySearch {
    /// The first of these files that exists.
    pub fn among(files: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut tried = Vec::new();
        for file in files {
            if file.is_file() {
                return Self::Found(file);
            }
            tried.push(file);
        }
        Self::NotFound { tried }
    }
}

impl fmt::Display for LibrarySearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tried = match self {
            Self::Found(path) => return write!(f, "its library is installed: {}", path.display()),
            Self::NotFound { tried } => tried,
        };
        let tried: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
        write!(
            f,
            "its library {LIBRARY} was not found either (tried {}): `pip install --no-deps nixl-cu12`, then set the NIXL \
             library option to SITE-PACKAGES/{}/{LIBRARY}",
            tried.join(", "),
            WHEEL_FOLDERS[0],
        )
    }
}

fn usual_places() -> Vec<PathBuf> {
    let search = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&search).filter(|folder| folder.is_absolute()).collect();
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
        folders.extend(wheel_folders(Path::new(&environment)));
    }
    folders.extend(SYSTEM_FOLDERS.map(PathBuf::from));
    folders.into_iter().map(|folder| folder.join(LIBRARY)).collect()
}

/// The wheel's folders in a Python environment: `lib/pythonX.Y/site-packages/...`.
fn wheel_folders(environment: &Path) -> Vec<PathBuf> {
    // An environment that cannot be listed has nothing to find.
    let entries = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let is_python = |name: &OsStr| name.as_encoded_bytes().starts_with(b"python");
    let pythons = entries.filter(|entry| is_python(&entry.file_name()));
    pythons
        .flat_map(|python| WHEEL_FOLDERS.map(|wheel| python.path().join("site-packages").join(wheel)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_is_found_in_a_python_environment() {
        let environment = tempfile::tempdir().unwrap();
        let folder = environment.path().join("lib/python3.11/site-packages/.nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(&folder).unwrap();
        let places = || wheel_folders(environment.path()).into_iter().map(|folder| folder.join(LIBRARY));
        assert!(
            matches!(LibrarySearch::among(places()), LibrarySearch::NotFound { tried } if tried.len() == 2)
        );

        let library = folder.join(LIBRARY);
        std::fs::write(&library, b"").unwrap();
        assert_eq!(LibrarySearch::among(places()), LibrarySearch::Found(library));
        assert!(wheel_folders(Path::new("/no/such/environment")).is_empty());
    }

    #[test]
    fn a_missing_library_is_named_with_the_remedy() {
        let mut options = NixlOptions::new("worker-0");
        options.library = Some("/no/such/libnixl_capi.so".into());
        let text = options.probe().to_string();
        for part in [
            "not compiled into this build",
            "tried /no/such/libnixl_capi.so",
            "pip install --no-deps nixl-cu12",
        ] {
            assert!(text.contains(part), "{text}");
        }
        options.library = None;
        let usual = options.probe().to_string();
        assert!(
            usual.contains("/usr/local/lib/libnixl_capi.so") || usual.contains("is installed"),
            "{usual}"
        );
    }

    #[test]
    fn a_library_that_exists_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any-name.so");
        std::fs::write(&path, b"").unwrap();
        let options = NixlOptions { library: Some(path.clone()), ..NixlOptions::new("a") };
        let found = options.probe();
        assert_eq!(found, Availability::NotCompiledIn { library: LibrarySearch::Found(path.clone()) });
        assert!(
            found.to_string().ends_with(&format!("its library is installed: {}", path.display())),
            "{found}"
        );
    }

    #[test]
    fn options_are_checked() {
        assert_eq!(NixlOptions::new("a").validate(), Ok(()));
        let relative = NixlOptions { library: Some("lib.so".into()), ..NixlOptions::new("a") };
        let cases = [
            (NixlOptions::new(""), "agent_name"),
            (NixlOptions::new("a".repeat(256)), "agent_name"),
            (relative, "library"),
        ];
        for (options, name) in cases {
            let error = options.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("NIXL option {name} is")), "{error}");
        }
    }
}
