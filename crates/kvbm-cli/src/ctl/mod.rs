//! `kvbm ctl` and `kvbm top`: an operator's calls to a running manager.

mod client;
mod render;
mod request;
pub mod top;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde_json::Value;

use client::Client;
pub(crate) use render::plain;
pub use request::{ChainArgs, NamespaceArgs};

/// Options of `kvbm ctl`.
#[derive(Clone, Debug, Args)]
pub struct CtlArgs {
    /// What to ask for.
    #[command(subcommand)]
    pub call: CtlCall,

    /// Whom to ask.
    #[command(flatten)]
    pub to: ConnectArgs,

    /// Print the answer as JSON.
    #[arg(long, global = true)]
    pub json: bool,
}

/// Where a manager is administered.
#[derive(Clone, Debug, Default, Args)]
pub struct ConnectArgs {
    /// Its socket, admin.socket of its configuration [default: what `KVBM_ADMIN_SOCKET` names].
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,

    /// Its address, admin.http of its configuration, like `http://127.0.0.1:9401`, or
    /// `https://node1:9401` where it has `admin.tls_cert`; needs
    /// --token-file.
    #[arg(long, value_name = "URL", global = true)]
    pub http: Option<String>,

    /// File with the token that goes with --http.
    #[arg(long, value_name = "FILE", global = true)]
    pub token_file: Option<PathBuf>,

    /// PEM file with the authorities whose certificates are trusted, for `https://`.
    #[arg(long, value_name = "FILE", global = true)]
    pub ca: Option<PathBuf>,

    /// PEM file with a certificate to show, for a manager with `admin.client_ca`.
    #[arg(long, value_name = "FILE", global = true, requires = "key")]
    pub cert: Option<PathBuf>,

    /// PEM file with the private key of --cert, mode 0600.
    #[arg(long, value_name = "FILE", global = true, requires = "cert")]
    pub key: Option<PathBuf>,
}

/// The calls.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlCall {
    /// Tiers, paths, ranks, engines, breakers: what the manager is doing.
    Status,
    /// Say where the blocks of a prompt are. Counts as no use.
    LookUp(ChainArgs),
    /// Keep blocks from eviction for a time, or for so many iterations of the engine.
    Pin {
        /// Which blocks.
        #[command(flatten)]
        chain: ChainArgs,
        /// Where: g1, g2, g3; several with commas [default: all of them].
        #[arg(long, value_name = "TIER,..", value_delimiter = ',')]
        tiers: Vec<String>,
        /// How long.
        #[arg(
            long,
            value_name = "SECONDS",
            conflicts_with = "iterations",
            required_unless_present = "iterations",
            allow_negative_numbers = true
        )]
        seconds: Option<f64>,
        /// How long, in iterations of the engine from now on.
        #[arg(long, value_name = "N")]
        iterations: Option<u64>,
    },
    /// Take pins back.
    Unpin {
        /// Which blocks.
        #[command(flatten)]
        chain: ChainArgs,
        /// Where: g1, g2, g3; several with commas [default: all of them].
        #[arg(long, value_name = "TIER,..", value_delimiter = ',')]
        tiers: Vec<String>,
    },
    /// Let blocks leave after so many iterations, or so much time, without use.
    Ttl {
        /// Whose blocks.
        #[command(flatten)]
        namespace: NamespaceArgs,
        /// Iterations; `off` lifts the limits.
        #[arg(value_name = "N|off", required_unless_present = "seconds")]
        iterations: Option<String>,
        /// Seconds, beside iterations or alone.
        #[arg(long, value_name = "S")]
        seconds: Option<u64>,
    },
    /// Show what tenants have, or change a tenant's share of every tier.
    Quotas {
        /// The tenant.
        #[arg(value_name = "TENANT", requires = "share")]
        tenant: Option<String>,
        /// Its new share, 0 to 1.
        #[arg(value_name = "SHARE", requires = "tenant")]
        share: Option<f64>,
    },
    /// Remove every block that nobody uses from a tier.
    Clear {
        /// g1, g2, g3 or g4.
        tier: String,
    },
    /// Remove a tenant, an adapter or the manager's own namespace from all tiers, with a receipt.
    Forget {
        /// What to forget.
        #[command(flatten)]
        namespace: NamespaceArgs,
        /// The manager's own namespace: the name of its model, so that nobody forgets the wrong
        /// one.
        #[arg(long, value_name = "NAME")]
        model: Option<String>,
        /// How long disks and volumes may take to confirm it.
        #[arg(long, value_name = "SECONDS", default_value_t = 60.0, allow_negative_numbers = true)]
        timeout: f64,
    },
    /// Wait until what is registered is durable.
    Flush {
        /// How long at most.
        #[arg(long, value_name = "SECONDS", default_value_t = 60.0, allow_negative_numbers = true)]
        timeout: f64,
    },
    /// End the manager's work for good: refuse new work, save what only memory has. Requests are
    /// misses from then on, until the process is started again.
    Drain {
        /// How long at most.
        #[arg(long, value_name = "SECONDS", default_value_t = 60.0, allow_negative_numbers = true)]
        timeout: f64,
    },
    /// Show the volumes and their states.
    Volumes,
    /// Show the lowest level that the log has, or change it.
    Log {
        /// error, warn, info, debug or trace.
        level: Option<String>,
    },
}

/// Makes one call.
pub fn run(args: &CtlArgs) -> Result<()> {
    let call = request::call(&args.call)?;
    let client = Client::new(&args.to)?;
    let answer = client.call(call.method, call.path, call.body.as_ref(), call.time)?;
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&answer)?)
    } else {
        render::answer(&args.call, &answer)
    };
    crate::show(&text, false)?;
    let is_complete = answer.get("complete").and_then(Value::as_bool).unwrap_or(true);
    let way_out = match args.call {
        // Nothing is written any more after it.
        CtlCall::Drain { .. } => "what was not saved is lost with the process",
        _ => "repeat the call",
    };
    anyhow::ensure!(is_complete, "not everything is done yet, see above: {way_out}");
    Ok(())
}

/// The status of a manager.
fn status(client: &Client) -> Result<Value> {
    client.call("GET", "/v1/status", None, Duration::from_secs(10)).context("no status")
}
