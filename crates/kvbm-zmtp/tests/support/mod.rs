//! What the tests with the crate `zeromq` share.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use kvbm_zmtp::ZmtpEndpoint;
use std::time::{Duration, Instant};

/// Long enough for any machine; a correct run never waits for it.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Runs a future on a runtime of its own, within [`LIMIT`].
pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, future).await.expect("the test takes too long") })
}

pub(crate) fn anywhere() -> ZmtpEndpoint {
    ZmtpEndpoint::Tcp { host: "127.0.0.1".into(), port: 0 }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + LIMIT
}

pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}
