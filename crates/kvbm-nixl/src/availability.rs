//! Whether NIXL can be used here, and what is missing.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// What installs NIXL's library.
pub(crate) const INSTALL: &str = "`pip install --no-deps nixl-cu12==1.5.1`";

/// The longest pause of NIXL's progress thread. Longer ones show in every transfer.
const MAX_PROGRESS_DELAY: Duration = Duration::from_millis(10);

/// How a worker takes part in remote memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlOptions {
    /// Name of this worker's agent, unique in the deployment. 1 to 255 bytes, no zero byte.
    pub agent_name: String,
    /// The library's file; `None`: look for it in the usual places.
    pub library: Option<PathBuf>,
    /// What moves bytes of files; `None`: files cannot be registered.
    pub files: Option<FileBackend>,
    /// Whether objects of a bucket can be moved, through NIXL's back end OBJ
    /// (`NixlObjects`).
    pub objects: bool,
    /// Whether peers can be reached, through NIXL's back end UCX. An agent without peers moves
    /// bytes between host memory and files alone, and has no progress thread.
    pub peers: bool,
    /// Parameters of back ends, by their name. What is not given keeps NIXL's default.
    pub backends: Vec<BackendOptions>,
    /// Pause of NIXL's progress thread: 1 us to 10 ms. A shorter one costs processor time while
    /// nothing moves.
    pub progress_delay: Duration,
}

/// NIXL's back ends for files. Its back end `GDS` is none of them: it does not look at the results
/// of the operations of a batch, so a write that failed would count as done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum FileBackend {
    /// Asynchronous I/O of the kernel.
    #[default]
    Posix,
    /// Storage that a GPU reaches directly, with threads.
    GdsMt,
}

impl FileBackend {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Posix, Self::GdsMt];

    /// NIXL's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Posix => "POSIX",
            Self::GdsMt => "GDS_MT",
        }
    }
}

impl fmt::Display for FileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Parameters of one of NIXL's back ends. Their values may be secrets, and are not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct BackendOptions {
    /// `UCX`, `POSIX`, `GDS_MT` or `OBJ`.
    pub name: String,
    /// Keys and values, as NIXL documents them for the back end.
    pub parameters: Vec<(String, String)>,
}

impl fmt::Debug for BackendOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters: Vec<&str> = self.parameters.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("BackendOptions").field("name", &self.name).field("parameters", &parameters).finish()
    }
}

impl BackendOptions {
    /// Whether the back end reads this parameter, where that is known.
    fn reads(&self, parameter: &str) -> bool {
        self.name != "UCX" || UCX_PARAMETERS.contains(&parameter)
    }
}

/// An option with a value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NIXL option {option} is {value:?}; {rule}")]
pub struct OptionsError {
    option: &'static str,
    value: String,
    rule: &'static str,
}

impl OptionsError {
    /// The option: a field of [`NixlOptions`], `UCX parameter` or `UCX_TLS`.
    pub fn option(&self) -> &str {
        self.option
    }

    /// Its value, or the part of it that cannot be used.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What is allowed.
    pub fn rule(&self) -> &str {
        self.rule
    }
}

/// What UCX's back end reads of its parameters (`src/plugins/ucx/ucx_backend.cpp` of NIXL). NIXL
/// ignores others, also `ucx_devices`, which it lists among its own defaults.
const UCX_PARAMETERS: [&str; 7] = [
    "device_list",
    "num_workers",
    "num_threads",
    "split_batch_size",
    "ucx_num_device_channels",
    "ucx_error_handling_mode",
    "engine_config",
];

impl NixlOptions {
    /// Options of a worker with this agent name.
    pub fn new(agent_name: impl Into<String>) -> Self {
        Self {
            agent_name: agent_name.into(),
            library: None,
            files: None,
            objects: false,
            peers: true,
            backends: Vec::new(),
            progress_delay: Duration::from_micros(100),
        }
    }

    /// Checks the values without looking at the machine, and UCX's variable `UCX_TLS`.
    ///
    /// # Errors
    /// The first option with a value that cannot be, and what is allowed.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let transports = std::env::var("UCX_TLS").ok().filter(|given| self.peers && !allows_tcp(given));
        if let Some(value) = transports {
            let rule = "UCX needs tcp among its transports: add it";
            return Err(OptionsError { option: "UCX_TLS", value, rule });
        }
        self.check_settings()
    }

    /// Checks the values alone.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn check_settings(&self) -> Result<(), OptionsError> {
        let refuse = |option, value: String, rule| Err(OptionsError { option, value, rule });
        if !(1..=255).contains(&self.agent_name.len()) || self.agent_name.contains('\0') {
            let value = self.agent_name.chars().take(40).collect();
            return refuse("agent_name", value, "give a name of 1 to 255 bytes without zero bytes");
        }
        if !(Duration::from_micros(1)..=MAX_PROGRESS_DELAY).contains(&self.progress_delay) {
            let value = format!("{:?}", self.progress_delay);
            return refuse("progress_delay", value, "give 1us to 10ms");
        }
        for backend in &self.backends {
            let name = backend.name.as_str();
            if !["UCX", "OBJ"].contains(&name) && FileBackend::ALL.iter().all(|known| known.name() != name) {
                let rule = "give parameters of UCX, POSIX, GDS_MT or OBJ";
                return refuse("backends", backend.name.clone(), rule);
            }
            let names = backend.parameters.iter().map(|(name, _)| name);
            if let Some(unknown) = names.into_iter().find(|name| !backend.reads(name)) {
                let rule = "NIXL ignores it: give device_list, num_workers, num_threads, split_batch_size, \
                            ucx_num_device_channels, ucx_error_handling_mode or engine_config";
                return refuse("UCX parameter", unknown.clone(), rule);
            }
        }
        match &self.library {
            Some(path) if !path.is_absolute() => {
                refuse("library", path.display().to_string(), "give the library's absolute path")
            }
            _ => Ok(()),
        }
    }

    /// Whether remote memory can be used here. Looks for the library, and loads nothing.
    pub fn probe(&self) -> Availability {
        let library = self.find_library();
        if !cfg!(feature = "nixl") {
            return Availability::NotCompiledIn { library };
        }
        match library {
            LibrarySearch::Found(library) => Availability::Ready { library },
            library @ LibrarySearch::NotFound { .. } => Availability::NoLibrary { library },
        }
    }

    /// Looks for NIXL's library: in [`library`](Self::library) only, if that is given; else the
    /// file that `NIXL_CAPI_LIBRARY` names, the folders of `LD_LIBRARY_PATH`, the active Python
    /// environment (`VIRTUAL_ENV`), and the system's folders.
    pub fn find_library(&self) -> LibrarySearch {
        match &self.library {
            Some(path) => LibrarySearch::among([path.clone()]),
            None => LibrarySearch::among(usual_places()),
        }
    }
}

