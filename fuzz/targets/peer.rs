#![no_main]

// serde makes room for at most 1 MiB of a list that says to be long, and a message has two lists.
kvbm_fuzz::target!(kvbm_nixl::fuzz::peer, (2 << 20) + (64 << 10), 256);
