//! Runs seeds of the simulator; `cargo xtask sim` builds this and calls it.

#[cfg(kvbm_sim)]
mod entropy;
#[cfg(kvbm_sim)]
mod options;
#[cfg(kvbm_sim)]
mod seeds;

#[cfg(kvbm_sim)]
fn main() -> std::process::ExitCode {
    seeds::main()
}

#[cfg(not(kvbm_sim))]
fn main() -> std::process::ExitCode {
    eprintln!("error: this build has no hooks for a simulation: run `cargo xtask sim`");
    std::process::ExitCode::from(2)
}
