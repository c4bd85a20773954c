#![no_main]

kvbm_fuzz::target!(kvbm_nixl::fuzz::peer, 64 << 10, 256);
