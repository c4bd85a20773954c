//! Remote memory over the real library, which a package index has: the step `nixl`, and
//! `cargo xtask nixl`, whose rounds kill and stop the processes of a small deployment.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde_json::Value;

use crate::json_report;
use crate::python;
use crate::round_options::RoundOptions;
use crate::servers::{Servers, nats_server};
use crate::steps::Outcome;
use crate::test::counted;
use crate::workspace::{FEATURES, Workspace, cargo, output_of, succeed};

/// NIXL's libraries lie in two folders of the wheel; its Python part is not used.
const NIXL: &str = "nixl-cu12==1.5.1";
const LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";

/// What generates the bindings when `nixl-sys` is built.
const LIBCLANG: &str = "libclang==18.1.1";

/// What the build and the tests need.
struct Tools {
    library: PathBuf,
    /// On which managers find each other.
    nats_server: PathBuf,
    /// That, and an S3 server.
    servers: Servers,
    libclang: PathBuf,
    /// Where the compiler keeps headers like `stddef.h`, which the package of libclang lacks.
    headers: String,
}

impl Tools {
    fn fetch(workspace: &Workspace) -> anyhow::Result<Self> {
        let python = Path::new("python3");
        let library = python::folder(workspace, python, "nixl", &[NIXL])?.join(LIBRARY);
        let libclang = python::folder(workspace, python, "libclang", &[LIBCLANG])?.join("clang/native");
        anyhow::ensure!(library.is_file(), "the package {NIXL} has no {LIBRARY}");
        let headers = output_of(Command::new("gcc").arg("-print-file-name=include"))
            .context("a C compiler is needed to build NIXL's bindings: `apt-get install g++`")?;
        let nats_server = nats_server(workspace).context("there is no nats-server")?;
        let servers = Servers::fetch(workspace);
        Ok(Self { library, nats_server, servers, libclang, headers: headers.trim().to_owned() })
    }

    fn name_to(&self, command: &mut Command) {
        self.servers.name_to(command);
        command.env("NIXL_CAPI_LIBRARY", &self.library).env("KVBM_NATS_SERVER", &self.nats_server);
        command.env("LIBCLANG_PATH", &self.libclang);
        command.env("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", self.headers));
    }
}

/// Runs the tests that fail without the real library.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let tools = match Tools::fetch(workspace) {
        Ok(tools) => tools,
        Err(error) => return Err(error).into(),
    };
    let mut command = with_nixl(workspace, &tools, "test");
    for test in ["nixl", "remote_nixl", "disk_nixl", "volume_nixl"] {
        command.args(["--test", test]);
    }
    let tests = match counted(&mut command) {
        Outcome::Passed { tests: 0 } => {
            Outcome::from(Err(anyhow::anyhow!("no test ran: NIXL was not compiled in")))
        }
        outcome => outcome,
    };
    tools.servers.outcome(tests).and(example(workspace, &tools).into())
}

/// Kills and stops managers that read from each other; whether all rounds passed.
pub(crate) fn run(options: &RoundOptions) -> anyhow::Result<bool> {
    let workspace = Workspace::load()?;
    let tools = Tools::fetch(&workspace)?;
    let figures = workspace.target.join("nixl-rounds.json");
    // Of an earlier call, which this one must not be taken for.
    let _ = std::fs::remove_file(&figures);
    let mut command = with_nixl(&workspace, &tools, "test");
    command.args(["--test", "remote_nixl", "--", "--nocapture", "--test-threads", "1", "kills::"]);
    command.env("NIXL_ROUNDS", options.rounds.to_string()).env("NIXL_SEED", options.seed.to_string());
    command.env("NIXL_LONG_STOPS", "1");
    succeed(command.env("NIXL_JSON", &figures))?;
    let text = std::fs::read_to_string(&figures).context("no round ran: NIXL was not compiled in")?;
    let report: Value = serde_json::from_str(&text).context("the report of the rounds is no JSON")?;
    json_report::deliver(options.json.as_deref(), &report)?;
    Ok(true)
}

/// A command of cargo with the features of every test build, so that only what uses NIXL is
/// compiled again.
fn with_nixl(workspace: &Workspace, tools: &Tools, action: &str) -> Command {
    let features = format!("{FEATURES},kvbm-cli/nixl,disaggregated/nixl");
    let mut command = cargo(&workspace.root);
    command.args([action, "--workspace", "--features", &features]);
    tools.name_to(&mut command);
    command
}

/// Prefill and decode in two processes: fails where a byte is wrong or missing.
fn example(workspace: &Workspace, tools: &Tools) -> anyhow::Result<()> {
    succeed(with_nixl(workspace, tools, "build").args(["--bin", "disaggregated"]))?;
    // Decode reads, and then prefill writes.
    for form in [&[][..], &["push"]] {
        let mut example = Command::new(workspace.target.join("debug").join("disaggregated"));
        tools.name_to(&mut example);
        succeed(example.args(form))?;
    }
    Ok(())
}
