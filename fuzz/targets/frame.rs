#![no_main]

kvbm_fuzz::target!(kvbm_codec::fuzz::frame, 2 << 20, 16);
