#![no_main]

kvbm_fuzz::target!(kvbm_link::fuzz::link, 1 << 20, 256);
