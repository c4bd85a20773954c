#![no_main]

kvbm_fuzz::target!(kvbm_transfer::fuzz::geometry, 64 << 10, 64);
