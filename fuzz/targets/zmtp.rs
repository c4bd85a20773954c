#![no_main]

kvbm_fuzz::target!(kvbm_zmtp::fuzz::zmtp, 512 << 10, 256);
