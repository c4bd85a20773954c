#![no_main]

// A configuration of a few bytes may name 4,096 layers.
kvbm_fuzz::target!(kvbm::fuzz::model, 2 << 20, 512);
