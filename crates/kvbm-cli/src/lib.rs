//! The `kvbm` command as a library: the binary only calls [`run`].
//!
//! **Knows:** the command line, traces, the replay and how results are shown.
//! **Must never know:** how blocks are kept or moved: it uses the library as any engine would.

pub mod args;
pub mod bench;
pub mod ctl;
pub mod disk;
pub mod doctor;
pub mod events;
mod features;
pub mod human;
pub mod interrupt;
pub mod layout;
mod log_lines;
pub mod monitoring;
pub mod note;
mod notify;
mod number;
pub mod pattern;
pub mod progress;
pub mod remote;
pub mod replay;
pub mod report;
pub mod rng;
pub mod scratch;
pub mod secret;
pub mod serve;
pub mod size;
mod space;
pub mod summary;
pub mod table;
mod token_file;
pub mod trace;
pub mod volume;
pub mod worker;
mod writable;

/// The program of the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use kvbm::http::HttpError;
use kvbm::metrics::MetricsServer;

use args::{Cli, CliCommand, DoctorArgs, Output, ReplayArgs, WrongUsage};
use note::note;
use size::SizeArgs;
use summary::ReplayResult;

/// Carries out the process's command line and returns its exit status: 0 done, 1 failed, 2 wrong
/// usage.
pub fn run() -> ExitCode {
    // Exits with status 2 on wrong usage, 0 after --help and --version.
    let cli = Cli::parse();
    let done = match &cli.command {
        None => run_replay(&ReplayArgs::demo()),
        Some(CliCommand::Replay(args)) => run_replay(args),
        Some(CliCommand::Bench { command }) => bench::run(command),
        Some(CliCommand::Ctl(args)) => ctl::run(args),
        Some(CliCommand::Top(args)) => ctl::top::run(args),
        Some(CliCommand::Dashboard) => monitoring::dashboard(),
        Some(CliCommand::Alerts) => monitoring::alerts(),
        Some(CliCommand::Disk { command }) => run_disk(command),
        Some(CliCommand::Doctor(args)) => run_doctor(args),
        Some(CliCommand::Events { command }) => events::run(command),
        Some(CliCommand::Layout { command }) => run_layout(command),
        Some(CliCommand::Remote { command }) => remote::run(command),
        Some(CliCommand::Size(args)) => run_size(args),
        Some(CliCommand::Serve(args)) => serve::run(args),
        Some(CliCommand::Volume { command }) => volume::run(command),
        Some(CliCommand::Worker(args)) => worker::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<WrongUsage>() => {
            note(&format!("error: {}\n\nFor more information, try '--help'.", explain(&error)));
            ExitCode::from(2)
        }
        Err(error) => {
            note(&format!("kvbm: {}", explain(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Serves metrics at `addr`, an address of this machine.
fn serve_metrics(metrics: &kvbm::metrics::Metrics, addr: std::net::SocketAddr) -> Result<MetricsServer> {
    let server = metrics.serve(addr).map_err(|error| match error {
        HttpError::Exposed { .. } => {
            anyhow::anyhow!("--metrics {addr}: other machines can reach it: use 127.0.0.1")
        }
        other => anyhow::anyhow!("--metrics: {other}"),
    })?;
    note(&format!("metrics: http://{}/metrics", server.addr()));
    Ok(server)
}

/// The error and its causes, each said once: many messages already end with their cause.
fn explain(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

fn run_replay(args: &ReplayArgs) -> Result<()> {
    args.check()?;
    // Found out now rather than after hours of replaying.
    let json = args.json.as_ref().and_then(Output::file);
    args.report.as_deref().into_iter().chain(json).try_for_each(writable::expect)?;
    let result = replay::run(args)?;
    deliver(args, &result)?;
    let summary = &result.summary;
    anyhow::ensure!(
        summary.corrupt_blocks == 0,
        "{} of {} verified blocks had wrong bytes; please report this with the command line and the seed {}",
        summary.corrupt_blocks,
        summary.verified_blocks,
        summary.seed
    );
    if let Some(events) = &summary.events {
        anyhow::ensure!(
            events.unpublished + events.lost == 0,
            "of {} events {} were not published and {} are lost: {}",
            events.published + events.unpublished + events.lost,
            events.unpublished,
            events.lost,
            events.trouble.as_deref().unwrap_or("is the server of --events up, and does it take them?")
        );
    }
    Ok(())
}

/// Writes what was asked for: the report, the JSON, and the table for people.
fn deliver(args: &ReplayArgs, result: &ReplayResult) -> Result<()> {
    let json_on_stdout = args.json == Some(Output::Stdout);
    show(&table::render(result), json_on_stdout)?;
    if let Some(path) = &args.report {
        std::fs::write(path, report::render(result))
            .with_context(|| format!("cannot write the report {}", path.display()))?;
        show(&format!("report: {}\n", path.display()), json_on_stdout)?;
    }
    if let Some(output) = &args.json {
        write_json(output, &serde_json::to_string_pretty(&result.summary)?)?;
    }
    Ok(())
}

fn run_disk(command: &disk::DiskCommand) -> Result<()> {
    let json = &command.args().json;
    json.as_ref().and_then(Output::file).map_or(Ok(()), writable::expect)?;
    let found = disk::run(command)?;
    show(&found.text, *json == Some(Output::Stdout))?;
    if let Some(output) = json {
        write_json(output, &serde_json::to_string_pretty(&found.json)?)?;
    }
    found.failed.map_or(Ok(()), |why| Err(anyhow::anyhow!(why)))
}

/// Whatever is wrong here was wrong on the command line.
fn run_layout(command: &layout::LayoutCommand) -> Result<()> {
    let text = layout::run(command).map_err(|error| WrongUsage(explain(&error)))?;
    show(&text, false)
}

fn run_size(args: &SizeArgs) -> Result<()> {
    args.json.as_ref().and_then(Output::file).map_or(Ok(()), writable::expect)?;
    let sizes = size::run(args)?;
    show(&sizes.render(), args.json == Some(Output::Stdout))?;
    match &args.json {
        Some(output) => write_json(output, &sizes.to_json()?),
        None => Ok(()),
    }
}

fn run_doctor(args: &DoctorArgs) -> Result<()> {
    args.json.as_ref().and_then(Output::file).map_or(Ok(()), writable::expect)?;
    args.check()?;
    let report = doctor::examine(args);
    show(&report.render(), args.json == Some(Output::Stdout))?;
    match &args.json {
        Some(output) => write_json(output, &report.to_json()?),
        None => Ok(()),
    }
}

fn write_json(output: &Output, json: &str) -> Result<()> {
    match output {
        Output::Stdout => show(&format!("{json}\n"), false),
        Output::File(path) => std::fs::write(path, format!("{json}\n"))
            .with_context(|| format!("cannot write {}", path.display())),
    }
}

/// Prints text for people: on standard output, unless that carries JSON.
fn show(text: &str, stdout_is_taken: bool) -> Result<()> {
    if stdout_is_taken {
        std::io::stderr().write_all(text.as_bytes()).context("cannot write to standard error")
    } else {
        std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
    }
}

/// Whether whoever read our output went away (`kvbm doctor | head`).
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_reported_once() {
        let cause = std::io::Error::other("disk on fire");
        let error = anyhow::Error::new(cause).context("cannot open d: disk on fire").context("no manager");
        assert_eq!(explain(&error), "no manager: cannot open d: disk on fire");
    }
}
