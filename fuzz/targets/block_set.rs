#![no_main]

kvbm_fuzz::target!(kvbm_nixl::fuzz::block_set, 64 << 10, 256);
