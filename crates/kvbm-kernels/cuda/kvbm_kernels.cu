// Layout conversion of KV blocks: copies of rows with strides that are known at run time, and of pairs of ranges.
//
// A piece of work is what one block of threads does at a time; a grid of any size does them all. Every address is a
// multiple of the word that it is accessed by: the host chooses the kernel by the alignment of all its arguments.
#include "jobs.h"

// Loads in flight in each thread, for words of W bytes.
template <int W> struct InFlight { enum : u32 { value = W == 16 ? 8 : 4 }; };

KVBM_DEVICE u8* chunk_address(const Side& side, u64 block, u32 chunk, u32 layer, u32 outer) {
  u64 start = block * side.block_stride;
  if (side.table) start = ((const u64*)side.table)[block * side.entries + (side.entries > 1 ? chunk : 0)];
  return global((u8*)(start + side.base + layer * side.layer_stride + outer * side.outer_stride));
}

// Where a piece of work lies: its chunk on both sides, and which tile of the chunk it is.
struct Place {
  const u8* from;
  u8* to;
  u32 tile;
};

KVBM_DEVICE Place place_of(const RowJob& job, u64 work) {
  Place place;
  const u64 index = work / job.tiles;
  place.tile = (u32)(work - index * job.tiles);
  const u64 block = index / job.chunks;
  const u32 chunk = (u32)(index - block * job.chunks);
  const u32 layer = chunk / job.outers;
  const u32 outer = chunk - layer * job.outers;
  place.from = chunk_address(job.from, block, chunk, layer, outer);
  place.to = chunk_address(job.to, block, chunk, layer, outer);
  return place;
}

// Rows that are whole words of W bytes. Each thread walks the words of its tile in steps of the block of threads and
// keeps (word, i0, i1) by addition; the only divisions are at the start of a tile.
template <int W> KVBM_DEVICE void copy_rows(const RowJob& job) {
  typedef typename Word<W>::type T;
  enum : u32 { kUnroll = InFlight<W>::value };
  const u32 row_words = job.row_bytes / W;
  const u32 words = job.n0 * job.n1 * row_words;
  const u32 step_rows = kThreads / row_words, step_word = kThreads % row_words;
  const u32 step1 = step_rows / job.n0, step0 = step_rows % job.n0;
  for (u64 work = blockIdx.x; work < job.work; work += gridDim.x) {
    const Place place = place_of(job, work);
    u32 at = place.tile * job.tile + threadIdx.x;
    const u32 rest = words - place.tile * job.tile;
    const u32 end = place.tile * job.tile + (rest < job.tile ? rest : job.tile);
    const u32 row = at / row_words;
    u32 word = at - row * row_words;
    u32 i1 = row / job.n0, i0 = row - i1 * job.n0;
    while (at < end) {
      T held[kUnroll];
      T* target[kUnroll];
#pragma unroll
      for (u32 k = 0; k < kUnroll; ++k) {
        if (at + k * kThreads < end) {
          const u64 inside = (u64)word * W;
          held[k] = *(const T*)(place.from + (i0 * job.from.stride0 + i1 * job.from.stride1 + inside));
          target[k] = (T*)(place.to + (i0 * job.to.stride0 + i1 * job.to.stride1 + inside));
        }
        word += step_word;
        i0 += step0;
        i1 += step1;
        if (word >= row_words) {
          word -= row_words;
          ++i0;
        }
        if (i0 >= job.n0) {
          i0 -= job.n0;
          ++i1;
        }
      }
#pragma unroll
      for (u32 k = 0; k < kUnroll; ++k)
        if (at + k * kThreads < end) *(T*)global((u8*)target[k]) = held[k];
      at += kUnroll * kThreads;
    }
  }
}

// Sixteen bytes that are loaded or stored in words of E bytes.
template <int E> union Vector {
  uint4 whole;
  typename Word<E>::type part[16 / E];
};

// `vectors` vectors at `to`, a multiple of 16, from words of E bytes at `from`.
template <int E> KVBM_DEVICE void copy_vectors(u8* to, const u8* from, u64 vectors, u32 lane, u32 lanes) {
  typedef typename Word<E>::type T;
  for (u64 v = lane; v < vectors; v += lanes) {
    Vector<E> vector;
#pragma unroll
    for (u32 k = 0; k < 16 / E; ++k) vector.part[k] = ((const T*)(from + v * 16))[k];
    *(uint4*)(to + v * 16) = vector.whole;
  }
}

