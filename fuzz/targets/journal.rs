#![no_main]

kvbm_fuzz::target!(kvbm_disk::fuzz::journal, 8 << 20, 512);
