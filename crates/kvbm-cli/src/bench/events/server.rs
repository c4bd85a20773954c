//! A `nats-server` of our own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::scratch::Scratch;

const PATIENCE: Duration = Duration::from_secs(60);
const PROGRAM: &str = "nats-server";

/// The program: as `named`, else `KVBM_NATS_SERVER`, else in PATH, else where the project's tests
/// keep it.
pub(super) fn find(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(file) =
        named.map(Path::to_owned).or_else(|| std::env::var_os("KVBM_NATS_SERVER").map(PathBuf::from))
    {
        anyhow::ensure!(
            file.is_file(),
            "there is no nats-server at {}: name the program with --nats-server or KVBM_NATS_SERVER, or have `cargo xtask test --only test` fetch one",
            file.display()
        );
        return Ok(file);
    }
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&in_path).map(|folder| folder.join(PROGRAM));
    if let Some(found) = in_path.chain(fetched()).find(|file| file.is_file()) {
        return Ok(found);
    }
    bail!(
        "no nats-server was found: `cargo xtask test --only test` fetches one, or name one with --nats-server FILE"
    )
}

/// Where the project's tests put it: `target/tools/*/nats-server`, beside this program or below
/// this folder.
fn fetched() -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(|exe| exe.ancestors().nth(2).map(Path::to_owned));
    let folders = beside.into_iter().chain([PathBuf::from("target")]);
    folders.flat_map(|target| {
        let tools = std::fs::read_dir(target.join("tools")).into_iter().flatten().filter_map(Result::ok);
        tools.map(|tool| tool.path().join(PROGRAM))
    })
}

/// Runs until it is dropped; its files go with it.
pub(super) struct Server {
    child: Child,
    port: u16,
    _files: Scratch,
}

impl Server {
    /// Starts `program` on a port of its own choice, with `JetStream` in files in a folder for
    /// temporary things.
    pub(super) fn start(program: &Path) -> Result<Self> {
        let files = Scratch::create(&std::env::temp_dir(), "bench-events")?;
        let folder = files.path().to_owned();
        let mut command = Command::new(program);
        command.args(["-a", "127.0.0.1", "-p", "-1", "-js", "-sd"]).arg(folder.join("jetstream"));
        command.arg("--ports_file_dir").arg(&folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut server = Self { child, port: 0, _files: files };
        let deadline = Instant::now() + PATIENCE;
        // Written once it listens: `<program>_<pid>.ports`.
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let ports = folder.join(format!("{name}_{}.ports", server.child.id()));
        while server.port == 0 {
            server.port = read_port(&ports).unwrap_or(0);
            if let Some(status) = server.child.try_wait().context("the nats-server was lost")? {
                bail!("{} ended with {status} at once", program.display());
            }
            if Instant::now() >= deadline {
                bail!("{} does not listen after {} s", program.display(), PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

/// From `{"nats":["nats://127.0.0.1:PORT"],..}`.
fn read_port(file: &Path) -> Option<u16> {
    let ports: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).ok()?).ok()?;
    ports.pointer("/nats/0")?.as_str()?.rsplit_once(':')?.1.parse().ok()
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
