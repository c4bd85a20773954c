#![no_main]

kvbm_fuzz::target!(kvbm_events::fuzz::snapshot, 64 << 10, 256);
