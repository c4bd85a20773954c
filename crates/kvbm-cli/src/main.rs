//! The `kvbm` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvbm_cli::run()
}
