//! The step `contracts`: connectors against the classes that an engine publishes, on CPU tensors.

use crate::steps::Outcome;
use crate::workspace::{Profile, Workspace};
use crate::{engine_test, python, wheel};

/// `SGLang`, and what its modules import that the installation of vLLM lacks. None of their
/// requirements is installed: they are for GPUs, and the tests use nothing of them.
const SGLANG: &[&str] = &[
    "sglang==0.5.23",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "orjson==3.13.0",
    "torchvision==0.29.2",
    "traitlets==5.16.1",
    "triton==3.9.0",
    "pytest==9.2.0",
    "iniconfig==2.3.1",
    "packaging==26.3",
    "pluggy==1.7.0",
    "pygments==2.21.0",
];

/// The contract tests, and tests of the package that compare with torch where it is installed.
const TESTS: &[&str] = &["contract_tests", "tests/test_kernels.py", "tests/test_tensors.py"];

/// Runs the tests over the installed wheel, with the torch of the installation of vLLM.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let prepared = || {
        let interpreter = engine_test::environment(workspace, Profile::Dev)?;
        let engine = python::folder(workspace, &interpreter, "sglang-0.5.23", SGLANG)?;
        anyhow::Ok((interpreter, [engine]))
    };
    match prepared() {
        Ok((interpreter, path)) => wheel::tests(workspace, &interpreter, &path, TESTS, &[]),
        Err(error) => Err(error).into(),
    }
}
