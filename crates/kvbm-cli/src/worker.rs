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
/// Time for transfers under way, once the worker was asked to stop.
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
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Serves leaders until SIGTERM or Ctrl-C.
pub fn run(args: &WorkerArgs) -> Result<()> {
    let config = Config::load(Some(&args.config))?;
    let rank = Rank(args.rank);
    let named = config.parallelism.workers.as_slice().get(rank.index());
    let Some(socket) = args.socket.as_ref().or(named) else {
        let why = "no socket to listen at: name one with --socket PATH, or one for each rank in parallelism.workers";
        return Err(WrongUsage(why.to_owned()).into());
    };
    interrupt::catch();
    log_lines::install();
    let server = WorkerServer::bind(&config, rank, &G1Memory::Owned, socket)
        .with_context(|| format!("cannot start the worker of rank {rank}"))?;
    crate::show(&format!("{}\n", first_line(&config, &server, rank)), false)?;
    let (stop, ended) = (server.stopper(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !interrupt::asked() && !ended.load(Ordering::Acquire) {
                std::thread::sleep(TICK);
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
        server.path().display(),
        server.g1().num_blocks(),
        std::process::id()
    )
}
