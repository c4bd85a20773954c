#![no_main]

kvbm_fuzz::target!(kvbm_volume::fuzz::object, 64 << 10, 16);