/// Whether a value of `UCX_TLS` leaves tcp in. UCX sets up every connection over it.
fn allows_tcp(transports: &str) -> bool {
    let (excludes, list) = match transports.strip_prefix('^') {
        Some(list) => (true, list),
        None => (false, transports),
    };
    let names = |wanted: &[&str]| list.split(',').any(|name| wanted.contains(&name.trim()));
    if excludes { !names(&["tcp", "all"]) } else { names(&["tcp", "all"]) }
}

/// What stands between this process and remote memory. Its text says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Availability {
    /// This build of kvbm has no NIXL in it. Blocks can be exchanged within this process alone;
    /// everything else works.
    NotCompiledIn {
        /// Whether NIXL's library is installed all the same.
        library: LibrarySearch,
    },
    /// NIXL is compiled in, and its library is not installed.
    NoLibrary {
        /// Where it was looked for.
        library: LibrarySearch,
    },
    /// NIXL is compiled in, and its library is installed.
    Ready {
        /// The library's file.
        library: PathBuf,
    },
}

impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotCompiledIn { library } => write!(
                f,
                "NIXL is not compiled into this build (cargo feature `nixl`), so remote memory cannot be used; {library}"
            ),
            Self::NoLibrary { library } => write!(f, "NIXL cannot be used: {library}"),
            Self::Ready { library } => write!(f, "NIXL can be used: {}", library.display()),
        }
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
            "its library {LIBRARY} was not found (tried {}): {INSTALL}, then set NIXL_CAPI_LIBRARY to \
             SITE-PACKAGES/{}/{LIBRARY}",
            tried.join(", "),
            WHEEL_FOLDERS[0],
        )
    }
}

fn usual_places() -> Vec<PathBuf> {
    let named = std::env::var_os("NIXL_CAPI_LIBRARY").map(PathBuf::from).filter(|path| path.is_absolute());
    named.into_iter().chain(in_folders()).collect()
}

fn in_folders() -> Vec<PathBuf> {
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
        let build = if cfg!(feature = "nixl") { "cannot be used" } else { "not compiled into this build" };
        for part in [build, "tried /no/such/libnixl_capi.so", "pip install --no-deps nixl-cu12"] {
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
        assert_eq!(options.find_library(), LibrarySearch::Found(path.clone()));
        let expected = if cfg!(feature = "nixl") {
            Availability::Ready { library: path.clone() }
        } else {
            Availability::NotCompiledIn { library: LibrarySearch::Found(path.clone()) }
        };
        assert_eq!(options.probe(), expected);
        assert!(expected.to_string().ends_with(&path.display().to_string()), "{expected}");
    }

    /// Pitfall: without tcp UCX cannot connect, and NIXL only says "BACKEND".
    #[test]
    fn transports_without_tcp_are_refused() {
        for good in ["all", "tcp", "cma,tcp", "^cma", "rc, tcp"] {
            assert!(allows_tcp(good), "{good}");
        }
        for bad in ["cma", "^tcp", "^all", "rc,sm", ""] {
            assert!(!allows_tcp(bad), "{bad}");
        }
    }

    #[test]
    fn options_are_checked() {
        assert_eq!(NixlOptions::new("a").validate(), Ok(()));
        let relative = NixlOptions { library: Some("lib.so".into()), ..NixlOptions::new("a") };
        let slow = NixlOptions { progress_delay: Duration::from_secs(1), ..NixlOptions::new("a") };
        let spinning = NixlOptions { progress_delay: Duration::ZERO, ..NixlOptions::new("a") };
        let backend = BackendOptions { name: "UCC".into(), parameters: Vec::new() };
        let unknown = NixlOptions { backends: vec![backend], ..NixlOptions::new("a") };
        let ucx = |name: &str| {
            let parameters = vec![(name.to_owned(), "mlx5_0".to_owned())];
            let backend = BackendOptions { name: "UCX".into(), parameters };
            NixlOptions { backends: vec![backend], ..NixlOptions::new("a") }
        };
        assert_eq!(ucx("device_list").validate(), Ok(()));
        let cases = [
            (NixlOptions::new(""), "agent_name"),
            (NixlOptions::new("a\0b"), "agent_name"),
            (NixlOptions::new("a".repeat(256)), "agent_name"),
            (relative, "library"),
            (slow, "progress_delay"),
            (spinning, "progress_delay"),
            (unknown, "backends"),
            // NIXL lists it among its defaults, and reads `device_list`.
            (ucx("ucx_devices"), "UCX parameter"),
        ];
        for (options, name) in cases {
            let error = options.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("NIXL option {name} is")), "{error}");
        }
    }
}
