// The kernels' arguments. `src/params.rs` writes the same bytes, field by field; keep the two together.
#pragma once
#include "portable.h"

// Threads of every block of threads. Not a constant variable: images would carry it, under a name of their own.
enum : u32 { kThreads = 256 };

// One side of a conversion. Row (i0, i1) of chunk (layer, outer) of KV block b lies at
//   start + base + layer * layer_stride + outer * outer_stride + i0 * stride0 + i1 * stride1
// where start is an entry of `table`, or b * block_stride if there is no table.
struct Side {
  u64 table;         // address of addresses, `entries` for each KV block; 0: none
  u64 base;
  u64 block_stride;
  u64 layer_stride;
  u64 outer_stride;
  u64 stride0;
  u64 stride1;
  u64 entries;       // 1, or one for each chunk
};

// Copies n0 * n1 rows of row_bytes in each chunk of each KV block.
struct RowJob {
  Side from;
  Side to;
  u64 work;          // pieces of work: KV blocks * chunks * tiles
  u32 chunks;        // chunks of a KV block: layers * outers
  u32 outers;
  u32 n0;
  u32 n1;
  u32 row_bytes;
  u32 tiles;         // pieces of work in each chunk
  u32 tile;          // rows: words of a tile. spans: bytes of a piece of a row. tiles: rows along axis 0
  u32 tile1;         // spans: pieces of a row. tiles: rows along axis 1
  u32 tiles0;        // tiles: tiles along axis 0
  u32 pitch;         // tiles: bytes of shared memory for each stretch of tile * row_bytes
};

// Copies pairs of ranges of any lengths.
struct PairJob {
  u64 from;          // address of the sources' addresses
  u64 to;            // address of the destinations' addresses
  u64 bytes;         // address of the lengths
  u64 ends;          // address of the pieces of work of each pair, summed up to and with it
  u64 work;          // pieces of work of all pairs
  u32 pairs;
  u32 tile;          // bytes of a piece of work
};
