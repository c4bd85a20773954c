#![no_main]

kvbm_fuzz::target!(kvbm_events::fuzz::engine, 256 << 10, 1024);
