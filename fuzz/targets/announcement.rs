#![no_main]

kvbm_fuzz::target!(kvbm_nixl::fuzz::announcement, 64 << 10, 256);