// Any range: bytes up to the first multiple of 16 of the destination, vectors, bytes behind the last. The sources of the
// vectors are loaded in the largest words that their alignment allows.
KVBM_DEVICE void copy_span(u8* to, const u8* from, u64 bytes, u32 lane, u32 lanes) {
  const u64 gap = (16 - ((u64)to & 15)) & 15;
  const u64 head = gap < bytes ? gap : bytes;
  const u64 vectors = (bytes - head) / 16;
  const u64 tail = head + vectors * 16;
  for (u64 i = lane; i < head; i += lanes) to[i] = from[i];
  for (u64 i = tail + lane; i < bytes; i += lanes) to[i] = from[i];
  to += head;
  from += head;
  const u32 skew = (u32)(u64)from & 15;
  if (skew == 0) {
    u64 v = lane;
    for (; v + 3 * (u64)lanes < vectors; v += 4 * (u64)lanes) {
      uint4 held[4];
#pragma unroll
      for (u32 k = 0; k < 4; ++k) held[k] = ((const uint4*)from)[v + k * lanes];
#pragma unroll
      for (u32 k = 0; k < 4; ++k) ((uint4*)to)[v + k * lanes] = held[k];
    }
    for (; v < vectors; v += lanes) ((uint4*)to)[v] = ((const uint4*)from)[v];
  } else if ((skew & 7) == 0) {
    copy_vectors<8>(to, from, vectors, lane, lanes);
  } else if ((skew & 3) == 0) {
    copy_vectors<4>(to, from, vectors, lane, lanes);
  } else if ((skew & 1) == 0) {
    copy_vectors<2>(to, from, vectors, lane, lanes);
  } else {
    copy_vectors<1>(to, from, vectors, lane, lanes);
  }
}

// Long rows of any length and alignment: a warp copies one piece of a row at a time.
KVBM_DEVICE void copy_spans(const RowJob& job) {
  const u32 warps = kThreads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 pieces = job.n0 * job.n1 * job.tile1;
  for (u64 work = blockIdx.x; work < job.work; work += gridDim.x) {
    const Place place = place_of(job, work);
    const u32 piece = place.tile * warps + warp;
    if (piece >= pieces) continue;
    const u32 row = piece / job.tile1;
    const u64 begin = (u64)(piece - row * job.tile1) * job.tile;
    const u64 rest = job.row_bytes - begin;
    const u32 i1 = row / job.n0, i0 = row - i1 * job.n0;
    const u8* from = place.from + (i0 * job.from.stride0 + i1 * job.from.stride1 + begin);
    u8* to = place.to + (i0 * job.to.stride0 + i1 * job.to.stride1 + begin);
    copy_span(to, from, rest < job.tile ? rest : job.tile, lane, 32);
  }
}

