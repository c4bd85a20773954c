#![no_main]

kvbm_fuzz::target!(kvbm_volume::fuzz::volume_key, 1 << 20, 64);
