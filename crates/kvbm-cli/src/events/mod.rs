//! `kvbm events`: what travels on the event plane, and an index of it.

mod decode;
#[cfg(feature = "zmq")]
mod engines;
mod follow;
mod joining;
mod render;
mod serve;
mod stats;
mod tail;

use anyhow::Result;
use clap::Subcommand;

pub use decode::{DecodeArgs, Format};
pub use follow::FollowArgs;
pub use serve::ServeIndexArgs;
pub use stats::StatsArgs;
pub use tail::TailArgs;

/// What to do with events.
#[derive(Debug, Subcommand)]
pub enum EventsCommand {
    /// Print every event as it comes, and every loss.
    Tail(TailArgs),
    /// Print rates, losses and how far behind the reader is, every now and then.
    Stats(StatsArgs),
    /// Keep an index of who has which prefix and answer questions about it over HTTP.
    ServeIndex(ServeIndexArgs),
    /// Print a payload as one line of JSON.
    Decode(DecodeArgs),
}

/// Carries out the command.
pub fn run(command: &EventsCommand) -> Result<()> {
    match command {
        EventsCommand::Tail(args) => tail::run(args, &mut std::io::stdout().lock()),
        EventsCommand::Stats(args) => stats::run(args, &mut std::io::stdout().lock()),
        EventsCommand::ServeIndex(args) => serve::run(args),
        EventsCommand::Decode(args) => crate::show(&decode::run(args)?, false),
    }
}
