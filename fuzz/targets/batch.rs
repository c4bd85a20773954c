#![no_main]

kvbm_fuzz::target!(kvbm_events::fuzz::batch, 64 << 10, 256);
