//! The emulated device against the conformance suite, quiet and under random delays.
#![cfg(not(miri))] // memfd and mmap of shared memory do not exist there.

use std::sync::Arc;
use std::time::Duration;

use kvbm_device::{Device, EmulatedConfig, EmulatedDevice, RandomDelays, TransferModel, conformance};

fn check(config: &EmulatedConfig) {
    conformance::run(&|| {
        let device: Arc<dyn Device> = Arc::new(EmulatedDevice::new(config.clone()).expect("address space"));
        device
    });
}

#[test]
fn emulated_device_conforms() {
    check(&EmulatedConfig { memory_bytes: 64 << 20, ..EmulatedConfig::default() });
}

#[test]
fn emulated_device_conforms_on_the_reference_model() {
    let model = TransferModel::reference();
    check(&EmulatedConfig { memory_bytes: 64 << 20, model, ..EmulatedConfig::default() });
}

#[test]
fn emulated_device_conforms_under_random_delays_and_short_queues() {
    for seed in 0..5 {
        let delays = RandomDelays { seed, max: Duration::from_micros(200) };
        check(&EmulatedConfig {
            memory_bytes: 64 << 20,
            queue_limit: 256,
            random_delays: Some(delays),
            ..EmulatedConfig::default()
        });
    }
}
