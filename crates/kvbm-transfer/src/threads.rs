//! Names and starts the threads of a worker.

use crate::error::StartError;
use kvbm_plan::Rank;

pub(crate) fn spawn(
    rank: Rank,
    what: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<std::thread::JoinHandle<()>, StartError> {
    let name = format!("kvbm-{rank}-{what}");
    std::thread::Builder::new()
        .name(name.clone())
        .spawn(body)
        .map_err(|source| StartError::Thread { name, source })
}
