//! `kvbm serve`: the node daemon, which keeps a cache for engines in other processes.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use kvbm::admin::{AdminEngine, AdminHost};
use kvbm::config::{Capacity, Config};
use kvbm_node::{AttachedEngine, LineTimes, NodeServer};

use crate::args::WrongUsage;
use crate::note::note;
use crate::{interrupt, log_lines, notify};

/// How often the daemon looks whether it was asked to stop.
const TICK: Duration = Duration::from_millis(50);
/// How often the daemon returns the free memory of its heap to the system.
const HEAP_INTERVAL: Duration = Duration::from_secs(60);
/// Time to save what only memory has, once the daemon was asked to stop.
const STOP_TIME: Duration = Duration::from_secs(30);

/// Options of `kvbm serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Configuration: the model, its namespace, host memory, disks, volumes.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// Socket that engines attach to: its folder belongs to this user, and no other one writes
    /// there [default: node.socket].
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Take the place of the daemon at this socket, with its host memory: the model, the
    /// namespace, the ranks, the section host and transfer.staging are as they were.
    #[arg(long)]
    pub take_over: bool,

    /// Socket for `kvbm ctl` and `kvbm top`, for this user alone [default: admin.socket].
    #[arg(long, value_name = "PATH")]
    pub admin: Option<PathBuf>,

    /// Share host memory with the nodes that are announced in this folder, or on this server
    /// (`nats://HOST:PORT`), and read from theirs [default: remote.directory or remote.url, where
    /// remote.enabled].
    #[arg(long, value_name = "DIR|URL")]
    pub remote: Option<crate::remote::DiscoveryPlace>,

    /// This node's number among its peers, with --remote [default: remote.node].
    #[arg(long, value_name = "N", requires = "remote")]
    pub node: Option<u32>,

    /// Serve Prometheus metrics at this address.
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,
}

/// Serves engines until SIGTERM or Ctrl-C.
pub fn run(args: &ServeArgs) -> Result<()> {
    let config = configuration(args)?;
    let Some(socket) = args.socket.as_ref().or(config.node.socket.as_ref()) else {
        let why = "no socket to listen at: name one with --socket PATH, or in node.socket";
        return Err(WrongUsage(why.to_owned()).into());
    };
    interrupt::catch();
    log_lines::install();
    kvbm::storage::limit_free_heap();
    let (blocks, times) = (config.node.engine_blocks, LineTimes::default());
    let server = if args.take_over {
        NodeServer::take_over(&config, socket, blocks, times)
    } else {
        NodeServer::bind(&config, socket, blocks, times)
    };
    let server = server.context("cannot start the node daemon")?;
    announce(&config, &server)?;
    serve_until_stopped(&server);
    if server.is_handed_over() {
        note("kvbm serve: another daemon has taken over");
        return Ok(());
    }
    shut_down(&server)
}

/// What the file says, with what the options say instead.
fn configuration(args: &ServeArgs) -> Result<Config> {
    // G1 belongs to the engines: what `[device]` says does not matter.
    let no_device = |config: &mut Config| config.device.capacity = Capacity::NONE;
    let mut config = Config::load_with(Some(&args.config), no_device)?;
    if args.admin.is_some() {
        config.admin.socket.clone_from(&args.admin);
        config.validate()?;
    }
    if let Some(place) = &args.remote {
        config.remote.enabled = true;
        crate::remote::set_discovery(&mut config, place)?;
        config.remote.node = args.node.unwrap_or(config.remote.node);
        config.validate()?;
    }
    if args.metrics.is_some() {
        config.metrics.http = args.metrics;
        config.validate()?;
    }
    Ok(config)
}

/// Lets operators ask the daemon, and says that it serves.
fn announce(config: &Config, server: &NodeServer) -> Result<()> {
    let engines = Box::new(server.engine_list());
    let host_pages = server.host_pages();
    server.manager().admin().hosted_by(Arc::new(Daemon { engines, host_pages }));
    if let Some(addr) = server.manager().metrics_addr() {
        let scheme = if config.metrics.tls_cert.is_some() { "https" } else { "http" };
        note(&format!("metrics: {scheme}://{addr}/metrics"));
    }
    crate::show(&format!("{}\n", first_line(config, server)), false)?;
    notify::notify_service_manager("READY=1");
    Ok(())
}

/// Returns when somebody asked the daemon to stop, or another one has taken over.
fn serve_until_stopped(server: &NodeServer) {
    let (stop, ended) = (server.stopper(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut heap_returned = Instant::now();
            while !interrupt::asked() && !ended.load(Ordering::Acquire) {
                std::thread::sleep(TICK);
                // Brings the gauges up to date for whoever scrapes them.
                server.manager().metrics();
                if heap_returned.elapsed() > HEAP_INTERVAL {
                    kvbm::storage::release_free_heap();
                    heap_returned = Instant::now();
                }
            }
            notify::notify_service_manager("STOPPING=1");
            stop();
        });
        server.serve();
        ended.store(true, Ordering::Release);
    });
}

/// Saves what only memory has.
fn shut_down(server: &NodeServer) -> Result<()> {
    let report = server.shutdown(STOP_TIME);
    if report.not_saved > 0 {
        note(&format!(
            "kvbm serve: {} blocks are lost with host memory: they were not on disk after {} s",
            report.not_saved,
            STOP_TIME.as_secs()
        ));
    }
    if let Some(error) = report.flush_error {
        anyhow::bail!("what is on disk is not durable: {error}");
    }
    Ok(())
}

/// What operators see and steer of this process.
struct Daemon {
    engines: Box<dyn Fn() -> Vec<AttachedEngine> + Send + Sync>,
    host_pages: String,
}

impl AdminHost for Daemon {
    fn engines(&self) -> Vec<AdminEngine> {
        let engine = |AttachedEngine { name, blocks, pids, ready }| AdminEngine { name, blocks, pids, ready };
        (self.engines)().into_iter().map(engine).collect()
    }

    fn host_pages(&self) -> Option<String> {
        Some(self.host_pages.clone())
    }

    fn log_level(&self) -> Option<String> {
        Some(log_lines::level().to_string().to_ascii_lowercase())
    }

    fn set_log_level(&self, level: &str) -> Result<(), String> {
        log_lines::set_level(level.parse().map_err(|_| format!("there is no level '{level}'"))?);
        Ok(())
    }
}

fn first_line(config: &Config, server: &NodeServer) -> String {
    let [_, g2, g3] = config.capacity_blocks();
    let ranks = config.parallelism.tensor_parallel;
    let disk = config.disk.dir.as_ref().filter(|_| g3 > 0);
    let disk = disk.map_or(String::new(), |dir| format!(", G3 {g3} blocks in {}", dir.display()));
    let remote = match (&config.remote.directory, &config.remote.url) {
        (Some(dir), _) if config.remote.enabled => {
            format!(", node {} in {}", config.remote.node, dir.display())
        }
        (_, Some(_)) if config.remote.enabled => format!(", node {} over NATS", config.remote.node),
        _ => String::new(),
    };
    format!(
        "kvbm serve: {} on {ranks} ranks at {}: G2 {g2} blocks{disk}{remote}; {}; process {}",
        config.namespace.model,
        server.path().display(),
        server.host_pages(),
        std::process::id()
    )
}
