//! Builds the test driver and prints where it is: for programs that load it by `KVBM_CUDA_DRIVER`.

use kvbm_test_driver::build;

fn main() -> std::process::ExitCode {
    match build() {
        Ok(library) => {
            println!("{}", library.display());
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
