#![no_main]

kvbm_fuzz::target!(kvbm_events::fuzz::zmtp, 512 << 10, 256);
