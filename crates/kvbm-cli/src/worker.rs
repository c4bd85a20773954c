//! `kvbm worker`: the worker of one rank in a process of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use kvbm::config::Config;
use kvbm::{G1Memory, Rank, WorkerServer};

use crate::args::WrongUsage;
use crate::note::note;
use crate::number::whole;
use crate::{interrupt, log_lines};

/// How often the worker looks whether it was asked to stop.
const TICK: Duration = Duration::from_millis(50);
/// Time for the leader to save what only this worker holds, once the worker was asked to stop.
const SAVE_TIME: Duration = Duration::from_secs(30);
/// Time after that for transfers under way.
const STOP_TIME: Duration = Duration::from_secs(30);

/// Options of `kvbm worker`.
#[derive(Clone, Debug, Args)]
pub struct WorkerArgs {
    /// Configuration of the whole deployment: the leader has the same.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// Rank of this worker, from 0.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u16>(0..=1023))]
    pub rank: u16,

    /// Socket to listen at: its folder belongs to this user, and no other one writes there
    /// [default: the rank's one of parallelism.workers].
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    pub socket: Option<PathBuf>,

    /// Address to listen at for a leader on another machine: tcp://HOST:PORT. Needs certificates.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,

    /// PEM file with this worker's certificate for HOST [default: the configuration's].
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key, mode 0600 [default: the configuration's].
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// PEM file with the authorities of the leader: whoever has a certificate of theirs may lead
    /// [default: the configuration's].
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
}

impl WorkerArgs {
    /// The configuration, with what the command line says in place of it.
    fn config(&self) -> Result<Config> {
        let config = Config::load_with(Some(&self.config), |config| {
            let own = &mut config.parallelism;
            let given = [
                (&self.tls_cert, &mut own.tls_cert),
                (&self.tls_key, &mut own.tls_key),
                (&self.tls_ca, &mut own.tls_ca),
            ];
            for (given, setting) in given.into_iter().filter(|(given, _)| given.is_some()) {
                setting.clone_from(given);
            }
        })?;
        Ok(config)
    }

    /// Where to listen.
    fn address(&self, config: &Config) -> Result<PathBuf> {
        if let Some(address) = &self.listen {
            if !address.starts_with("tcp://") {
                let why = format!("--listen {address}: give tcp://HOST:PORT, or --socket PATH");
                return Err(WrongUsage(why).into());
            }
            return Ok(address.into());
        }
        let named = config.parallelism.workers.as_slice().get(usize::from(self.rank));
        let why = "no socket to listen at: name one with --socket PATH or --listen tcp://HOST:PORT, or one for each \
                   rank in parallelism.workers";
        let at = self.socket.as_ref().or(named).cloned().ok_or_else(|| WrongUsage(why.to_owned()))?;
        let files = [&self.tls_cert, &self.tls_key, &self.tls_ca];
        if !at.starts_with("tcp://") && files.into_iter().any(Option::is_some) {
            let why =
                format!("--tls-cert, --tls-key and --tls-ca have no use at the socket {}", at.display());
            return Err(WrongUsage(why).into());
        }
        Ok(at)
    }
}

/// Serves leaders until SIGTERM or Ctrl-C.
pub fn run(args: &WorkerArgs) -> Result<()> {
    let (config, rank) = (args.config()?, Rank(args.rank));
    let address = args.address(&config)?;
    interrupt::catch();
    log_lines::install();
    let server = WorkerServer::bind(&config, rank, &G1Memory::Owned, &address)
        .with_context(|| format!("cannot start the worker of rank {rank}"))?;
    crate::show(&format!("{}\n", first_line(&config, &server, rank)), false)?;
    let (stop, ended) = (server.stopper(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !interrupt::asked() && !ended.load(Ordering::Acquire) {
                std::thread::sleep(TICK);
            }
            // A leader that goes on loses nothing. One that has ended waits for nothing.
            if !ended.load(Ordering::Acquire) && !server.leave(SAVE_TIME) {
                note(&format!(
                    "kvbm worker: the leader did not confirm within {} s that it has saved the blocks of this rank: those \
                     that are not on disk or on a volume are lost",
                    SAVE_TIME.as_secs()
                ));
            }
            stop();
            let until = Instant::now() + STOP_TIME;
            while !ended.load(Ordering::Acquire) {
                if Instant::now() >= until {
                    note(&format!(
                        "kvbm worker: transfers were still under way {} s after it was asked to stop",
                        STOP_TIME.as_secs()
                    ));
                    std::process::exit(1);
                }
                std::thread::sleep(TICK);
            }
        });
        server.serve();
        ended.store(true, Ordering::Release);
    });
    Ok(())
}

fn first_line(config: &Config, server: &WorkerServer, rank: Rank) -> String {
    let ranks = config.parallelism.tensor_parallel;
    let [_, g2, g3] = config.capacity_blocks();
    let disk = config.disk.dir.as_ref().filter(|_| g3 > 0);
    let disk = disk.map_or(String::new(), |dir| format!(", G3 {g3} blocks in {}", dir.display()));
    format!(
        "kvbm worker: rank {rank} of {ranks} listens at {}: G1 {} blocks, G2 {g2} blocks{disk}; process {}",
        server.address(),
        server.g1().num_blocks(),
        std::process::id()
    )
}
