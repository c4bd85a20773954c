#![no_main]

kvbm_fuzz::target!(kvbm_disk::fuzz::stripes, 1 << 20, 64);
