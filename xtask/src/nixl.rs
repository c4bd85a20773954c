//! The step `nixl`: remote memory over the real library, which a package index has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::python;
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
        Ok(Self { library, libclang, headers: headers.trim().to_owned() })
    }

    fn name_to(&self, command: &mut Command) {
        command.env("NIXL_CAPI_LIBRARY", &self.library);
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
    let tests = match counted(command.args(["--test", "nixl", "--test", "remote_nixl"])) {
        Outcome::Passed { tests: 0 } => {
            Outcome::from(Err(anyhow::anyhow!("no test ran: NIXL was not compiled in")))
        }
        outcome => outcome,
    };
    tests.and(example(workspace, &tools).into())
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
    let mut example = Command::new(workspace.target.join("debug").join("disaggregated"));
    tools.name_to(&mut example);
    succeed(&mut example)
}
