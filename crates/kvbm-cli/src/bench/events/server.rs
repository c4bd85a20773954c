//! A `nats-server` of our own.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const PATIENCE: Duration = Duration::from_secs(10);
const PROGRAM: &str = "nats-server";

/// The program: as `named`, else `KVBM_NATS_SERVER`, else in PATH, else where the project's tests keep it.
pub(super) fn find(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(file) =
        named.map(Path::to_owned).or_else(|| std::env::var_os("KVBM_NATS_SERVER").map(PathBuf::from))
    {
        anyhow::ensure!(file.is_file(), "there is no nats-server at {}", file.display());
        return Ok(file);
    }
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&in_path).map(|folder| folder.join(PROGRAM));
    if let Some(found) = in_path.chain(fetched()).find(|file| file.is_file()) {
        return Ok(found);
    }
    bail!(
        "no nats-server was found: `cargo xtask test --only nats` fetches one, or name one with --nats-server FILE"
    )
}

/// Where the project's tests put it: `target/tools/*/nats-server`, beside this program or below this folder.
fn fetched() -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(|exe| exe.ancestors().nth(2).map(Path::to_owned));
    let folders = beside.into_iter().chain([PathBuf::from("target")]);
    folders.flat_map(|target| {
        let tools = std::fs::read_dir(target.join("tools")).into_iter().flatten().filter_map(Result::ok);
        tools.map(|tool| tool.path().join(PROGRAM))
    })
}

/// A port of this machine that nobody uses now.
pub(super) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr().context("no free port")?.port())
}

/// Runs until it is dropped.
pub(super) struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts `program` on a free port of this machine, with `JetStream` in files below `folder`.
    pub(super) fn start(program: &Path, folder: &Path) -> Result<Self> {
        let port = free_port()?;
        let mut command = Command::new(program);
        command
            .args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"])
            .arg(folder.join("jetstream"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let mut server = Self { child, port };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
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

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
