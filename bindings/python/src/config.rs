//! `Config`.

use crate::errors::{Error, Result};
use kvbm::config::Config as Settings;
use pyo3::prelude::*;
use std::path::PathBuf;

/// Every setting of a manager: docs/config.md has the reference.
///
/// `Config()` holds the defaults; `Config.load(path)` reads a TOML file, then `KVBM_*` variables.
#[pyclass(module = "kvbm_rs")]
#[derive(Clone, Default)]
pub(crate) struct Config {
    pub(crate) settings: Settings,
}

#[pymethods]
impl Config {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The settings of a TOML text; `name` names it in errors.
    #[staticmethod]
    #[pyo3(signature = (text, name = "<string>"))]
    fn from_toml(text: &str, name: &str) -> Result<Self> {
        Ok(Self { settings: Settings::from_toml(text, name)? })
    }

    /// The defaults, then the file, then the process's `KVBM_*` variables; checked.
    #[staticmethod]
    #[pyo3(signature = (path = None))]
    #[expect(clippy::needless_pass_by_value, reason = "what a Python argument becomes")]
    fn load(path: Option<PathBuf>) -> Result<Self> {
        Ok(Self { settings: Settings::load(path.as_deref())? })
    }

    /// Sets one key, such as `"host.capacity"`, from text, as a `KVBM_*` variable would.
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        self.settings.set(key, value).map_err(Error::from)
    }

    /// Applies `KVBM_*` variables of the process.
    fn apply_environment(&mut self) -> Result<()> {
        self.settings.apply_variables(std::env::vars_os()).map_err(Error::from)
    }

    /// The settings as TOML, without secrets and unset settings.
    fn to_toml(&self) -> String {
        self.settings.to_toml()
    }

    fn __repr__(&self) -> String {
        let model = &self.settings.namespace.model;
        format!(
            "Config(model={model:?}, host={}, disk={})",
            self.settings.host.capacity, self.settings.disk.capacity
        )
    }
}
