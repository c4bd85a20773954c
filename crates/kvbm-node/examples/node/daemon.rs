//! The daemon: it says ten times a second how its host memory stands.

use crate::{Options, TAKE_OVER};
use kvbm::Tier;
use kvbm_node::{LineTimes, NodeServer};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) fn run(options: &Options) {
    let (config, socket, times) = (options.config(), options.socket(), LineTimes::default());
    let server = match options.name.as_str() {
        TAKE_OVER => NodeServer::take_over(&config, &socket, 4096, times),
        _ => NodeServer::bind(&config, &socket, 4096, times),
    };
    let (server, ended) = (server.unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            server.serve();
            ended.store(true, Ordering::Release);
        });
        while !ended.load(Ordering::Acquire) {
            let status = server.manager().status();
            let tier = &status.tiers[Tier::G2.index()];
            // Blocks that are there, and slots that are neither free nor hold one.
            let kept = tier.inactive + tier.active;
            let busy = u64::from(tier.arriving + tier.active) + tier.transfer_pins;
            let lost = tier.capacity.saturating_sub(tier.free + kept + tier.arriving);
            let line = format!("slots {kept} {busy} {lost}\n");
            // Who started it is gone.
            if std::io::stdout().write_all(line.as_bytes()).is_err() {
                std::process::exit(0);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}
