#![no_main]

// serde makes room for at most 1 MiB of a list that says to be long; terms have lists in lists.
kvbm_fuzz::target!(kvbm_node::fuzz::node, 4 << 20, 256);
