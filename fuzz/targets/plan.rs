#![no_main]

kvbm_fuzz::target!(kvbm_plan::fuzz::plan, 3 << 20, 256);
