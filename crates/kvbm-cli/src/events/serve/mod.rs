//! `kvbm events serve-index`: who has which prefix, over HTTP.

mod api;
mod fetch;
mod http;
mod index;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use kvbm::config::Secret;
use kvbm::events_plane::{KvIndex, Subscriber};

use super::follow;
use crate::args::{events_url, metrics_addr};
use crate::interrupt;
use index::Index;

/// Options of `kvbm events serve-index`.
#[derive(Clone, Debug, Args)]
pub struct ServeIndexArgs {
    /// Where the events are published, like `nats://127.0.0.1:4222` (docs/events.md).
    #[arg(value_name = "URL", value_parser = events_url)]
    pub url: Secret,

    /// Where to listen. A port alone means 127.0.0.1, port 0 any free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8089", value_parser = metrics_addr)]
    pub listen: SocketAddr,

    /// Allow an address that other machines reach: whoever reaches it may ask.
    #[arg(long)]
    pub public: bool,

    /// Forget a source that was not heard of for so long; 0 for never.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub forget_after: u64,

    /// Different blocks that the index takes in; it takes up to 48 bytes for each block of each worker.
    #[arg(long, value_name = "N", default_value_t = KvIndex::DEFAULT_MAX_BLOCKS)]
    pub max_blocks: usize,
}

/// Serves until it was asked to stop.
pub(super) fn run(args: &ServeIndexArgs) -> Result<()> {
    interrupt::catch();
    anyhow::ensure!(
        args.public || args.listen.ip().is_loopback(),
        "--listen {}: other machines could reach it, and nobody is asked who he is; use 127.0.0.1, or add --public",
        args.listen
    );
    let (url, transport) = follow::open(&args.url)?;
    let subscriber = Subscriber::new(follow::subscribe(&url, transport.as_ref())?);
    let silence = Duration::from_secs(args.forget_after);
    let index = Arc::new(Index::new(subscriber, transport, KvIndex::new(args.max_blocks), silence)?);
    let served = Arc::clone(&index);
    let server = http::Server::start(args.listen, move |request| api::answer(&served, request))?;
    eprintln!("index of {url}: http://{}", server.addr());
    while !interrupt::asked() {
        index.follow(follow::TICK)?;
    }
    Ok(())
}
