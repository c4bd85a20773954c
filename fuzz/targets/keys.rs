#![no_main]

kvbm_fuzz::target!(kvbm_disk::fuzz::keys, 1 << 20, 64);