// Short rows that are not whole vectors: neighbours along axis 0 in the source, along axis 1 in the destination. A tile
// of rows passes through shared memory, so that both sides are accessed in whole vectors but at the edges. A stretch is
// what is contiguous of a tile: along axis 0 in the source, along axis 1 in the destination. In shared memory a source
// stretch lies as far behind a multiple of 16 as it does in memory. E divides rows and addresses.
template <int E> KVBM_DEVICE void copy_tiles(const RowJob& job) {
  typedef typename Word<E>::type T;
  u8* const stage = kvbm_shared;
  for (u64 work = blockIdx.x; work < job.work; work += gridDim.x) {
    const Place place = place_of(job, work);
    const u32 tile1 = place.tile / job.tiles0, tile0 = place.tile - tile1 * job.tiles0;
    const u32 first0 = tile0 * job.tile, first1 = tile1 * job.tile1;
    const u32 count0 = job.n0 - first0 < job.tile ? job.n0 - first0 : job.tile;
    const u32 count1 = job.n1 - first1 < job.tile1 ? job.n1 - first1 : job.tile1;
    const u8* const from = place.from + (first0 * job.from.stride0 + first1 * job.from.stride1);
    u8* const to = place.to + (first0 * job.to.stride0 + first1 * job.to.stride1);

    const u32 read = count0 * job.row_bytes, read_vectors = (read + 15) / 16 + 1;
    for (u32 v = threadIdx.x; v < count1 * read_vectors; v += kThreads) {
      const u32 stretch = v / read_vectors, vector = v - stretch * read_vectors;
      const u8* const start = from + stretch * job.from.stride1;
      const s32 begin = (s32)(vector * 16) - (s32)((u64)start & 15);
      u8* const held = stage + (stretch * job.pitch + vector * 16);
      if (begin >= 0 && begin + 16 <= (s32)read) {
        *(uint4*)held = *(const uint4*)(start + begin);
      } else {
#pragma unroll
        for (s32 k = 0; k < 16; k += E)
          if (begin + k >= 0 && begin + k < (s32)read) *(T*)(held + k) = *(const T*)(start + (begin + k));
      }
    }
    __syncthreads();

    const u32 written = count1 * job.row_bytes, written_vectors = (written + 15) / 16 + 1;
    for (u32 v = threadIdx.x; v < count0 * written_vectors; v += kThreads) {
      const u32 stretch = v / written_vectors, vector = v - stretch * written_vectors;
      u8* const start = to + stretch * job.to.stride0;
      const s32 begin = (s32)(vector * 16) - (s32)((u64)start & 15);
      if (begin >= (s32)written) continue;
      const u32 first = begin > 0 ? (u32)begin : 0;
      u32 i1 = first / job.row_bytes, inside = first - i1 * job.row_bytes;
      Vector<E> out;
#pragma unroll
      for (s32 k = 0; k < 16; k += E) {
        if (begin + k < 0 || begin + k >= (s32)written) continue;
        const u32 skew = (u32)((u64)(from + i1 * job.from.stride1) & 15);
        out.part[k / E] = *(const T*)(stage + (i1 * job.pitch + skew + stretch * job.row_bytes + inside));
        inside += E;
        if (inside == job.row_bytes) {
          inside = 0;
          ++i1;
        }
      }
      if (begin >= 0 && begin + 16 <= (s32)written) {
        *(uint4*)(start + begin) = out.whole;
      } else {
#pragma unroll
        for (s32 k = 0; k < 16; k += E)
          if (begin + k >= 0 && begin + k < (s32)written) *(T*)(start + (begin + k)) = out.part[k / E];
      }
    }
    // The next tile overwrites what is read here.
    __syncthreads();
  }
}

KVBM_DEVICE void copy_pairs(const PairJob& job) {
  const u64* const ends = (const u64*)job.ends;
  for (u64 work = blockIdx.x; work < job.work; work += gridDim.x) {
    // The first pair that ends behind this piece of work.
    u32 pair = 0, behind = job.pairs - 1;
    while (pair < behind) {
      const u32 middle = pair + (behind - pair) / 2;
      if (ends[middle] > work) behind = middle;
      else pair = middle + 1;
    }
    const u64 begin = (work - (pair ? ends[pair - 1] : 0)) * job.tile;
    const u64 rest = ((const u64*)job.bytes)[pair] - begin;
    const u8* from = global((u8*)((const u64*)job.from)[pair] + begin);
    u8* to = global((u8*)((const u64*)job.to)[pair] + begin);
    copy_span(to, from, rest < job.tile ? rest : job.tile, threadIdx.x, kThreads);
  }
}

KVBM_KERNEL kvbm_rows_16(const RowJob job) { copy_rows<16>(job); }
KVBM_KERNEL kvbm_rows_8(const RowJob job) { copy_rows<8>(job); }
KVBM_KERNEL kvbm_rows_4(const RowJob job) { copy_rows<4>(job); }
KVBM_KERNEL kvbm_rows_2(const RowJob job) { copy_rows<2>(job); }
KVBM_KERNEL kvbm_rows_1(const RowJob job) { copy_rows<1>(job); }
KVBM_KERNEL kvbm_tiles_8(const RowJob job) { copy_tiles<8>(job); }
KVBM_KERNEL kvbm_tiles_4(const RowJob job) { copy_tiles<4>(job); }
KVBM_KERNEL kvbm_tiles_2(const RowJob job) { copy_tiles<2>(job); }
KVBM_KERNEL kvbm_tiles_1(const RowJob job) { copy_tiles<1>(job); }
KVBM_KERNEL kvbm_spans(const RowJob job) { copy_spans(job); }
KVBM_KERNEL kvbm_pairs(const PairJob job) { copy_pairs(job); }
