#![no_main]

// The head's buffer, and JSON in memory: a value of 32 bytes may stand in two bytes of text.
kvbm_fuzz::target!(kvbm::fuzz::request, 256 << 10, 512);
