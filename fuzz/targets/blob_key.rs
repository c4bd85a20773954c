#![no_main]

kvbm_fuzz::target!(kvbm_volume::fuzz::key, 64 << 10, 16);
